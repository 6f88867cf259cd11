#pragma once

#ifdef PGPT_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "backend.h"
#include "pgpt/base/cuda.h"

namespace pgpt::comm {

/// Throws DeviceError for a failed operation, or CommError when it failed because a rank is lost.
[[noreturn]] void throw_failure(const BackendGroup& group, const char* operation, uint64_t sequence,
                                const std::exception& error);

/// The stream that one communicator's operations run on, ordered with the caller's stream and seen by the watchdog.
class DeviceStream {
 public:
  /// Takes a stream of the current device.
  DeviceStream(BackendGroupPtr group, bool high_priority);

  [[nodiscard]] c10::DeviceIndex device() const { return stream_.device_index(); }
  [[nodiscard]] cudaStream_t get() const { return stream_.stream(); }

  /// Runs `enqueue` with this stream as the current one, after all that the caller's current stream holds; skipped when
  /// the first tensor, if there is one, is empty. The handle keeps the tensors and makes the waiting stream wait for
  /// the end. Throws as `throw_failure` when `enqueue` fails.
  Pending launch(const char* operation, std::vector<at::Tensor> tensors, const std::function<void()>& enqueue);

 private:
  BackendGroupPtr group_;
  c10::cuda::CUDAStream stream_;
  cuda::Event ready_;
};

}  // namespace pgpt::comm

#endif

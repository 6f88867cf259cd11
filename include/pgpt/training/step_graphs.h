#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

namespace pgpt::training {

/// CUDA graphs of whole training steps (--cuda-graph-impl full_iteration), one for each number of micro-batches; they
/// share one memory pool, since only one runs at a time.
///
/// Capture needs a stream of its own, and cuBLAS keeps a workspace for each stream: from construction to destruction
/// that stream is the calling thread's current one, so that steps before the capture use it too.
class StepGraphs {
 public:
  explicit StepGraphs(at::Device device);
  ~StepGraphs();
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;

  /// Runs `work`, device work on the current stream that reads and writes the same tensors every time and waits for
  /// nothing: captured at the first call with this key, replayed at every one. Libraries and communicators that it uses
  /// must have been used before, since they set themselves up then. Throws DeviceError when the work cannot be
  /// captured.
  void run(std::int64_t key, const std::function<void()>& work);
  [[nodiscard]] bool holds(std::int64_t key) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pgpt::training

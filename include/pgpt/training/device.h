#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "pgpt/comm/launch.h"
#include "pgpt/config/config.h"
#include "pgpt/training/training_log.h"

namespace pgpt::training {

/// The device of this rank: the GPU of its local rank where one is visible (with gloo several ranks may share one),
/// else the CPU. Makes it current. Throws ConfigError when NCCL has fewer GPUs than local ranks.
[[nodiscard]] at::Device select_device(const config::Config& config, const comm::LaunchEnvironment& environment);

/// Sets the number of CPU threads: OMP_NUM_THREADS if set, else allowed cores / local ranks, at least 1. Returns it.
int configure_threads(const comm::LaunchEnvironment& environment);

/// Numerical switches of libtorch that every run fixes: no TF32, reduced-precision sums inside GEMMs as configured,
/// determinism when asked for.
void configure_numerics(const config::Config& config);

/// Waits until the device has finished all queued work.
void synchronize(at::Device device);

/// The values of a device tensor on their way to the host.
class HostCopy {
 public:
  /// Queues the copy on the current stream; the tensor may be changed by work queued later.
  explicit HostCopy(const at::Tensor& values);
  /// The values, on the CPU; waits until the copy has happened.
  [[nodiscard]] const at::Tensor& wait();
  /// Device time in milliseconds from an earlier copy of the same GPU to this one; both must have been waited for.
  /// Nothing on a CPU.
  [[nodiscard]] std::optional<double> milliseconds_since(const HostCopy& earlier) const;

 private:
  at::Tensor host_;
  std::shared_ptr<void> arrived_;  // CUDA event
};

/// Bytes held by the allocator of a GPU, or the resident set of this process on a CPU.
struct MemoryUse {
  std::int64_t allocated = 0, max_allocated = 0, reserved = 0, max_reserved = 0, allocations = 0;
};
[[nodiscard]] MemoryUse memory_use(at::Device device);

}  // namespace pgpt::training

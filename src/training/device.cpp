#include "pgpt/training/device.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "pgpt/base/error.h"
#include "pgpt/comm/world.h"
#ifdef PGPT_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include "pgpt/base/cuda.h"
#endif

namespace pgpt::training {

at::Device select_device(const config::Config& config, const comm::LaunchEnvironment& environment) {
  const int gpus = comm::visible_gpus();
  comm::check_device_assignment(
      environment,
      config.parallel.backend == config::Backend::kNccl ? comm::BackendKind::kNccl : comm::BackendKind::kGloo, gpus);
  if (gpus == 0) return at::kCPU;
#ifdef PGPT_WITH_CUDA
  const auto index = static_cast<c10::DeviceIndex>(environment.local_rank % gpus);
  c10::cuda::set_device(index);
  return at::Device(at::kCUDA, index);
#else
  return at::kCPU;
#endif
}

int configure_threads(const comm::LaunchEnvironment& environment) {
  int threads = 1;
  if (std::getenv("OMP_NUM_THREADS") != nullptr) {
    threads = at::get_num_threads();
  } else {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    const int cores = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
    threads = std::max(1, cores / std::max(1, environment.local_world_size));
    at::set_num_threads(threads);
  }
  return threads;
}

void configure_numerics(const config::Config& config) {
  at::Context& context = at::globalContext();
  context.setAllowTF32CuBLAS(false);
  context.setAllowTF32CuDNN(false);
  context.setAllowBF16ReductionCuBLAS(config.training.reduced_precision_matmul);
  context.setAllowFP16ReductionCuBLAS(config.training.reduced_precision_matmul);
  if (config.training.deterministic) {
    ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);
    context.setDeterministicAlgorithms(true, /*warn_only=*/false);
    context.setDeterministicFillUninitializedMemory(false);
  }
}

void synchronize(at::Device device) {
#ifdef PGPT_WITH_CUDA
  if (device.is_cuda()) PGPT_CUDA_CHECK(cudaDeviceSynchronize());
#else
  (void)device;
#endif
}

HostCopy::HostCopy(const at::Tensor& values) {
  host_ = at::empty(values.sizes(), values.options().device(at::kCPU).pinned_memory(values.is_cuda()));
  host_.copy_(values, /*non_blocking=*/true);
#ifdef PGPT_WITH_CUDA
  if (values.is_cuda()) {
    auto event = std::make_shared<cuda::Event>(/*timing=*/true);
    event->record(at::cuda::getCurrentCUDAStream().stream());
    arrived_ = std::move(event);
  }
#endif
}

const at::Tensor& HostCopy::wait() {
#ifdef PGPT_WITH_CUDA
  if (arrived_) static_cast<const cuda::Event*>(arrived_.get())->synchronize();
#endif
  return host_;
}

std::optional<double> HostCopy::milliseconds_since(const HostCopy& earlier) const {
#ifdef PGPT_WITH_CUDA
  if (arrived_ && earlier.arrived_) {
    return static_cast<const cuda::Event*>(arrived_.get())
        ->milliseconds_since(*static_cast<const cuda::Event*>(earlier.arrived_.get()));
  }
#endif
  (void)earlier;
  return std::nullopt;
}

MemoryUse memory_use(at::Device device) {
  MemoryUse use;
#ifdef PGPT_WITH_CUDA
  if (device.is_cuda()) {
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
    const auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    use.allocated = stats.allocated_bytes[all].current;
    use.max_allocated = stats.allocated_bytes[all].peak;
    use.reserved = stats.reserved_bytes[all].current;
    use.max_reserved = stats.reserved_bytes[all].peak;
    use.allocations = stats.allocation[all].current;
    return use;
  }
#else
  (void)device;
#endif
  std::ifstream statm("/proc/self/statm");
  std::int64_t total_pages = 0;
  std::int64_t resident_pages = 0;
  statm >> total_pages >> resident_pages;
  use.allocated = use.reserved = resident_pages * ::sysconf(_SC_PAGESIZE);
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) == 0) use.max_allocated = use.max_reserved = usage.ru_maxrss * 1024;
  return use;
}

}  // namespace pgpt::training

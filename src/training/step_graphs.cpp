#include "pgpt/training/step_graphs.h"

#include "pgpt/base/error.h"
#include "pgpt/training/library_errors.h"
#ifdef PGPT_WITH_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include "pgpt/base/cuda.h"
#endif

namespace pgpt::training {

#ifdef PGPT_WITH_CUDA

struct StepGraphs::Impl {
  explicit Impl(at::Device device)
      : stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())),
        pool(at::cuda::graph_pool_handle()) {
    // What the caller has queued comes first.
    PGPT_CUDA_CHECK(cudaDeviceSynchronize());
    current.emplace(stream);
  }

  c10::cuda::CUDAStream stream;
  at::cuda::MempoolId_t pool;
  std::optional<c10::cuda::CUDAStreamGuard> current;
  std::map<std::int64_t, std::unique_ptr<at::cuda::CUDAGraph>> graphs;
};

StepGraphs::StepGraphs(at::Device device) {
  PGPT_ASSERT(device.is_cuda(), "CUDA graphs on ", device);
  impl_ = std::make_unique<Impl>(device);
}

void StepGraphs::run(std::int64_t key, const std::function<void()>& work) {
  std::unique_ptr<at::cuda::CUDAGraph>& graph = impl_->graphs[key];
  if (!graph) {
    // Activations of the steps so far lie in cached blocks that the graph's own pool cannot use.
    PGPT_CUDA_CHECK(cudaDeviceSynchronize());
    c10::cuda::CUDACachingAllocator::emptyCache();
    auto captured = std::make_unique<at::cuda::CUDAGraph>();
    try {
      // Other threads go on calling CUDA (loader, checkpoint writer, the communication watchdog).
      captured->capture_begin(impl_->pool, cudaStreamCaptureModeThreadLocal);
      work();
      captured->capture_end();
    } catch (const std::exception& error) {
      try {
        captured->capture_end();  // what follows must find the stream usable
      } catch (const std::exception&) {
        // The capture was broken already.
      }
      throw DeviceError(concat("--cuda-graph-impl full_iteration: a training step of ", key,
                               " micro-batches could not be captured; run without it. ", translate(error).what()));
    }
    graph = std::move(captured);
  }
  graph->replay();
}

bool StepGraphs::holds(std::int64_t key) const { return impl_->graphs.count(key) != 0; }

#else

struct StepGraphs::Impl {};

StepGraphs::StepGraphs(at::Device device) { PGPT_ASSERT(false, "CUDA graphs on ", device); }
void StepGraphs::run(std::int64_t /*key*/, const std::function<void()>& /*work*/) {}
bool StepGraphs::holds(std::int64_t /*key*/) const { return false; }

#endif

StepGraphs::~StepGraphs() = default;

}  // namespace pgpt::training

#include "device_stream.h"

#ifdef PGPT_WITH_CUDA

#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAGuard.h>

#include <ATen/cuda/CUDAGraphsUtils.cuh>

namespace pgpt::comm {
namespace {

/// Runs on the watchdog's thread, which must neither open a context on device 0 nor break a graph capture in another
/// thread.
bool poll(const cuda::Event& event, int device) {
  thread_local bool prepared = false;
  if (!prepared) {
    PGPT_CUDA_CHECK(cudaSetDevice(device));
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    PGPT_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    prepared = true;
  }
  return event.done();
}

/// An operation on the communicator's stream.
struct DeviceState final : Pending::State {
  std::shared_ptr<cuda::Event> end;
  std::vector<at::Tensor> kept;

  void finish() override { end->block(c10::cuda::getCurrentCUDAStream().stream()); }
};

}  // namespace

void throw_failure(const BackendGroup& group, const char* operation, uint64_t sequence, const std::exception& error) {
  const auto found = group.watchdog->explain(*group.record, operation, sequence, brief(error));
  if (found.rank_lost) throw CommError(found.text);
  throw DeviceError(found.text);
}

DeviceStream::DeviceStream(BackendGroupPtr group, bool high_priority)
    : group_(std::move(group)), stream_(c10::cuda::getStreamFromPool(high_priority)) {}

Pending DeviceStream::launch(const char* operation, std::vector<at::Tensor> tensors,
                             const std::function<void()>& enqueue) {
  const at::NoGradGuard no_grad;
  const cuda::NvtxRange range(operation);
  const uint64_t sequence = group_->next();
  auto state = std::make_unique<DeviceState>();
  state->end = std::make_shared<cuda::Event>();
  for (const auto& tensor : tensors) {
    PGPT_ASSERT(tensor.is_cuda() && tensor.device().index() == device(), "tensor on ", tensor.device(),
                " in a group of cuda:", static_cast<int>(device()));
  }
  const c10::cuda::CUDAGuard guard(device());
  const bool nothing = !tensors.empty() && tensors.front().numel() == 0;
  state->kept = std::move(tensors);
  // Inputs are written on the current stream: the communication stream starts after that.
  ready_.record(c10::cuda::getCurrentCUDAStream().stream());
  ready_.block(get());
  if (!nothing) {
    const Watchdog::Section section(group_->watchdog, group_->record, operation, sequence);
    try {
      const c10::cuda::CUDAStreamGuard on_stream(stream_);
      enqueue();
    } catch (const std::logic_error&) {
      throw;
    } catch (const std::exception& error) {
      throw_failure(*group_, operation, sequence, error);
    }
  }
  state->end->record(get());
  if (at::cuda::currentStreamCaptureStatusMayInitCtx() == at::cuda::CaptureStatus::None) {
    const int index = device();
    group_->watchdog->watch_device_work(group_->record, operation, sequence,
                                        [end = state->end, index] { return poll(*end, index); });
  }
  return Pending(std::move(state));
}

}  // namespace pgpt::comm

#endif

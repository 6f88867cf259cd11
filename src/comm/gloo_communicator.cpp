#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "backend.h"
#include "pgpt/base/error.h"

#ifdef PGPT_WITH_CUDA
#include <c10/cuda/CUDAStream.h>

#include <ATen/cuda/CUDAGraphsUtils.cuh>
#endif

namespace pgpt::comm {

struct GlooDevice::Impl {
  std::shared_ptr<::gloo::transport::Device> device;
};

GlooDevice::GlooDevice(const std::string& address) : impl(std::make_shared<Impl>()) {
  impl->device = address.empty() ? c10d::ProcessGroupGloo::createDefaultDevice()
                                 : c10d::ProcessGroupGloo::createDeviceForHostname(address);
}

BackendGroupPtr open_gloo_group(const GroupSetup& setup, const GlooDevice& device) {
  auto group = std::make_shared<BackendGroup>();
  group->record = setup.record;
  group->watchdog = setup.watchdog;
  group->timeout = setup.timeout;
  auto options = c10d::ProcessGroupGloo::Options::create(setup.connect_timeout);
  options->devices = {device.impl->device};
  options->threads = 1;
  options->group_name = setup.record->name;
  const Watchdog::Section section(setup.watchdog, setup.record, "creation", 0);
  try {
    group->backend = c10::make_intrusive<c10d::ProcessGroupGloo>(setup.store, setup.record->rank,
                                                                 static_cast<int>(setup.record->ranks.size()), options);
  } catch (const std::exception& error) {
    throw group->failed("creation", 0, error);
  }
  return group;
}

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

c10d::ReduceOp reduce_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      break;
  }
  return c10d::ReduceOp::SUM;
}

/// A collective on gloo's thread; `scale` multiplies `result` once it is done (the average).
struct GlooState final : Pending::State {
  BackendGroupPtr group;
  const char* operation = "";
  uint64_t sequence = 0;
  WorkPtr work;  ///< null when there was nothing to send
  std::vector<at::Tensor> kept;
  at::Tensor result;
  double scale = 1;

  void finish() override {
    if (work) {
      const Watchdog::Section section(group->watchdog, group->record, operation, sequence);
      try {
        work->wait();
      } catch (const std::exception& error) {
        throw group->failed(operation, sequence, error);
      }
    }
    if (scale != 1) {
      const at::NoGradGuard no_grad;
      result.mul_(scale);
    }
  }
};

class GlooCommunicator final : public Communicator {
 public:
  explicit GlooCommunicator(BackendGroupPtr group) : group_(std::move(group)) {}

  [[nodiscard]] int rank() const override { return group_->record->rank; }
  [[nodiscard]] int size() const override { return static_cast<int>(group_->record->ranks.size()); }
  [[nodiscard]] const std::string& name() const override { return group_->record->name; }
  [[nodiscard]] const std::vector<int>& global_ranks() const override { return group_->record->ranks; }

  Pending all_gather(at::Tensor output, at::Tensor input) override {
    check_gather(output, input, size());
    auto state = begin("all_gather", {output, input});
    if (input.numel() == 0) return Pending(std::move(state));
    at::Tensor out = as_bytes(output);
    at::Tensor in = as_bytes(input);
    c10d::AllgatherOptions options;
    options.timeout = group_->timeout;
    return launch(std::move(state), [&](c10d::Backend& backend) { return backend._allgather_base(out, in, options); });
  }

  Pending reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    check_scatter(output, input, size(), op);
    auto state = begin("reduce_scatter", {output, input});
    if (input.numel() == 0) return Pending(std::move(state));
    if (op == ReduceOp::kAverage) average(*state, output);
    at::Tensor out = output.view({-1});
    at::Tensor in = input.view({-1});
    c10d::ReduceScatterOptions options;
    options.reduceOp = c10d::ReduceOp::SUM;
    options.timeout = group_->timeout;
    return launch(std::move(state),
                  [&](c10d::Backend& backend) { return backend._reduce_scatter_base(out, in, options); });
  }

  Pending all_reduce(at::Tensor tensor, ReduceOp op) override {
    check_reduce(tensor, op);
    auto state = begin("all_reduce", {tensor});
    if (tensor.numel() == 0) return Pending(std::move(state));
    if (op == ReduceOp::kAverage) average(*state, tensor);
    std::vector<at::Tensor> tensors{tensor.view({-1})};
    c10d::AllreduceOptions options;
    options.reduceOp = reduce_op(op);
    options.timeout = group_->timeout;
    return launch(std::move(state), [&](c10d::Backend& backend) { return backend.allreduce(tensors, options); });
  }

  Pending broadcast(at::Tensor tensor, int root) override {
    check_contiguous(tensor);
    PGPT_ASSERT(root >= 0 && root < size(), "root ", root, " in a group of ", size());
    auto state = begin("broadcast", {tensor});
    if (tensor.numel() == 0) return Pending(std::move(state));
    std::vector<at::Tensor> tensors{as_bytes(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.timeout = group_->timeout;
    return launch(std::move(state), [&](c10d::Backend& backend) { return backend.broadcast(tensors, options); });
  }

  Pending all_to_all(at::Tensor output, at::Tensor input) override {
    check_same_size(output, input, size());
    auto state = begin("all_to_all", {output, input});
    if (input.numel() == 0) return Pending(std::move(state));
    at::Tensor out = as_bytes(output);
    at::Tensor in = as_bytes(input);
    std::vector<int64_t> equal_parts;
    c10d::AllToAllOptions options;
    options.timeout = group_->timeout;
    return launch(std::move(state), [&](c10d::Backend& backend) {
      return backend.alltoall_base(out, in, equal_parts, equal_parts, options);
    });
  }

  Pending send(at::Tensor tensor, int peer) override { return move(std::move(tensor), peer, "send"); }
  Pending receive(at::Tensor tensor, int peer) override { return move(std::move(tensor), peer, "receive"); }

  void barrier() override {
    auto state = begin("barrier", {});
    c10d::BarrierOptions options;
    options.timeout = group_->timeout;
    launch(std::move(state), [&](c10d::Backend& backend) { return backend.barrier(options); }).wait();
  }

 private:
  std::unique_ptr<GlooState> begin(const char* operation, std::vector<at::Tensor> kept) {
    auto state = std::make_unique<GlooState>();
    state->group = group_;
    state->operation = operation;
    state->sequence = group_->next();
    state->kept = std::move(kept);
    return state;
  }

  /// The average is the sum, then one multiplication by 1/size in the tensor's dtype (exact for powers of two).
  void average(GlooState& state, const at::Tensor& result) const {
    state.result = result;
    state.scale = 1.0 / size();
  }

  template <class Call>
  Pending launch(std::unique_ptr<GlooState> state, const Call& call) {
    try {
      const Watchdog::Section section(group_->watchdog, group_->record, state->operation, state->sequence);
      state->work = call(group_->open());
    } catch (const std::logic_error&) {
      throw;
    } catch (const std::exception& error) {
      throw group_->failed(state->operation, state->sequence, error);
    }
    return Pending(std::move(state));
  }

  Pending move(at::Tensor tensor, int peer, const char* operation) {
    check_contiguous(tensor);
    PGPT_ASSERT(peer >= 0 && peer < size() && peer != rank(), "peer ", peer, " of rank ", rank(), " in a group of ",
                size());
    auto state = begin(operation, {tensor});
    if (tensor.numel() == 0) return Pending(std::move(state));
    std::vector<at::Tensor> tensors{as_bytes(tensor)};
    const bool sends = operation[0] == 's';
    return launch(std::move(state), [&](c10d::Backend& backend) {
      return sends ? backend.send(tensors, peer, 0) : backend.recv(tensors, peer, 0);
    });
  }

  BackendGroupPtr group_;
};

/// Several ranks on one GPU: CUDA tensors through pinned host memory, complete at launch.
class StagedCommunicator final : public Communicator {
 public:
  explicit StagedCommunicator(BackendGroupPtr group) : inner_(std::move(group)) {}

  [[nodiscard]] int rank() const override { return inner_.rank(); }
  [[nodiscard]] int size() const override { return inner_.size(); }
  [[nodiscard]] const std::string& name() const override { return inner_.name(); }
  [[nodiscard]] const std::vector<int>& global_ranks() const override { return inner_.global_ranks(); }

  Pending all_gather(at::Tensor output, at::Tensor input) override {
    check_gather(output, input, size());
    const at::Tensor out = host_like(output);
    inner_.all_gather(out, to_host(input)).wait();
    return copied_back(output, out);
  }
  Pending reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    check_scatter(output, input, size(), op);
    const at::Tensor out = host_like(output);
    inner_.reduce_scatter(out, to_host(input), op).wait();
    return copied_back(output, out);
  }
  Pending all_reduce(at::Tensor tensor, ReduceOp op) override {
    check_reduce(tensor, op);
    const at::Tensor host = to_host(tensor);
    inner_.all_reduce(host, op).wait();
    return copied_back(tensor, host);
  }
  Pending broadcast(at::Tensor tensor, int root) override {
    check_contiguous(tensor);
    const at::Tensor host = to_host(tensor);
    inner_.broadcast(host, root).wait();
    return copied_back(tensor, host);
  }
  Pending all_to_all(at::Tensor output, at::Tensor input) override {
    check_same_size(output, input, size());
    const at::Tensor out = host_like(output);
    inner_.all_to_all(out, to_host(input)).wait();
    return copied_back(output, out);
  }
  /// Not waited for at launch: two ranks that send to each other first would wait forever.
  Pending send(at::Tensor tensor, int peer) override {
    check_contiguous(tensor);
    return inner_.send(to_host(tensor), peer);
  }
  Pending receive(at::Tensor tensor, int peer) override {
    check_contiguous(tensor);
    const at::Tensor host = host_like(tensor);
    auto state = std::make_unique<Received>();
    state->inner = inner_.receive(host, peer);
    state->device = tensor;
    state->host = host;
    return Pending(std::move(state));
  }
  void barrier() override {
    synchronize_device();
    inner_.barrier();
  }

 private:
  struct Done final : Pending::State {
    void finish() override {}
  };
  struct Received final : Pending::State {
    Pending inner;
    at::Tensor device, host;
    void finish() override {
      inner.wait();
      const at::NoGradGuard no_grad;
      device.copy_(host);
    }
  };

  static void refuse_capture() {
#ifdef PGPT_WITH_CUDA
    PGPT_CHECK(ConfigError, at::cuda::currentStreamCaptureStatusMayInitCtx() == at::cuda::CaptureStatus::None,
               "CUDA graphs cannot hold collectives of --distributed-backend gloo; turn CUDA graphs off or use nccl");
#endif
  }
  static at::Tensor host_like(const at::Tensor& tensor) {
    refuse_capture();
    return at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(tensor.is_cuda()));
  }
  static at::Tensor to_host(const at::Tensor& tensor) {
    const at::NoGradGuard no_grad;
    at::Tensor host = host_like(tensor);
    host.copy_(tensor);
    return host;
  }
  /// A blocking copy on the current stream; the handle stays active until `wait`, as on the other backends.
  static Pending copied_back(const at::Tensor& tensor, const at::Tensor& host) {
    const at::NoGradGuard no_grad;
    tensor.copy_(host);
    return Pending(std::make_unique<Done>());
  }

  GlooCommunicator inner_;
};

}  // namespace

std::unique_ptr<Communicator> make_gloo_communicator(BackendGroupPtr group) {
  return std::make_unique<GlooCommunicator>(std::move(group));
}

std::unique_ptr<Communicator> make_staged_communicator(BackendGroupPtr group) {
  return std::make_unique<StagedCommunicator>(std::move(group));
}

}  // namespace pgpt::comm

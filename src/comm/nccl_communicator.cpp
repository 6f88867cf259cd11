#include <cstdlib>

#include "backend.h"
#include "device_stream.h"
#include "pgpt/base/cuda.h"
#include "pgpt/base/error.h"
#include "pgpt/comm/world.h"

#ifdef PGPT_WITH_CUDA

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace pgpt::comm {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// NCCL's average multiplies by 1/size before the sum; gloo's after it. Equal bits for powers of two unless values
/// underflow.
c10d::ReduceOp reduce_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kAverage:
      return c10d::ReduceOp::AVG;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kSum:
      break;
  }
  return c10d::ReduceOp::SUM;
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const BackendGroupPtr& group, bool high_priority) : group_(group), stream_(group, high_priority) {
    token_ = at::zeros({1}, at::TensorOptions().device(at::kCUDA, stream_.device()).dtype(at::kFloat));
    barrier();  // the first collective sets up connections: failures and memory show now
  }

  [[nodiscard]] int rank() const override { return group_->record->rank; }
  [[nodiscard]] int size() const override { return static_cast<int>(group_->record->ranks.size()); }
  [[nodiscard]] const std::string& name() const override { return group_->record->name; }
  [[nodiscard]] const std::vector<int>& global_ranks() const override { return group_->record->ranks; }

  Pending all_gather(at::Tensor output, at::Tensor input) override {
    check_gather(output, input, size());
    return launch("all_gather", {output, input}, [&](c10d::Backend& backend) {
      at::Tensor out = as_bytes(output);
      at::Tensor in = as_bytes(input);
      c10d::AllgatherOptions options;
      options.asyncOp = false;
      return backend._allgather_base(out, in, options);
    });
  }

  Pending reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    check_scatter(output, input, size(), op);
    return launch("reduce_scatter", {output, input}, [&](c10d::Backend& backend) {
      at::Tensor out = output.view({-1});
      at::Tensor in = input.view({-1});
      c10d::ReduceScatterOptions options;
      options.reduceOp = reduce_op(op);
      options.asyncOp = false;
      return backend._reduce_scatter_base(out, in, options);
    });
  }

  Pending all_reduce(at::Tensor tensor, ReduceOp op) override {
    check_reduce(tensor, op);
    return launch("all_reduce", {tensor}, [&](c10d::Backend& backend) {
      std::vector<at::Tensor> tensors{tensor.view({-1})};
      c10d::AllreduceOptions options;
      options.reduceOp = reduce_op(op);
      options.asyncOp = false;
      return backend.allreduce(tensors, options);
    });
  }

  Pending broadcast(at::Tensor tensor, int root) override {
    check_contiguous(tensor);
    PGPT_ASSERT(root >= 0 && root < size(), "root ", root, " in a group of ", size());
    return launch("broadcast", {tensor}, [&](c10d::Backend& backend) {
      std::vector<at::Tensor> tensors{as_bytes(tensor)};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      options.asyncOp = false;
      return backend.broadcast(tensors, options);
    });
  }

  Pending all_to_all(at::Tensor output, at::Tensor input) override {
    check_same_size(output, input, size());
    return launch("all_to_all", {output, input}, [&](c10d::Backend& backend) {
      at::Tensor out = as_bytes(output);
      at::Tensor in = as_bytes(input);
      std::vector<int64_t> equal_parts;
      c10d::AllToAllOptions options;
      options.asyncOp = false;
      return backend.alltoall_base(out, in, equal_parts, equal_parts, options);
    });
  }

  Pending send(at::Tensor tensor, int peer) override { return move(std::move(tensor), peer, "send"); }
  Pending receive(at::Tensor tensor, int peer) override { return move(std::move(tensor), peer, "receive"); }

  void barrier() override {
    all_reduce(token_, ReduceOp::kSum).wait();
    const Watchdog::Section section(group_->watchdog, group_->record, "barrier", group_->record->sequence);
    synchronize_device();
  }

 private:
  template <class Call>
  Pending launch(const char* operation, std::vector<at::Tensor> tensors, const Call& call) {
    return stream_.launch(operation, std::move(tensors), [&] {
      // Point-to-point calls use a stream of torch's own and return a Work; the others run here and return none.
      if (const WorkPtr work = call(group_->open())) work->wait();
    });
  }

  Pending move(at::Tensor tensor, int peer, const char* operation) {
    check_contiguous(tensor);
    PGPT_ASSERT(peer >= 0 && peer < size() && peer != rank(), "peer ", peer, " of rank ", rank(), " in a group of ",
                size());
    const bool sends = operation[0] == 's';
    return launch(operation, {tensor}, [&](c10d::Backend& backend) {
      std::vector<at::Tensor> tensors{as_bytes(tensor)};
      return sends ? backend.send(tensors, peer, 0) : backend.recv(tensors, peer, 0);
    });
  }

  BackendGroupPtr group_;
  DeviceStream stream_;
  at::Tensor token_;
};

}  // namespace

BackendGroupPtr open_nccl_group(const GroupSetup& setup) {
  auto group = std::make_shared<BackendGroup>();
  group->record = setup.record;
  group->watchdog = setup.watchdog;
  auto options = c10d::ProcessGroupNCCL::Options::create(setup.high_priority);
  options->timeout = setup.timeout;
  options->config.blocking = 1;  // a bound device would otherwise select NCCL's non-blocking mode
  options->group_name = setup.record->name;
  for (const int rank : setup.record->ranks) options->global_ranks_in_group.push_back(static_cast<uint64_t>(rank));
  const Watchdog::Section section(setup.watchdog, setup.record, "creation", 0);
  try {
    auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(setup.store, setup.record->rank,
                                                               static_cast<int>(setup.record->ranks.size()), options);
    const at::Device device(at::kCUDA, c10::cuda::current_device());
    // With a bound device sends and receives use the group's own communicator instead of opening one for each pair.
    backend->setBoundDeviceId(device);
    backend->eagerConnectSingleDevice(device);
    group->backend = backend;
  } catch (const std::exception& error) {
    throw_failure(*group, "creation", 0, error);
  }
  return group;
}

std::unique_ptr<Communicator> make_nccl_communicator(BackendGroupPtr group, bool high_priority) {
  return std::make_unique<NcclCommunicator>(group, high_priority);
}

void silence_torch_nccl_watchdog() {
  // torchrun sets the first one itself, so values from outside are overwritten.
  for (const char* name : {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT",
                           "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_PROPAGATE_ERROR",
                           "TORCH_NCCL_DESYNC_DEBUG", "TORCH_NCCL_RETHROW_CUDA_ERRORS", "TORCH_NCCL_TRACE_BUFFER_SIZE",
                           "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN"}) {
    ::setenv(name, "0", 1);
  }
}

int visible_gpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return count;
}

void synchronize_device() {
  if (visible_gpus() > 0) PGPT_CUDA_CHECK(cudaDeviceSynchronize());
}

}  // namespace pgpt::comm

#else

namespace pgpt::comm {

BackendGroupPtr open_nccl_group(const GroupSetup& /*setup*/) {
  throw ConfigError(
      "--distributed-backend nccl: this build has no CUDA (PGPT_CUDA=OFF); use --distributed-backend gloo");
}

std::unique_ptr<Communicator> make_nccl_communicator(BackendGroupPtr /*group*/, bool /*high_priority*/) {
  throw ConfigError(
      "--distributed-backend nccl: this build has no CUDA (PGPT_CUDA=OFF); use --distributed-backend gloo");
}

void silence_torch_nccl_watchdog() {}
int visible_gpus() { return 0; }
void synchronize_device() {}

}  // namespace pgpt::comm

#endif

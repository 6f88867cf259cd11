// Gathers and scatters of shared tensors as copies out of the peers' memory: the copy engines move the data and streams
// wait for flags, so that no multiprocessor is taken from the computation beside it.
#include "backend.h"
#include "pgpt/base/error.h"

#ifdef PGPT_WITH_CUDA

#include <ATen/ATen.h>
#include <c10/cuda/CUDAStream.h>

#include <ATen/cuda/CUDAGraphsUtils.cuh>
#include <optional>

#include "copy_engine_launch.h"
#include "device_stream.h"
#include "peer_memory.h"
#include "pgpt/base/log.h"

namespace pgpt::comm {
namespace {

std::optional<PartType> part_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return PartType::kFloat32;
    case at::kBFloat16:
      return PartType::kBfloat16;
    case at::kHalf:
      return PartType::kFloat16;
    default:
      return std::nullopt;
  }
}

/// Where each rank's part of a gather goes.
auto slots(const at::Tensor& output, const at::Tensor& input) {
  return [out = static_cast<std::byte*>(output.data_ptr()), bytes = input.nbytes()](int r) {
    return out + static_cast<std::size_t>(r) * bytes;
  };
}

/// Copies inside one GPU. Plain ones run on the multiprocessors; newer drivers take a hint to use a copy engine.
class LocalCopy {
 public:
  explicit LocalCopy(cudaStream_t stream) {
#if CUDART_VERSION >= 13000
    const at::Tensor trial = at::zeros({8}, at::TensorOptions().device(at::kCUDA).dtype(at::kByte));
    PGPT_CUDA_CHECK(cudaDeviceSynchronize());
    auto* const bytes = static_cast<std::byte*>(trial.data_ptr());
    by_engine_ = copy_by_engine(bytes + 4, bytes, 4, stream) == cudaSuccess;
    if (!by_engine_) (void)cudaGetLastError();
    PGPT_CUDA_CHECK(cudaStreamSynchronize(stream));
#else
    (void)stream;
#endif
  }
  void operator()(void* to, const void* from, std::size_t bytes, cudaStream_t stream) const {
#if CUDART_VERSION >= 13000
    if (by_engine_) {
      PGPT_CUDA_CHECK(copy_by_engine(to, from, bytes, stream));
      return;
    }
#endif
    PGPT_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
  }

 private:
#if CUDART_VERSION >= 13000
  static cudaError_t copy_by_engine(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first = 0;
    return cudaMemcpyBatchAsync(&to, &from, &bytes, 1, &attributes, &first, 1, stream);
  }
#endif
  bool by_engine_ = false;
};

ConfigError advised(const ConfigError& error) {
  return ConfigError(concat("--gtp-transport copy-engine, ", error.what(), "; use --gtp-transport nccl"));
}

/// What is not in shared memory, or no gather or scatter, goes through NCCL.
class CopyEngineCommunicator final : public Communicator {
 public:
  CopyEngineCommunicator(const GroupSetup& setup, const BackendGroupPtr& group, std::shared_ptr<PeerMemory> memory)
      : group_(group),
        nccl_(make_nccl_communicator(group, setup.high_priority)),
        stream_(group, setup.high_priority),
        own_stream_(c10::cuda::getStreamFromPool(setup.high_priority)),
        memory_(std::move(memory)),
        copy_local_(stream_.get()) {
    group->resource = memory_;
  }

  [[nodiscard]] int rank() const override { return nccl_->rank(); }
  [[nodiscard]] int size() const override { return nccl_->size(); }
  [[nodiscard]] const std::string& name() const override { return nccl_->name(); }
  [[nodiscard]] const std::vector<int>& global_ranks() const override { return nccl_->global_ranks(); }

  Pending all_gather(at::Tensor output, at::Tensor input) override {
    check_gather(output, input, size());
    const auto place = shared_place(input);
    if (!place) return nccl_->all_gather(std::move(output), std::move(input));
    refuse_capture("all_gather");
    return stream_.launch("all_gather", {output, input}, [&] { gather(output, input, *place); });
  }

  Pending all_gather_fenced(at::Tensor output, at::Tensor input) override {
    check_gather(output, input, size());
    const auto place = shared_place(input);
    if (!place) return nccl_->all_gather(std::move(output), std::move(input));
    refuse_capture("all_gather_fenced");
    return stream_.launch("all_gather_fenced", {output, input}, [&] {
      beside_own_copy(output, input,
                      [&] { copy_peers(*place, 0, input.nbytes(), slots(output, input), [](int /*peer*/) {}); });
    });
  }

  Pending fence() override {
    refuse_capture("fence");
    return stream_.launch("fence", {}, [&] {
      const std::uint32_t sequence = memory_->next_sequence();
      memory_->signal(PeerMemory::kFence, sequence, stream_.get());
      await_peers(PeerMemory::kFence, sequence);
    });
  }

  Pending reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    check_scatter(output, input, size(), op);
    const auto place = part_type(input.scalar_type()) ? shared_place(input) : std::nullopt;
    if (!place) return nccl_->reduce_scatter(std::move(output), std::move(input), op);
    refuse_capture("reduce_scatter");
    const float scale = op == ReduceOp::kAverage ? 1.0F / static_cast<float>(size()) : 1.0F;
    return stream_.launch("reduce_scatter", {output, input},
                          [&] { scatter(output, input, *place, /*overwrite=*/true, scale); });
  }

  Pending reduce_scatter_add(at::Tensor accumulator, at::Tensor input, bool overwrite) override {
    check_scatter_add(accumulator, input, size());
    const auto place = part_type(input.scalar_type()) ? shared_place(input) : std::nullopt;
    if (!place) return nccl_->reduce_scatter_add(std::move(accumulator), std::move(input), overwrite);
    refuse_capture("reduce_scatter_add");
    return stream_.launch("reduce_scatter_add", {accumulator, input},
                          [&] { scatter(accumulator, input, *place, overwrite, 1.0F); });
  }

  Pending reduce_scatter_others(at::Tensor accumulator, at::Tensor input, bool overwrite) override {
    check_scatter_add(accumulator, input, size());
    const auto place = part_type(input.scalar_type()) ? shared_place(input) : std::nullopt;
    if (!place) return nccl_->reduce_scatter_others(std::move(accumulator), std::move(input), overwrite);
    refuse_capture("reduce_scatter_others");
    return stream_.launch("reduce_scatter_others", {accumulator, input},
                          [&] { scatter_others(accumulator, input, *place, overwrite); });
  }

  Pending all_reduce(at::Tensor tensor, ReduceOp op) override { return nccl_->all_reduce(std::move(tensor), op); }
  Pending broadcast(at::Tensor tensor, int root) override { return nccl_->broadcast(std::move(tensor), root); }
  Pending all_to_all(at::Tensor output, at::Tensor input) override {
    return nccl_->all_to_all(std::move(output), std::move(input));
  }
  Pending send(at::Tensor tensor, int peer) override { return nccl_->send(std::move(tensor), peer); }
  Pending receive(at::Tensor tensor, int peer) override { return nccl_->receive(std::move(tensor), peer); }
  void share(const std::vector<at::Tensor>& tensors) override {
    try {
      memory_->share(tensors);
    } catch (const ConfigError& error) {
      throw advised(error);
    }
  }
  [[nodiscard]] bool copies_shared() const override { return true; }
  void barrier() override { nccl_->barrier(); }

 private:
  /// Empty tensors are NCCL's business: there is nothing to copy.
  [[nodiscard]] std::optional<PeerMemory::Place> shared_place(const at::Tensor& input) const {
    return input.numel() == 0 ? std::nullopt : memory_->find(input);
  }

  void refuse_capture(const char* operation) const {
    PGPT_CHECK(DeviceError, at::cuda::currentStreamCaptureStatusMayInitCtx() == at::cuda::CaptureStatus::None,
               operation, " of group '", name(),
               "': --gtp-transport copy-engine cannot be captured; use --gtp-transport nccl with --cuda-graph-impl");
  }

  /// Brings `bytes` at `place` + `offset` of every peer here after `before(peer)`; `target(peer)` says where to.
  template <class Target, class Before>
  void copy_peers(const PeerMemory::Place& place, std::size_t offset, std::size_t bytes, const Target& target,
                  const Before& before) {
    for (int i = 1; i < size(); ++i) {
      const int peer = (rank() + i) % size();  // no two ranks begin with the same peer
      before(peer);
      PGPT_CUDA_CHECK(cudaMemcpyAsync(target(peer), memory_->address(place, peer) + offset, bytes,
                                      cudaMemcpyDeviceToDevice, stream_.get()));
    }
  }

  /// The same of an operation in which each rank says when its input is ready and when it has read the others'.
  template <class Target>
  void pull(const PeerMemory::Place& place, std::size_t offset, std::size_t bytes, std::uint32_t sequence,
            const Target& target) {
    copy_peers(place, offset, bytes, target,
               [&](int peer) { memory_->await(PeerMemory::kReady, sequence, peer, stream_.get()); });
    memory_->signal(PeerMemory::kDone, sequence, stream_.get());
  }

  void await_peers(PeerMemory::Event event, std::uint32_t sequence) {
    for (int i = 1; i < size(); ++i) memory_->await(event, sequence, (rank() + i) % size(), stream_.get());
  }

  /// Runs `work(sequence)`, during which peers may read this rank's input; afterwards the input may be changed.
  template <class Work>
  void while_shared(const Work& work) {
    const std::uint32_t sequence = memory_->next_sequence();
    memory_->signal(PeerMemory::kReady, sequence, stream_.get());
    work(sequence);
    await_peers(PeerMemory::kDone, sequence);
  }

  /// Copies this rank's part of a gather while `copy_others` runs.
  template <class Work>
  void beside_own_copy(const at::Tensor& output, const at::Tensor& input, const Work& copy_others) {
    std::byte* const slot = slots(output, input)(rank());
    if (slot == input.data_ptr()) return copy_others();
    may_copy_own_.record(stream_.get());
    may_copy_own_.block(own_stream_.stream());
    copy_local_(slot, input.data_ptr(), input.nbytes(), own_stream_.stream());
    own_copied_.record(own_stream_.stream());
    copy_others();
    own_copied_.block(stream_.get());
  }

  void gather(const at::Tensor& output, const at::Tensor& input, const PeerMemory::Place& place) {
    while_shared([&](std::uint32_t sequence) {
      beside_own_copy(output, input, [&] { pull(place, 0, input.nbytes(), sequence, slots(output, input)); });
    });
  }

  /// Bytes from one part to the next where the others' parts are received.
  [[nodiscard]] static std::size_t stride_of(std::size_t bytes) { return (bytes + 15) / 16 * 16; }

  /// Brings the others' parts of this rank here, by rank; returns where.
  [[nodiscard]] std::byte* receive_parts(const at::Tensor& input, const PeerMemory::Place& place,
                                         std::uint32_t sequence) {
    const std::size_t bytes = input.nbytes() / static_cast<std::size_t>(size());
    const std::size_t stride = stride_of(bytes);
    // This stream is the current one, so a buffer that is replaced goes back to this stream's pool: in order with the
    // operations that still use it.
    const auto needed = static_cast<std::int64_t>(stride) * (size() - 1);
    if (!received_.defined() || received_.numel() < needed) {
      received_ = at::Tensor();
      received_ = at::empty({needed}, input.options().dtype(at::kByte));
    }
    auto* const received = static_cast<std::byte*>(received_.data_ptr());
    pull(place, static_cast<std::size_t>(rank()) * bytes, bytes, sequence,
         [&](int peer) { return received + static_cast<std::size_t>(peer - (peer > rank() ? 1 : 0)) * stride; });
    return received;
  }

  [[nodiscard]] static PartSum part_sum(const at::Tensor& accumulator, const at::Tensor& input, bool overwrite) {
    PartSum sum;
    sum.type = *part_type(input.scalar_type());
    sum.accumulator_fp32 = accumulator.scalar_type() == at::kFloat;
    sum.overwrite = overwrite;
    sum.count = accumulator.numel();
    sum.stride = stride_of(static_cast<std::size_t>(accumulator.numel()) * input.element_size());
    sum.accumulator = accumulator.data_ptr();
    return sum;
  }

  void scatter(const at::Tensor& accumulator, const at::Tensor& input, const PeerMemory::Place& place, bool overwrite,
               float scale) {
    const std::size_t bytes = input.nbytes() / static_cast<std::size_t>(size());
    PartSum sum = part_sum(accumulator, input, overwrite);
    sum.scale = scale;
    sum.ranks = size();
    sum.own_rank = rank();
    sum.own = static_cast<const std::byte*>(input.const_data_ptr()) + static_cast<std::size_t>(rank()) * bytes;
    while_shared([&](std::uint32_t sequence) {
      sum.received = receive_parts(input, place, sequence);
      sum_parts(sum, stream_.get());
    });
  }

  void scatter_others(const at::Tensor& accumulator, const at::Tensor& input, const PeerMemory::Place& place,
                      bool overwrite) {
    while_shared([&](std::uint32_t sequence) {
      if (size() == 2 && overwrite && accumulator.scalar_type() == input.scalar_type()) {
        // The one part goes where it belongs, and nothing is left to add.
        const std::size_t bytes = accumulator.nbytes();
        pull(place, static_cast<std::size_t>(rank()) * bytes, bytes, sequence,
             [&](int /*peer*/) { return static_cast<std::byte*>(accumulator.data_ptr()); });
        return;
      }
      PartSum sum = part_sum(accumulator, input, overwrite);
      sum.received = receive_parts(input, place, sequence);
      sum.ranks = size() - 1;
      sum.own_rank = sum.ranks;  // none of them
      sum_parts(sum, stream_.get());
    });
  }

  BackendGroupPtr group_;
  std::unique_ptr<Communicator> nccl_;
  DeviceStream stream_;
  c10::cuda::CUDAStream own_stream_;  // for copies inside this GPU, beside those from the peers
  cuda::Event may_copy_own_, own_copied_;
  std::shared_ptr<PeerMemory> memory_;
  LocalCopy copy_local_;
  at::Tensor received_;  // the peers' parts of a scatter; every use is on this stream, so one buffer is enough
};

}  // namespace

std::unique_ptr<Communicator> make_copy_engine_communicator(const GroupSetup& setup, BackendGroupPtr group,
                                                            bool or_nccl) {
  std::shared_ptr<PeerMemory> memory;
  try {
    memory = std::make_shared<PeerMemory>(setup);
  } catch (const ConfigError& error) {
    // All members are here: they agreed about it.
    if (!or_nccl) throw advised(error);
    static bool told = false;  // the next group fails for the same reason
    if (setup.record->rank == 0 && !std::exchange(told, true)) {
      log::line(concat("> GTP moves weights and gradients by NCCL, since copies between GPUs cannot: ", error.what()));
    }
    return make_nccl_communicator(std::move(group), setup.high_priority);
  }
  return std::make_unique<CopyEngineCommunicator>(setup, group, std::move(memory));
}

}  // namespace pgpt::comm

#else

namespace pgpt::comm {

std::unique_ptr<Communicator> make_copy_engine_communicator(const GroupSetup& /*setup*/, BackendGroupPtr /*group*/,
                                                            bool /*or_nccl*/) {
  throw ConfigError("--gtp-transport copy-engine: this build has no CUDA (PGPT_CUDA=OFF); use --gtp-transport nccl");
}

}  // namespace pgpt::comm

#endif

// Copy-engine groups on one GPU a rank, for test_comm_copy_engine.cpp.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <stdexcept>

#include "comm_worker.h"
#include "pgpt/base/error.h"
#include "pgpt/base/log.h"

#ifdef PGPT_WITH_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace comm_worker {
namespace {

using namespace pgpt;
using comm::Communicator;
using comm::GroupOptions;
using comm::Pending;
using comm::ReduceOp;
using comm::Transport;

constexpr GroupOptions kGather{.high_priority = true, .transport = Transport::kCopyEngine};
constexpr GroupOptions kScatter{.high_priority = false, .transport = Transport::kCopyEngine};

at::TensorOptions on_gpu(at::ScalarType dtype) { return at::TensorOptions().device(at::kCUDA).dtype(dtype); }

bool same_bytes(const at::Tensor& a, const at::Tensor& b) { return at::equal(a.view(at::kByte), b.view(at::kByte)); }

/// Every operation on parts of a shared tensor, against NCCL's result on a copy of the same data.
void check_equal(comm::World& world) {
  auto plain = world.create_group("plain", everybody(world));
  auto group = world.create_group("gtp", everybody(world), kGather);
  const int size = group->size();
  constexpr int64_t kLargest = (int64_t{1} << 20) + 3;
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kLong}) {
    const bool floating = at::isFloatingType(dtype);
    const at::Tensor shared = at::empty({kLargest * size + 64}, on_gpu(dtype));
    const at::Tensor other = at::empty({7}, on_gpu(dtype));
    group->share({other, shared});
    at::manual_seed(static_cast<uint64_t>(11 + world.rank()));
    for (const int64_t n : {int64_t{1}, int64_t{3}, int64_t{8}, int64_t{1000}, int64_t{4097}, kLargest}) {
      for (const int64_t offset : {0, 1, 5, 64}) {
        const std::string where = concat(dtype, ", ", n, " elements at ", offset);
        const auto require = [&](bool condition, const std::string& what) {
          if (!condition) throw std::runtime_error(concat(what, " differs from nccl: ", where));
        };
        if (floating) {
          shared.normal_();
        } else {
          shared.random_(-1000, 1000);
        }
        const at::Tensor shard = shared.narrow(0, offset, n);
        const at::Tensor whole = shared.narrow(0, offset, n * size);
        // The output may be any memory, so one that no 16-byte access could use.
        const at::Tensor gathered = at::zeros({n * size + 1}, on_gpu(dtype)).narrow(0, 1, n * size);
        const at::Tensor expected = at::zeros({n * size}, on_gpu(dtype));
        group->all_gather(gathered, shard).wait();
        plain->all_gather(expected, shard.clone()).wait();
        require(same_bytes(gathered, expected), "all_gather");

        const at::Tensor part = at::zeros({n}, on_gpu(dtype));
        const at::Tensor expected_part = at::zeros({n}, on_gpu(dtype));
        for (const auto op : {ReduceOp::kSum, ReduceOp::kAverage}) {
          // Halving is exact but for tiny fp16 values, where NCCL may or may not round before the sum.
          if (op == ReduceOp::kAverage && (!floating || dtype == at::kHalf)) continue;
          group->reduce_scatter(part, whole, op).wait();
          plain->reduce_scatter(expected_part, whole.clone(), op).wait();
          require(same_bytes(part, expected_part), op == ReduceOp::kSum ? "reduce_scatter" : "average");
        }
        for (const auto accumulator_dtype : {at::kFloat, dtype}) {
          if (!floating && accumulator_dtype != dtype) continue;
          for (const bool overwrite : {false, true}) {
            const at::Tensor start = at::arange(n + 1, on_gpu(at::kLong)).remainder_(97).to(accumulator_dtype);
            const at::Tensor sum = start.clone().narrow(0, offset % 2, n);
            const at::Tensor expected_sum = start.clone().narrow(0, offset % 2, n);
            group->reduce_scatter_add(sum, whole, overwrite).wait();
            plain->reduce_scatter(expected_part, whole.clone(), ReduceOp::kSum).wait();
            if (overwrite) {
              expected_sum.copy_(expected_part);
            } else {
              expected_sum.add_(expected_part);
            }
            require(same_bytes(sum, expected_sum), concat("reduce_scatter_add to ", accumulator_dtype));
            group->reduce_scatter_others(sum, whole, overwrite).wait();
            plain->reduce_scatter_others(expected_sum, whole.clone(), overwrite).wait();
            require(same_bytes(sum, expected_sum), concat("reduce_scatter_others to ", accumulator_dtype));
          }
        }
        // In place: this rank's part of the input receives the sum.
        if (floating) {
          plain->reduce_scatter(expected_part, whole.clone(), ReduceOp::kSum).wait();
          const at::Tensor own = whole.narrow(0, group->rank() * n, n);
          group->reduce_scatter(own, whole, ReduceOp::kSum).wait();
          require(same_bytes(own, expected_part), "reduce_scatter in place");
        }
      }
    }
  }
  // What lies in no shared tensor takes the other way, and so do the other operations.
  const at::Tensor private_input = at::full({5}, group->rank(), on_gpu(at::kFloat));
  const at::Tensor gathered = at::zeros({5 * size}, on_gpu(at::kFloat));
  group->all_gather(gathered, private_input).wait();
  if (!at::equal(gathered, at::arange(size, on_gpu(at::kFloat)).repeat_interleave(5))) {
    throw std::runtime_error("all_gather of a tensor that is not shared");
  }
  group->barrier();
}

/// A weight's gather and a gradient's scatter in flight at once, beside GEMMs, their inputs rewritten as soon as they
/// may be; ranks run out of step. All values are integers below 2^24, so every fp32 sum is exact.
void check_overlap(comm::World& world) {
  auto gather = world.create_group("gtp", everybody(world), kGather);
  auto scatter = world.create_group("gtp_scatter", everybody(world), kScatter);
  const int size = gather->size();
  const int self = gather->rank();
  constexpr int64_t kShard = 300'001;
  const at::Tensor weights = at::zeros({kShard + 64}, on_gpu(at::kFloat));
  const at::Tensor shard = weights.narrow(0, 64, kShard);
  gather->share({weights});
  std::vector<at::Tensor> staging, outputs;
  for (int i = 0; i < 2; ++i) {
    staging.push_back(at::zeros({kShard * size}, on_gpu(at::kFloat)));
    outputs.push_back(at::zeros({kShard * size}, on_gpu(at::kFloat)));
  }
  scatter->share(staging);
  const at::Tensor pattern = at::arange(kShard, on_gpu(at::kFloat)).remainder_(251);
  const at::Tensor whole_pattern = at::arange(kShard * size, on_gpu(at::kFloat)).remainder_(241);
  const at::Tensor matrix = at::randn({2048, 2048}, on_gpu(at::kBFloat16));
  at::Tensor product = at::empty_like(matrix);
  const at::Tensor accumulator = at::zeros({kShard}, on_gpu(at::kFloat));
  at::Tensor expected_sum = at::zeros({kShard}, on_gpu(at::kFloat));
  const at::Tensor errors = at::zeros({}, on_gpu(at::kLong));
  const auto compute = [&](int count) {
    for (int i = 0; i < count; ++i) at::mm_out(product, matrix, matrix);
  };
  for (int i = 0; i < 500; ++i) {
    const auto index = static_cast<size_t>(i % 2);
    world.set_activity(concat("operation ", i));
    shard.copy_(pattern + (i * size + self));
    Pending gathering = gather->all_gather(outputs[index], shard);
    staging[index].copy_(whole_pattern + (i + 1000 * self));
    compute((i + self) % 3);
    const bool overwrite = i % 5 == 0;
    Pending scattering = scatter->reduce_scatter_add(accumulator, staging[index], overwrite);
    compute((i / 3 + self) % 2);
    gathering.wait();
    // Were the peers still reading, they would get these.
    shard.fill_(-1);
    std::vector<at::Tensor> parts;
    for (int r = 0; r < size; ++r) parts.push_back(pattern + (i * size + r));
    errors.add_(outputs[index].ne(at::cat(parts)).sum());
    scattering.wait();
    staging[index].fill_(-1);
    const at::Tensor sum =
        whole_pattern.narrow(0, self * kShard, kShard) * size + (i * size + 1000 * size * (size - 1) / 2);
    expected_sum = overwrite ? sum : expected_sum + sum;
    errors.add_(accumulator.ne(expected_sum).sum());
  }
  const auto wrong = errors.item<int64_t>();
  if (wrong != 0) throw std::runtime_error(concat(wrong, " wrong elements"));
}

/// Parts of one tensor gathered without waiting for the peers, who run out of step; rewritten after a fence.
void check_fences(comm::World& world) {
  auto gather = world.create_group("gtp", everybody(world), kGather);
  const int size = gather->size();
  const int self = gather->rank();
  constexpr int64_t kPart = 200'003;
  constexpr int kParts = 3;
  const at::Tensor weights = at::zeros({kParts * kPart}, on_gpu(at::kFloat));
  gather->share({weights});
  const at::Tensor pattern = at::arange(kParts * kPart, on_gpu(at::kFloat)).remainder_(251);
  const at::Tensor matrix = at::randn({2048, 2048}, on_gpu(at::kBFloat16));
  at::Tensor product = at::empty_like(matrix);
  const at::Tensor errors = at::zeros({}, on_gpu(at::kLong));
  for (int epoch = 0; epoch < 200; ++epoch) {
    world.set_activity(concat("epoch ", epoch));
    for (int i = 0; i < (epoch + self) % 4; ++i) at::mm_out(product, matrix, matrix);
    weights.copy_(pattern + (epoch * size + self));
    Pending written = gather->fence();
    for (int part = 0; part < kParts; ++part) {
      const at::Tensor whole = at::empty({kPart * size}, on_gpu(at::kFloat));
      Pending gathering = gather->all_gather_fenced(whole, weights.narrow(0, part * kPart, kPart));
      written.wait();
      for (int i = 0; i < (epoch / 4 + self + part) % 3; ++i) at::mm_out(product, matrix, matrix);
      gathering.wait();
      std::vector<at::Tensor> expected;
      for (int r = 0; r < size; ++r) expected.push_back(pattern.narrow(0, part * kPart, kPart) + (epoch * size + r));
      errors.add_(whole.ne(at::cat(expected)).sum());
    }
    gather->fence().wait();
    weights.fill_(-1);  // were the peers still reading, they would get these
  }
  const auto wrong = errors.item<int64_t>();
  if (wrong != 0) throw std::runtime_error(concat(wrong, " wrong elements"));
}

/// Says which way shared tensors take when the group chooses, and checks a gather and a sum.
void check_automatic(comm::World& world) {
  auto group =
      world.create_group("gtp", everybody(world), {.high_priority = false, .transport = Transport::kAutomatic});
  const int size = group->size();
  const at::Tensor shared = at::full({8 * size}, group->rank() + 1, on_gpu(at::kFloat));
  group->share({shared});
  const at::Tensor whole = at::zeros({8 * size}, shared.options()), sum = at::zeros({8}, shared.options());
  group->fence().wait();
  group->all_gather_fenced(whole, shared.narrow(0, 0, 8)).wait();
  group->reduce_scatter_add(sum, shared, /*overwrite=*/true).wait();
  if (!at::equal(whole, at::arange(1, size + 1, shared.options()).repeat_interleave(8)) ||
      !at::equal(sum, at::full_like(sum, size * (size + 1) / 2))) {
    throw std::runtime_error("wrong values");
  }
  log::line(group->copies_shared() ? "by copies" : "by collectives");
  group->barrier();
}

void run_endless(comm::World& world) {
  auto gather = world.create_group("gtp", everybody(world), kGather);
  const int size = gather->size();
  const at::Tensor shard = at::zeros({1 << 20}, on_gpu(at::kBFloat16));
  const at::Tensor whole = at::zeros({(1 << 20) * size}, on_gpu(at::kBFloat16));
  gather->share({shard});
  for (int step = 1;; ++step) {
    world.set_activity(concat("training step ", step));
    gather->all_gather(whole, shard).wait();
    if (step % 20 == 0) (void)whole[0].item<float>();
    if (step == 40) log::line("looping");
  }
}

void check_capture(comm::World& world) {
#ifdef PGPT_WITH_CUDA
  auto gather = world.create_group("gtp", everybody(world), kGather);
  const at::Tensor shard = at::zeros({64}, on_gpu(at::kFloat));
  const at::Tensor whole = at::zeros({64 * gather->size()}, on_gpu(at::kFloat));
  gather->share({shard});
  std::vector<std::string> refusals;
  {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    at::cuda::CUDAGraph graph;
    graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    const at::Tensor anything = shard + 1;
    const std::function<Pending()> operations[] = {[&] { return gather->all_gather(whole, shard); },
                                                   [&] { return gather->fence(); },
                                                   [&] { return gather->all_gather_fenced(whole, shard); }};
    for (const auto& operation : operations) {
      refusals.emplace_back();
      try {
        operation().wait();
      } catch (const DeviceError& error) {
        refusals.back() = error.what();
      }
    }
    graph.capture_end();
  }
  for (const std::string& refusal : refusals) {
    if (refusal.find("--gtp-transport nccl") == std::string::npos) throw std::runtime_error("captured: " + refusal);
  }
  gather->barrier();
#else
  (void)world;
  throw ConfigError("this build has no CUDA");
#endif
}

/// Milliseconds of `body` on the current stream, per repetition.
double time_ms(int repetitions, const std::function<void()>& body) {
  const c10::impl::VirtualGuardImpl device(at::kCUDA);
  const auto stream = device.getStream(at::Device(at::kCUDA, device.getDevice().index()));
  c10::Event begin(at::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
  c10::Event end(at::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
  body();
  begin.record(stream);
  for (int i = 0; i < repetitions; ++i) body();
  end.record(stream);
  end.synchronize();
  return begin.elapsedTime(end) / repetitions;
}

/// GB/s of each operation, counted as bytes received by one rank, alone and beside GEMMs, and what the GEMMs lose.
void run_bench(comm::World& world) {
  auto nccl_gather = world.create_group("nccl_gather", everybody(world), {.high_priority = true});
  auto nccl_scatter = world.create_group("nccl_scatter", everybody(world));
  auto copy_gather = world.create_group("copy_gather", everybody(world), kGather);
  auto copy_scatter = world.create_group("copy_scatter", everybody(world), kScatter);
  const int size = nccl_gather->size();
  constexpr int64_t kMebi = 1 << 20;
  constexpr int64_t kMost = 128 * kMebi;
  const at::Tensor source = at::randn({kMost / 2}, on_gpu(at::kBFloat16));
  const at::Tensor target = at::empty({kMost / 2}, on_gpu(at::kBFloat16));
  const at::Tensor sum = at::zeros({kMost / 2 / size}, on_gpu(at::kFloat));
  copy_gather->share({source});
  copy_scatter->share({source});
  const at::Tensor a = at::randn({8192, 8192}, on_gpu(at::kBFloat16));
  const at::Tensor b = at::randn({8192, 8192}, on_gpu(at::kBFloat16));
  at::Tensor c = at::empty_like(a);
  const auto gemm = [&] { at::mm_out(c, a, b); };
  for (int i = 0; i < 200; ++i) gemm();  // sustained clocks
  const double gemm_ms = time_ms(50, gemm);
  struct Row {
    const char* name;
    Communicator* gather;
    Communicator* scatter;
  };
  std::ostringstream table;
  table << std::fixed << std::setprecision(1) << "GEMM 8192^3 bf16 alone " << gemm_ms << " ms; GB/s received a rank\n"
        << "  operation          MiB  transport    alone  by GEMM  GEMM slower %\n";
  for (const int64_t bytes : {8 * kMebi, 32 * kMebi, 64 * kMebi, 128 * kMebi}) {
    for (const bool gathers : {true, false}) {
      for (const Row& row : {Row{"nccl", nccl_gather.get(), nccl_scatter.get()},
                             Row{"copy engine", copy_gather.get(), copy_scatter.get()}}) {
        const int64_t part = bytes / 2 / size;  // elements
        const auto launch = [&]() -> Pending {
          if (gathers) return row.gather->all_gather(target.narrow(0, 0, part * size), source.narrow(0, 0, part));
          return row.scatter->reduce_scatter_add(sum.narrow(0, 0, part), source.narrow(0, 0, part * size), false);
        };
        const double received = static_cast<double>(part) * 2 * (size - 1);
        nccl_gather->barrier();
        const double alone = time_ms(50, [&] { launch().wait(); });
        // As many operations beside each GEMM as alone would end with it.
        nccl_gather->barrier();
        const int per_gemm = std::max(1, static_cast<int>(gemm_ms / alone));
        const double beside = time_ms(50, [&] {
          std::vector<Pending> flying;
          for (int i = 0; i < per_gemm; ++i) flying.push_back(launch());
          gemm();
          for (Pending& pending : flying) pending.wait();
        });
        nccl_gather->barrier();
        const double rate = received / 1e6;  // MB; a millisecond of it is a GB/s
        table << "  " << std::left << std::setw(18) << (gathers ? "all_gather" : "reduce_scatter_add") << std::right
              << std::setw(5) << bytes / kMebi << "  " << std::left << std::setw(11) << row.name << std::right
              << std::setw(7) << rate / alone << std::setw(9) << rate * per_gemm / beside << std::setw(15)
              << (beside / gemm_ms - 1) * 100 << "  (" << per_gemm << " a GEMM)\n";
      }
    }
  }
  if (world.rank() == 0) log::line(table.str());
}

}  // namespace

void run_copy_engine(std::unique_ptr<comm::World>& world, const comm::LaunchEnvironment& env,
                     const comm::WorldOptions& options, const std::string& scenario) {
  comm::WorldOptions wanted = options;
  wanted.backend = comm::BackendKind::kNccl;
  wanted.tensors_on_gpu = true;
  const int gpus = comm::visible_gpus();
  comm::check_device_assignment(env, wanted.backend, gpus);
  c10::impl::VirtualGuardImpl(at::kCUDA).setDevice(
      at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(env.local_rank % gpus)));
  world = comm::World::connect(env, wanted);
  if (scenario == "equal") {
    check_equal(*world);
  } else if (scenario == "overlap") {
    check_overlap(*world);
  } else if (scenario == "fences") {
    check_fences(*world);
  } else if (scenario == "automatic") {
    check_automatic(*world);
  } else if (scenario == "endless") {
    run_endless(*world);
  } else if (scenario == "capture") {
    check_capture(*world);
  } else if (scenario == "bench") {
    run_bench(*world);
  } else {
    throw ConfigError("unknown copy-engine scenario " + scenario);
  }
  world->shutdown();
  log::line("rank " + std::to_string(env.rank) + " done");
}

}  // namespace comm_worker

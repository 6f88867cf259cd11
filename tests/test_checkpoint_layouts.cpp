// A checkpoint of any layout loads into any other: same tensors, and a run that goes on as if nothing had happened.

#include <ATen/ATen.h>

#include <cmath>
#include <mutex>

#include "support/catch.h"
#include "support/thread_ranks.h"
#include "test_checkpoint_support.h"

using namespace pgpt;
using test::Outcome;

namespace {

struct LayoutCase {
  int ranks, gtp;
};
constexpr LayoutCase kLayouts[] = {
    {1, 1}, {2, 2}, {4, 4}, {2, 1}, {4, 2}};  // the last two: data parallel 2, GTP 2 x data parallel 2

std::string name(const LayoutCase& layout) {
  return std::to_string(layout.ranks) + " ranks, GTP " + std::to_string(layout.gtp);
}

/// Whole logical tensors, and the padding rows of every rank, of a run's memory right after loading.
struct Memory {
  std::map<std::string, at::Tensor> whole;
  std::map<std::string, std::vector<at::Tensor>> padding;
};

Memory loaded(const std::string& flags, int ranks) {
  Memory memory;
  std::mutex mutex;
  (void)test::run_ranks(test::parse(test::base_flags() + flags, ranks), ranks, [&](int, training::Trainer& trainer) {
    const std::lock_guard lock(mutex);
    const auto add = [&](const std::string& prefix, const at::Tensor& flat) {
      for (parameter::Parameter& p : trainer.store().parameters()) {
        const at::Tensor local = flat.narrow(0, p.offset, p.num_elements()).view(p.weight.sizes());
        const auto rows = p.layout.local_range(0);
        const std::int64_t kept = rows.end - rows.begin;
        at::Tensor& whole =
            memory.whole.try_emplace(prefix + p.spec.name, at::full(p.layout.logical_shape, -77.0, local.options()))
                .first->second;
        if (kept > 0) whole.narrow(0, rows.begin, kept).copy_(local.narrow(0, 0, kept));
        if (kept < local.size(0))
          memory.padding[prefix + p.spec.name].push_back(local.narrow(0, kept, local.size(0) - kept).clone());
      }
    };
    add("", trainer.store().weights());
    for (const auto& [kind, flat] : trainer.optimizer().state()) add("optimizer.state." + kind + ".", flat);
  });
  return memory;
}

/// Tensors in memory are those of the checkpoint, bit for bit.
void require_loaded(const Memory& memory, const std::string& directory) {
  const checkpoint::Checkpoint checkpoint(directory);
  for (const auto& [tensor, whole] : memory.whole) {
    INFO(tensor);
    CHECK(at::equal(whole, checkpoint.read(tensor)));
  }
}

/// fp32 runs that differ in the order of their sums: bounds as for the reference's own runs (tests/test_gtp.cpp), which
/// grow through Adam.
void require_close_steps(const std::vector<training::StepReport>& actual,
                         const std::vector<training::StepReport>& expected) {
  REQUIRE(actual.size() == expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    INFO("iteration " << expected[i].iteration);
    CHECK(actual[i].iteration == expected[i].iteration);
    CHECK(actual[i].consumed_samples == expected[i].consumed_samples);
    CHECK(actual[i].learning_rate == expected[i].learning_rate);
    CHECK(std::abs(actual[i].losses[0].second - expected[i].losses[0].second) <= 1e-5);
    CHECK(std::abs(*actual[i].grad_norm - *expected[i].grad_norm) <= 2e-5 * *expected[i].grad_norm);
    CHECK(std::abs(*actual[i].params_norm - *expected[i].params_norm) <= 1e-6 * *expected[i].params_norm);
  }
}

}  // namespace

TEST_CASE("every layout loads every other layout's checkpoint exactly and goes on with it", "[cpu][checkpoint]") {
  for (const std::string& model : {std::string(), std::string(test::kPadded)}) {
    const std::string flags = model + "--weight-init layout-invariant --lr 1e-3 --min-lr 1e-4 ";
    const Outcome unbroken = test::train(flags, 1);
    for (const LayoutCase& from : kLayouts) {
      const test::ScratchFolder folder;
      const std::string save = folder.path("s");
      (void)test::train(flags + test::gtp(from.gtp) + "--save " + save + " --exit-interval 4", from.ranks);
      for (const LayoutCase& to : kLayouts) {
        INFO("from " << name(from) << " to " << name(to) << ", model " << model);
        const std::string load = flags + test::gtp(to.gtp) + "--load " + save + " ";
        const Memory memory = loaded(load, to.ranks);
        require_loaded(memory, test::iteration_path(save, 4));
        for (const auto& [tensor, rows] : memory.padding) {
          INFO(tensor);
          for (const at::Tensor& r : rows) CHECK(r.abs().max().item<double>() == 0.0);
        }
        require_close_steps(test::train(load, to.ranks).steps, test::tail(unbroken.steps, 4));
      }
    }
  }
}

TEST_CASE("other layouts give the same files apart from the cuts", "[cpu][checkpoint]") {
  // No step is taken, so that not even rounding differs: --finetune of one checkpoint, saved again after 1 iteration
  // with lr 0.
  const test::ScratchFolder folder;
  const std::string flags = std::string(test::kPadded) + "--bf16 --weight-init layout-invariant ";
  (void)test::train(flags + "--save " + folder.path("a") + " --exit-interval 3", 1);
  for (const LayoutCase& layout : kLayouts) {
    INFO(name(layout));
    const std::string again = folder.path(std::to_string(layout.ranks) + std::to_string(layout.gtp));
    // Iterations 4 to 8 are skipped: their data are dropped, and the final save writes what was loaded.
    (void)test::train(flags + test::gtp(layout.gtp) + "--load " + folder.path("a") + " --save " + again +
                          " --iterations-to-skip 4 5 6 7 8",
                      layout.ranks);
    const checkpoint::Checkpoint first(test::iteration_path(folder.path("a"), 3));
    const checkpoint::Checkpoint second(test::iteration_path(again, 8));
    REQUIRE(first.manifest().tensors.size() == second.manifest().tensors.size());
    for (const auto& [tensor, entry] : first.manifest().tensors) {
      INFO(tensor);
      CHECK(at::equal(first.read(tensor), second.read(tensor)));
    }
  }
}

TEST_CASE("random padding rows come back at the same GTP degree and are zero at another", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string flags = std::string(test::kPadded) + "--bf16 ";
  const std::string save = folder.path("s");
  Memory saved;
  {
    // What is in memory at the end of the saving run.
    std::mutex mutex;
    (void)test::run_ranks(
        test::parse(test::base_flags() + flags + test::gtp(4) + "--save " + save + " --exit-interval 3", 4), 4,
        [&](int, training::Trainer& trainer) {
          trainer.run();
          const std::lock_guard lock(mutex);
          for (parameter::Parameter& p : trainer.store().parameters()) {
            const auto rows = p.layout.local_range(0);
            const std::int64_t kept = rows.end - rows.begin;
            if (kept < p.weight.size(0))
              saved.padding[p.spec.name].push_back(p.weight.narrow(0, kept, p.weight.size(0) - kept).clone());
          }
        });
  }
  REQUIRE(!saved.padding.empty());
  const checkpoint::Checkpoint checkpoint(test::iteration_path(save, 3));
  CHECK(checkpoint.contains("decoder.layers.0.mlp.linear_fc1.weight.gtp_padding"));
  CHECK(checkpoint.contains("optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight.gtp_padding"));
  CHECK(checkpoint.manifest().tensors.at("decoder.layers.0.mlp.linear_fc1.weight").shape ==
        std::vector<std::int64_t>{144, 32});

  const auto largest = [](const std::vector<at::Tensor>& rows) {
    double value = 0;
    for (const at::Tensor& r : rows) value = std::max(value, r.abs().max().item<double>());
    return value;
  };
  const Memory same = loaded(flags + test::gtp(4) + "--load " + save, 4);
  double random = 0;
  for (const auto& [tensor, rows] : saved.padding) {
    INFO(tensor);
    REQUIRE(same.padding.at(tensor).size() == rows.size());
    // Ranks report in any order: each saved stretch is found again.
    for (const at::Tensor& r : rows) {
      bool found = false;
      for (const at::Tensor& other : same.padding.at(tensor)) found = found || at::equal(r, other);
      CHECK(found);
    }
    random = std::max(random, largest(rows));
  }
  CHECK(random > 0.0);  // the rule is about random rows

  for (const auto& [tensor, rows] : loaded(flags + test::gtp(2) + "--load " + save, 2).padding) {
    INFO(tensor);
    CHECK(largest(rows) == 0.0);
  }
  // A checkpoint without padding leaves zeros too, at any degree.
  (void)test::train(
      flags + "--weight-init layout-invariant " + test::gtp(4) + "--save " + folder.path("i") + " --exit-interval 3",
      4);
  CHECK_FALSE(checkpoint::Checkpoint(test::iteration_path(folder.path("i"), 3))
                  .contains("decoder.layers.0.mlp.linear_fc1.weight.gtp_padding"));
  for (const auto& [tensor, rows] : loaded(flags + test::gtp(4) + "--load " + folder.path("i"), 4).padding) {
    INFO(tensor);
    CHECK(largest(rows) == 0.0);
  }
}

TEST_CASE("replicated tensors are written once", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  (void)test::train("--bf16 " + test::gtp(2) + "--save " + folder.path("s") + " --exit-interval 2", 4);
  const checkpoint::Checkpoint checkpoint(test::iteration_path(folder.path("s"), 2));
  std::map<std::string, std::uint64_t> bytes;
  std::uint64_t all = 0;
  for (const auto& [tensor, entry] : checkpoint.manifest().tensors) {
    for (const checkpoint::Piece& piece : entry.pieces) {
      const std::uint64_t size =
          static_cast<std::uint64_t>(checkpoint::num_elements(piece.shape)) * c10::elementSize(entry.dtype);
      bytes[piece.file] += size;
      all += size;
    }
  }
  CHECK(all == checkpoint.manifest().tensor_bytes());
  CHECK(bytes.size() == 4);  // every rank has a part of the work
  const checkpoint::Checkpoint one = [&] {
    (void)test::train(
        "--bf16 " + test::gtp(2) + "--no-ckpt-fully-parallel-save --save " + folder.path("t") + " --exit-interval 2",
        4);
    return checkpoint::Checkpoint(test::iteration_path(folder.path("t"), 2));
  }();
  CHECK(one.manifest().files.size() == 2);  // the first replica of each GTP shard
  test::require_same_checkpoints(test::iteration_path(folder.path("s"), 2), test::iteration_path(folder.path("t"), 2));
}

// Acceptance checks of GTP (spec/gtp.md 24) on thread ranks: equality over layouts, prefetch, recompute, padding, tied
// embeddings, biases.

#include <ATen/ATen.h>

#include <cmath>
#include <map>
#include <mutex>

#include "pgpt/base/error.h"
#include "support/catch.h"
#include "support/thread_ranks.h"

using namespace pgpt;

namespace {

const std::string kBase =
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 128 --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 "
    "--num-attention-heads 4 "
    "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 "
    "--eval-interval 100 --eval-iters 0 "
    "--lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 0 --lr-decay-iters 5 --lr-decay-style cosine --weight-decay 0.1 "
    "--clip-grad 1.0 "
    "--attention-dropout 0 --hidden-dropout 0 --seed 1234 --log-interval 1 --num-workers 0 --log-params-norm "
    "--log-num-zeros-in-grad "
    "--weight-init layout-invariant ";

struct Run {
  std::vector<training::StepReport> steps;
  std::map<std::string, at::Tensor> weights;                // whole, logical
  std::map<std::string, std::vector<at::Tensor>> replicas;  // every rank's copy of replicated parameters
  pgpt::gtp::WeightChain::Counters counters;
  std::vector<std::string> last_lines;
  double largest_padding_gradient = 0;
};

Run run(const std::string& flags, int ranks) {
  Run result;
  std::mutex mutex;
  const config::Config config = test::parse(kBase + flags, ranks);
  const auto ranks_results = test::run_ranks(config, ranks, [&](int rank, training::Trainer& trainer) {
    trainer.run();
    const std::lock_guard lock(mutex);
    for (parameter::Parameter& p : trainer.store().parameters()) {
      const auto range = p.layout.local_range(0);
      at::Tensor& whole =
          result.weights.try_emplace(p.spec.name, at::zeros(p.layout.logical_shape, p.weight.options())).first->second;
      const std::int64_t kept = range.end - range.begin;
      if (kept > 0) whole.narrow(0, range.begin, kept).copy_(p.weight.narrow(0, 0, kept));
      if (p.sharded()) {
        const std::int64_t padding = p.weight.size(0) - kept;
        if (padding > 0) {
          result.largest_padding_gradient = std::max(
              result.largest_padding_gradient, p.main_gradient.narrow(0, kept, padding).abs().max().item<double>());
        }
      } else {
        result.replicas[p.spec.name].push_back(p.weight.clone());
      }
    }
    if (rank == 0) result.counters = trainer.chain().counters();
  });
  result.steps = ranks_results.back().steps;
  result.last_lines = ranks_results.back().lines;
  return result;
}

void check_equal_bits(const Run& a, const Run& b) {
  REQUIRE(a.steps.size() == b.steps.size());
  for (std::size_t i = 0; i < a.steps.size(); ++i) {
    CHECK(a.steps[i].losses[0].second == b.steps[i].losses[0].second);
    CHECK(*a.steps[i].grad_norm == *b.steps[i].grad_norm);
  }
  for (const auto& [name, weight] : a.weights) {
    INFO(name);
    CHECK(at::equal(weight, b.weights.at(name)));
  }
}

/// fp32 runs that differ in summation order only. Losses near 5 are means of sums with a relative error of a few 2^-24,
/// so 2e-6 on the first step; Adam amplifies the gradients' relative error of the same size, for which the reference's
/// own runs allow 1e-5 and, in weights, 5e-6.
void check_equal_sums(const Run& a, const Run& b) {
  REQUIRE(a.steps.size() == b.steps.size());
  for (std::size_t i = 0; i < a.steps.size(); ++i) {
    INFO("step " << i + 1);
    CHECK(std::abs(a.steps[i].losses[0].second - b.steps[i].losses[0].second) <= (i == 0 ? 2e-6 : 1e-5));
    CHECK(std::abs(*a.steps[i].grad_norm - *b.steps[i].grad_norm) <= (i == 0 ? 1e-6 : 2e-5) * *b.steps[i].grad_norm);
    CHECK(std::abs(*a.steps[i].params_norm - *b.steps[i].params_norm) <= 1e-6 * *b.steps[i].params_norm);
  }
  for (const auto& [name, weight] : a.weights) {
    INFO(name);
    const double difference = (weight.to(at::kDouble) - b.weights.at(name).to(at::kDouble)).norm().item<double>();
    CHECK(difference / std::sqrt(static_cast<double>(weight.numel())) <= 5e-6);
  }
}

const std::string kNoBias = "--disable-bias-linear ";
const std::string kUntied = "--untie-embeddings-and-output-weights ";
const std::string kLlama =
    "--disable-bias-linear --untie-embeddings-and-output-weights --swiglu --normalization RMSNorm "
    "--position-embedding-type rope "
    "--group-query-attention --num-query-groups 2 --qk-layernorm ";
std::string shards_flag(int shards) { return "--tensor-parallel-num-weight-shards " + std::to_string(shards) + " "; }

}  // namespace

TEST_CASE("GTP 1, 2 and 4 equal one-rank accumulation of the same batch in fp32", "[cpu][gtp]") {
  // Tied or untied, with or without biases; hidden 64 and ffn 96 need padding at 4 peers (multiples of 64 rows).
  for (const std::string& model : {std::string(), kUntied, kNoBias, kNoBias + kUntied, kLlama,
                                   kNoBias + kUntied + "--hidden-size 72 --ffn-hidden-size 72 "}) {
    INFO("model " << model);
    const Run one = run(model, 1);
    CHECK(one.counters.gathers == 0);
    CHECK(one.counters.scatters == 0);
    for (const int shards : {2, 4}) {
      INFO("GTP " << shards);
      const Run many = run(model + shards_flag(shards), shards);
      check_equal_sums(many, one);
      CHECK(many.counters.gathers > 0);
      CHECK(many.largest_padding_gradient == 0.0);
      for (const auto& [name, copies] : many.replicas) {
        INFO(name);
        for (const at::Tensor& copy : copies) CHECK(at::equal(copy, copies.front()));
      }
    }
  }
}

TEST_CASE("GTP with data parallelism equals plain data parallelism in fp32", "[cpu][gtp]") {
  const Run one = run(kUntied, 1);
  check_equal_sums(run(kUntied, 2), one);
  check_equal_sums(run(kUntied + shards_flag(2), 4), one);
  check_equal_sums(run(kUntied + shards_flag(2) + "--overlap-grad-reduce --ddp-bucket-size 20000", 4), one);
}

TEST_CASE("logits in parts equal whole ones in fp32, tied and untied, with evaluation", "[cpu][gtp]") {
  for (const std::string& model : {kUntied, kNoBias}) {
    INFO(model);
    const Run whole = run(model + "--eval-interval 2 --eval-iters 1 ", 1);
    check_equal_sums(run(model + "--eval-interval 2 --eval-iters 1 --logits-chunks 3 ", 1), whole);
    check_equal_sums(run(model + "--eval-interval 2 --eval-iters 1 --logits-chunks 5 " + shards_flag(2), 2), whole);
  }
}

TEST_CASE("prefetch, asynchronous scatter and recompute change no bit", "[cpu][gtp]") {
  for (const std::string& precision :
       {std::string(), std::string("--bf16 "), std::string("--bf16 --no-gradient-accumulation-fusion ")}) {
    for (const std::string& model : {std::string(), kLlama}) {
      INFO(precision << model);
      const std::string flags = precision + model + shards_flag(2);
      const Run plain = run(flags, 2);
      CHECK(plain.counters.prefetched_gathers > 0);
      const Run on_demand = run(flags + "--no-gtp-prefetch", 2);
      CHECK(on_demand.counters.prefetched_gathers == 0);
      check_equal_bits(on_demand, plain);
      check_equal_bits(run(flags + "--no-gtp-async-reduce-scatter", 2), plain);
      check_equal_bits(run(flags + "--gtp-communicators 1", 2), plain);
      check_equal_bits(
          run(flags + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 2), plain);
      check_equal_bits(run(flags + "--recompute-granularity full --recompute-method block --recompute-num-layers 1", 2),
                       plain);
      check_equal_bits(run(flags + "--recompute-granularity selective --recompute-modules core_attn layernorm mlp", 2),
                       plain);
    }
  }
}

TEST_CASE("weight gradients in two products are the same sums", "[cpu][gtp]") {
  // Padding at 4 peers, tied tables, several micro-batches (of which the first is split), recompute.
  for (const std::string& model : {std::string(), kUntied, kLlama}) {
    for (const int shards : {2, 4}) {
      INFO(model << shards);
      const std::string flags = model + shards_flag(shards);
      const Run whole = run(flags + "--gtp-weight-gradients whole", shards);
      const Run split = run(flags + "--gtp-weight-gradients split", shards);
      check_equal_sums(split, whole);
      CHECK(split.counters.scatters == whole.counters.scatters);
      check_equal_bits(run(flags + "--gtp-weight-gradients split --no-gtp-async-reduce-scatter", shards), split);
      check_equal_bits(
          run(flags + "--gtp-weight-gradients split --recompute-granularity full --recompute-method uniform "
                      "--recompute-num-layers 1",
              shards),
          split);
    }
  }
  // 16-bit gradients are scattered whole.
  for (const std::string more : {"--no-gradient-accumulation-fusion ", "--grad-reduce-in-bf16 "}) {
    const std::string rounded = "--bf16 " + more + kLlama + shards_flag(2);
    check_equal_bits(run(rounded + "--gtp-weight-gradients split", 2), run(rounded, 2));
  }
}

TEST_CASE("kept gathered weights change no bit and are gathered once a step", "[cpu][gtp]") {
  // Two micro-batches, 10 uses of which the embedding's is not read in backward: 2 * (10 + 9) gathers a step.
  constexpr std::int64_t kSteps = 4, kWhole = 2 * 19;
  for (const std::string& model : {std::string(), kLlama}) {
    INFO(model);
    const std::string flags = "--bf16 " + model + shards_flag(2);
    const Run plain = run(flags, 2);
    CHECK(plain.counters.gathers == kSteps * kWhole);
    // The last layer and the output matrix once, the embedding and the first layer as before.
    const Run half = run(flags + "--gtp-keep-gathered-layers 1", 2);
    CHECK(half.counters.gathers == kSteps * (5 + 2 * (5 + 4)));
    check_equal_bits(half, plain);
    const Run all = run(flags + "--gtp-keep-gathered-layers 2", 2);
    CHECK(all.counters.gathers == kSteps * (model.empty() ? 9 : 10));  // tied: one table
    check_equal_bits(all, plain);
    for (const std::string more :
         {"--no-gtp-prefetch ", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 ",
          "--recompute-granularity selective --recompute-modules core_attn layernorm mlp "}) {
      check_equal_bits(run(flags + "--gtp-keep-gathered-layers 1 " + more, 2), plain);
    }
    const std::string evaluated = flags + "--eval-interval 1 --eval-iters 1 ";
    check_equal_bits(run(evaluated + "--gtp-keep-gathered-layers 2", 2), run(evaluated, 2));
  }
}

TEST_CASE("the distributed optimizer has nothing to shard without replicas and changes no bit", "[cpu][gtp]") {
  check_equal_bits(run(kUntied + shards_flag(2) + "--use-distributed-optimizer", 2), run(kUntied + shards_flag(2), 2));
  CHECK_THROWS_AS(run(kUntied + "--use-distributed-optimizer", 2), pgpt::ConfigError);
}

TEST_CASE("recompute repeats the dropout masks", "[cpu][gtp]") {
  const std::string dropout = "--attention-dropout 0.1 --hidden-dropout 0.1 ";
  const Run plain = run(dropout, 1);
  const Run without = run("", 1);
  CHECK(plain.steps[0].losses[0].second != without.steps[0].losses[0].second);
  check_equal_bits(run(dropout + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", 1),
                   plain);
  check_equal_bits(run(dropout + "--recompute-granularity selective --recompute-modules core_attn layernorm mlp", 1),
                   plain);
}

TEST_CASE("GTP 2 in bf16 starts like data parallel 2 from equal weights", "[cpu][gtp]") {
  // With the applied rate 0 on step 1, steps 1 and 2 run on equal weights: forward bits are equal; gradients differ by
  // the rounding of halves.
  const std::string flags = "--bf16 --no-gradient-accumulation-fusion --lr-warmup-iters 1 " + kNoBias + kUntied;
  const Run sharded = run(flags + shards_flag(2), 2);
  const Run replicated = run(flags, 2);
  CHECK(sharded.steps[0].losses[0].second == replicated.steps[0].losses[0].second);
  CHECK(sharded.steps[1].losses[0].second == replicated.steps[1].losses[0].second);
  CHECK(std::abs(sharded.steps[2].losses[0].second - replicated.steps[2].losses[0].second) <= 6e-4);
}

TEST_CASE("per-token loss equals the default mean when every micro-batch has as many tokens", "[cpu][gtp]") {
  for (const int shards : {1, 2}) {
    const Run mean = run(kUntied + shards_flag(shards), 2);
    const Run tokens = run(kUntied + shards_flag(shards) + "--calculate-per-token-loss", 2);
    check_equal_sums(tokens, mean);
  }
}

TEST_CASE("per-token gradients do not depend on the layout when token counts differ", "[cpu][gtp]") {
  const std::string flags =
      kUntied + "--calculate-per-token-loss --eod-mask-loss --vocab-size 24 --make-vocab-size-divisible-by 8 ";
  const Run one = run(flags, 1);
  check_equal_sums(run(flags, 2), one);
  check_equal_sums(run(flags + shards_flag(2), 2), one);
  check_equal_sums(run(flags + shards_flag(4), 4), one);
  check_equal_sums(run(flags + "--micro-batch-size 2 " + shards_flag(2), 2), one);
}

TEST_CASE("evaluation averages over all samples under GTP and leaves training untouched", "[cpu][gtp]") {
  const std::string evaluate = kUntied + "--eval-interval 2 --eval-iters 2 ";
  const Run plain = run(kUntied + shards_flag(2), 2);
  const Run sharded = run(evaluate + shards_flag(2), 2);
  const Run one = run(evaluate, 1);
  check_equal_bits(sharded, plain);
  std::vector<double> losses[2];
  for (const Run* r : {&sharded, &one}) {
    for (const std::string& line : r->last_lines) {
      const auto at = line.find("lm loss value:");
      if (at != std::string::npos) losses[r == &one ? 1 : 0].push_back(std::stod(line.substr(at + 14)));
    }
  }
  REQUIRE(losses[0].size() == 4);  // two during training, validation and test after it
  REQUIRE(losses[1].size() == 4);
  for (std::size_t i = 0; i < 4; ++i) CHECK(std::abs(losses[0][i] - losses[1][i]) <= 1e-5);
}

TEST_CASE("Megatron initialisation draws each peer's shard from its own stream", "[cpu][gtp]") {
  const config::Config config = test::parse(kBase + kNoBias + kUntied + "--weight-init megatron " + shards_flag(2), 2);
  std::map<std::string, std::vector<at::Tensor>> shards;
  shards["decoder.layers.0.mlp.linear_fc1.weight"].resize(2);
  shards["output_layer.weight"].resize(2);
  test::run_ranks(config, 2, [&](int rank, training::Trainer& trainer) {
    for (auto& [name, parts] : shards)
      parts[static_cast<std::size_t>(rank)] = trainer.store().find(name).weight.clone();
  });
  for (std::uint64_t rank = 0; rank < 2; ++rank) {
    kernels::PhiloxState stream{1234 + 2718 + 65536 * (1 + rank), 0};
    at::Tensor proj = at::empty({32, 64});
    at::Tensor qkv = at::empty({96, 64});
    at::Tensor fc1 = at::empty({48, 64});
    const double output_std = 0.02 / std::sqrt(4.0);
    kernels::philox_normal_(proj, output_std, stream, 132);
    kernels::philox_normal_(qkv, 0.02, stream, 132);
    kernels::philox_normal_(fc1, 0.02, stream, 132);
    CHECK(at::equal(shards["decoder.layers.0.mlp.linear_fc1.weight"][rank], fc1));
  }
  kernels::PhiloxState stream{1234 + 2718, 0};
  at::Tensor words = at::empty({128, 64});
  at::Tensor output = at::empty({128, 64});
  kernels::philox_normal_(words, 0.02, stream, 132);
  kernels::philox_normal_(output, 0.02, stream, 132);
  CHECK(at::equal(at::cat({shards["output_layer.weight"][0], shards["output_layer.weight"][1]}), output));
}

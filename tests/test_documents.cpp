// Whole runs on samples of several documents that attention keeps apart (--reset-attention-mask and
// --dataloader-inter-document-masking): layouts, recompute, kernels and what the log says.

#include <cmath>

#include "pgpt/config/flops.h"
#include "pgpt/data/indexed_dataset.h"
#include "support/catch.h"
#include "support/temporary_folder.h"
#include "support/text.h"
#include "support/thread_ranks.h"

using namespace pgpt;

namespace {

constexpr std::int64_t kEod = 63;

/// Documents of 1 to 19 tokens and some without any; each ends with EOD.
void write_documents(const std::string& prefix) {
  data::IndexedDatasetWriter writer(prefix, data::TokenType::kUint16);
  std::uint32_t state = 12345;
  const auto draw = [&](std::uint32_t below) {
    state = state * 1664525U + 1013904223U;
    return static_cast<std::int64_t>((state >> 8) % below);
  };
  for (int i = 0; i < 400; ++i) {
    std::vector<std::int64_t> tokens;
    for (std::int64_t left = draw(20); left > 1; --left) tokens.push_back(draw(kEod));
    if (i % 17 != 0) tokens.push_back(kEod);
    writer.add_sequence(tokens);
    writer.end_document();
  }
  writer.finish();
}

struct Run {
  std::vector<training::StepReport> steps;
  std::vector<std::string> lines;  // of the first rank
  [[nodiscard]] double loss(std::size_t i) const { return steps.at(i).losses.at(0).second; }
  [[nodiscard]] bool says(const std::string& text) const { return test::has_line(lines, text); }
};

class Corpus {
 public:
  Corpus() { write_documents(folder_ / "c"); }

  [[nodiscard]] Run run(const std::string& flags, int ranks = 1) const {
    const config::Config config = test::parse(
        "--tokenizer-type NullTokenizer --vocab-size 64 --null-tokenizer-eod-id 63 --split 80,20,0 --num-layers 2 "
        "--hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --eval-interval 2 --eval-iters 1 --lr 1e-3 "
        "--min-lr 1e-4 --lr-warmup-iters 0 --lr-decay-iters 5 --lr-decay-style cosine --weight-decay 0.1 "
        "--attention-dropout 0 --hidden-dropout 0 --seed 1234 --log-interval 1 --num-workers 0 --disable-bias-linear "
        "--no-mmap-bin-files --untie-embeddings-and-output-weights --swiglu --normalization RMSNorm "
        "--position-embedding-type rope --group-query-attention --num-query-groups 2 --weight-init layout-invariant "
        "--data-path " +
            (folder_ / "c") + " " + flags,
        ranks);
    const auto results = test::run_ranks(config, ranks, [](int, training::Trainer& trainer) { trainer.run(); });
    return {results.back().steps, results.front().lines};
  }

 private:
  test::TemporaryFolder folder_;
};

void check_equal_bits(const Run& a, const Run& b) {
  REQUIRE(a.steps.size() == 4);
  REQUIRE(b.steps.size() == 4);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(a.loss(i) == b.loss(i));
    CHECK(*a.steps[i].grad_norm == *b.steps[i].grad_norm);
  }
}

/// fp32 runs that differ in summation order only, as in test_gtp.cpp.
void check_equal_sums(const Run& a, const Run& b) {
  REQUIRE(a.steps.size() == 4);
  REQUIRE(b.steps.size() == 4);
  for (std::size_t i = 0; i < 4; ++i) {
    INFO("step " << i + 1);
    CHECK(std::abs(a.loss(i) - b.loss(i)) <= (i == 0 ? 2e-6 : 1e-5));
    CHECK(std::abs(*a.steps[i].grad_norm - *b.steps[i].grad_norm) <= (i == 0 ? 1e-6 : 2e-5) * *b.steps[i].grad_norm);
  }
}

const std::string kApart[] = {"--reset-attention-mask ", "--dataloader-inter-document-masking "};
const std::string kShards = "--tensor-parallel-num-weight-shards 2 ";

}  // namespace

TEST_CASE("runs on documents kept apart do not depend on layout, recompute or kernels", "[cpu][documents]") {
  const Corpus corpus;
  for (const std::string& apart : kApart) {
    INFO(apart);
    const Run one = corpus.run(apart);
    CHECK(one.says("attention: flash (libtorch, CPU), segments"));
    const Run sharded = corpus.run(apart + kShards, 2);
    check_equal_sums(sharded, one);
    check_equal_sums(corpus.run(apart, 2), one);
    check_equal_sums(corpus.run(apart + "--logits-chunks 3 "), one);
    check_equal_sums(corpus.run(apart + "--num-workers 1 "), one);
    // In fp32 the forms of attention differ in summation order only.
    check_equal_sums(corpus.run(apart + "--attention-backend unfused "), one);
    check_equal_bits(
        corpus.run(
            apart + kShards + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 ", 2),
        sharded);
    check_equal_bits(corpus.run(apart + "--recompute-granularity selective --recompute-modules core_attn "), one);
    const Run bf16 = corpus.run(apart + "--bf16 ");
    CHECK(bf16.says("attention: composite (fused form), segments"));
    check_equal_bits(corpus.run(apart + "--bf16 --recompute-granularity selective --recompute-modules core_attn "),
                     bf16);
    // The local implementation runs them too, with its unfused attention.
    const Run local = corpus.run(apart + "--transformer-impl local ");
    CHECK(local.says("probabilities), segments"));
    check_equal_sums(corpus.run(apart + "--transformer-impl local " + kShards, 2), local);
  }
}

TEST_CASE("documents kept apart see other losses, and cost what they cost", "[cpu][documents]") {
  const Corpus corpus;
  const Run plain = corpus.run("");
  const Run masked = corpus.run(kApart[0]), packed = corpus.run(kApart[1]);
  CHECK(plain.says("attention: flash (libtorch, CPU)"));
  CHECK_FALSE(plain.says("segments"));
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(std::abs(plain.loss(i) - masked.loss(i)) > 1e-4);
    CHECK(plain.steps[i].tokens == 8 * 32);
    CHECK(masked.steps[i].flops < plain.steps[i].flops);
    // Every document ends with EOD but a few that end early: nearly the same cuts.
    CHECK(packed.steps[i].flops <= masked.steps[i].flops);
    CHECK(packed.steps[i].documents == plain.steps[i].documents);
    CHECK(packed.steps[i].documents > 8);
  }
  // Rotary positions restart with --dataloader-inter-document-masking only. Rotary attention depends on distances
  // alone, so in fp32 the losses of a first step could only tell them apart by rounding: learned positions show the
  // restart.
  const std::string learned = "--position-embedding-type learned_absolute ";
  const Run absolute = corpus.run(kApart[0] + learned),
            restarted = corpus.run(kApart[0] + learned + "--reset-position-ids ");
  CHECK(std::abs(absolute.loss(0) - restarted.loss(0)) > 1e-5);
}

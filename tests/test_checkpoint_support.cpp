#include "test_checkpoint_support.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "pgpt/base/error.h"
#include "pgpt/checkpoint/directory.h"
#include "pgpt/data/indexed_dataset.h"
#include "support/catch.h"
#include "support/thread_ranks.h"

namespace pgpt::test {

namespace {

/// 300 documents of 5 to 60 tokens below 126.
void write_corpus(const std::string& prefix) {
  data::IndexedDatasetWriter writer(prefix, data::TokenType::kUint16);
  std::mt19937 random(7);
  for (int document = 0; document < 300; ++document) {
    std::vector<std::int64_t> tokens(5 + random() % 56);
    for (std::int64_t& token : tokens) token = static_cast<std::int64_t>(random() % 126);
    writer.add_sequence(tokens);
    writer.end_document();
  }
  writer.finish();
}

}  // namespace

const std::string& base_flags() {
  static const ScratchFolder folder;
  static const std::string flags = [] {
    write_corpus(folder.path("corpus"));
    return "--data-path " + folder.path("corpus") + " --data-cache-path " + folder.path("cache") +
           " --split 80,15,5 --tokenizer-type NullTokenizer --vocab-size 127 --num-layers 2 --hidden-size 32 "
           "--ffn-hidden-size 64 "
           "--num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 "
           "--global-batch-size 4 --train-iters 8 "
           "--eval-interval 100 --eval-iters 0 --lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 2 --lr-decay-style cosine "
           "--weight-decay 0.1 "
           "--attention-dropout 0 --hidden-dropout 0 --seed 1234 --log-interval 1 --num-workers 0 --log-params-norm "
           "--save-interval 1000 ";
  }();
  return flags;
}

std::string gtp(int shards) { return concat("--tensor-parallel-num-weight-shards ", shards, " "); }

ScratchFolder::ScratchFolder() {
  static std::atomic<int> next{0};
  root_ = std::filesystem::temp_directory_path() / concat("pgpt_checkpoint_", ::getpid(), "_", next++);
  std::filesystem::create_directories(root_);
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(root_, ignored);
}

Outcome train(const std::string& flags, int ranks, const std::string& base) {
  const std::vector<RankResult> results =
      run_ranks(parse(base + flags, ranks), ranks, [](int, training::Trainer& trainer) { trainer.run(); });
  Outcome outcome;
  outcome.steps = results.back().steps;
  outcome.lines = results.front().lines;
  for (const std::string& line : results.back().lines) {
    if (contains(line, "loss at iteration")) outcome.evaluations.push_back(line);
  }
  return outcome;
}

Failure train_fails(const std::string& flags, int ranks) {
  // Each rank's own error: all must throw, one may speak.
  std::vector<std::unique_ptr<comm::World>> worlds = comm::World::connect_threads(ranks);
  std::vector<Failure> failures(static_cast<std::size_t>(ranks));
  std::vector<int> speakers(static_cast<std::size_t>(ranks), 0);
  std::vector<std::thread> threads;
  const config::Config config = parse(base_flags() + flags, ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto index = static_cast<std::size_t>(rank);
      try {
        training::Trainer trainer(config, *worlds[index], at::kCPU, [](const std::string&) {});
        trainer.run();
      } catch (const AgreedError& error) {
        failures[index] = {error.what(), static_cast<int>(error.code())};
        speakers[index] = error.speaks() ? 1 : 0;
      } catch (const std::exception& error) {
        failures[index] = {concat("not agreed: ", error.what()), -1};
      }
      try {
        worlds[index]->shutdown();
      } catch (const std::exception& error) {
        failures[index] = {concat("shutdown: ", error.what()), -1};
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Failure result;
  int count = 0;
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    INFO("rank " << rank << ": " << failures[rank].message);
    CHECK(failures[rank].code > 0);
    CHECK(failures[rank].code == failures[0].code);
    if (speakers[rank] == 0) continue;
    result = failures[rank];
    ++count;
  }
  CHECK(count == 1);
  return result;
}

void require_same_steps(const std::vector<training::StepReport>& actual,
                        const std::vector<training::StepReport>& expected) {
  REQUIRE(actual.size() == expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const training::StepReport& a = actual[i];
    const training::StepReport& b = expected[i];
    INFO("iteration " << b.iteration);
    CHECK(a.iteration == b.iteration);
    CHECK(a.consumed_samples == b.consumed_samples);
    CHECK(a.skipped_samples == b.skipped_samples);
    CHECK(a.losses == b.losses);
    CHECK(a.grad_norm == b.grad_norm);
    CHECK(a.params_norm == b.params_norm);
    CHECK(a.applied_learning_rate == b.applied_learning_rate);
    CHECK(a.learning_rate == b.learning_rate);
    CHECK(a.batch_size == b.batch_size);
    CHECK(a.applied_loss_scale == b.applied_loss_scale);
    CHECK(a.loss_scale == b.loss_scale);
    CHECK(a.skipped == b.skipped);
  }
}

std::vector<training::StepReport> tail(const std::vector<training::StepReport>& steps, std::size_t first) {
  return {steps.begin() + static_cast<std::ptrdiff_t>(first), steps.end()};
}

std::string iteration_path(const std::string& root, std::int64_t iteration) {
  return root + "/" + checkpoint::iteration_name(iteration);
}

void require_same_checkpoints(const std::string& a, const std::string& b) {
  const checkpoint::Checkpoint left(a);
  const checkpoint::Checkpoint right(b);
  checkpoint::Manifest state_a;
  checkpoint::Manifest state_b;
  state_a.state = left.manifest().state;
  state_b.state = right.manifest().state;
  CHECK(checkpoint::manifest_text(state_a) == checkpoint::manifest_text(state_b));
  REQUIRE(left.manifest().tensors.size() == right.manifest().tensors.size());
  for (const auto& [name, entry] : left.manifest().tensors) {
    INFO(name);
    REQUIRE(right.contains(name));
    const at::Tensor x = left.read(name);
    const at::Tensor y = right.read(name);
    REQUIRE(x.scalar_type() == y.scalar_type());
    REQUIRE(x.sizes().vec() == y.sizes().vec());
    CHECK(std::memcmp(x.data_ptr(), y.data_ptr(), static_cast<std::size_t>(x.numel()) * x.element_size()) == 0);
  }
}

int trials(const char* variable, int fallback) {
  const char* value = std::getenv(variable);
  return value == nullptr ? fallback : std::atoi(value);
}

}  // namespace pgpt::test

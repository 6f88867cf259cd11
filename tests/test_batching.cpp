// Microbatches, batch schedules, sample counts and FLOPs.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "pgpt/base/error.h"
#include "pgpt/config/batch_calculator.h"
#include "pgpt/config/flops.h"
#include "support/catch.h"
#include "support/json.h"
#include "support/text.h"

namespace {

using pgpt::config::BatchCalculator;
using pgpt::config::parse_batch_size_schedule;
using pgpt::config::TrainingConfig;
using pgpt::test::contains;
using pgpt::test::error_of;
using Json = nlohmann::json;
using Schedule = std::vector<std::pair<std::int64_t, std::int64_t>>;

const Json& golden() {
  static const Json data = pgpt::test::read_json(std::string(PGPT_TEST_DATA) + "/batching.json");
  return data;
}

std::int64_t integer_or(const Json& value, std::int64_t fallback) {
  return value.is_null() ? fallback : value.get<std::int64_t>();
}

}  // namespace

TEST_CASE("constant batches divide as the reference's", "[cpu][batching]") {
  REQUIRE(golden().at("constant").size() == 4);
  for (const Json& c : golden().at("constant")) {
    INFO(c.dump());
    TrainingConfig t;
    t.global_batch_size = c.at("global_batch_size");
    t.micro_batch_size = c.at("micro_batch_size");
    t.decrease_batch_size_if_needed = c.at("decrease_if_needed");
    const std::int64_t ranks = c.at("data_parallel_total");
    const Json& result = c.at("result");
    if (result.contains("error")) {
      const std::string message = error_of([&] { BatchCalculator(t, ranks); });
      CHECK(contains(message, result.at("error").get<std::string>()));
      CHECK(contains(message, "micro batch size 2 x data ranks 2"));
      continue;
    }
    BatchCalculator calculator(t, ranks);
    CHECK(calculator.num_microbatches() == result.at("num_microbatches").get<std::int64_t>());
    CHECK(calculator.samples_per_step() == result.at("running_global_batch_size").get<std::int64_t>());
    CHECK(calculator.skipped_per_step() == t.global_batch_size - calculator.samples_per_step());
    CHECK_FALSE(calculator.update(1000));
    CHECK(calculator.num_microbatches() == result.at("num_microbatches").get<std::int64_t>());
  }
}

TEST_CASE("batch size schedules parse and step as the reference's", "[cpu][batching]") {
  REQUIRE(golden().at("step").size() == 2);
  for (const Json& c : golden().at("step")) {
    INFO(c.dump());
    std::optional<std::int64_t> seq_length;
    if (!c.at("seq_length").is_null()) seq_length = c.at("seq_length").get<std::int64_t>();
    TrainingConfig t;
    t.micro_batch_size = c.at("micro_batch_size");
    t.batch_size_schedule = parse_batch_size_schedule(c.at("schedule"), seq_length);
    CHECK(t.batch_size_schedule == c.at("parsed").get<Schedule>());
    BatchCalculator calculator(t, c.at("data_parallel_total"));
    std::int64_t previous = calculator.num_microbatches();
    for (const auto& row : c.at("trace_consumed_gbs_nmb")) {
      const bool rose = calculator.update(row.at(0));
      CHECK(calculator.global_batch_size() == row.at(1).get<std::int64_t>());
      CHECK(calculator.num_microbatches() == row.at(2).get<std::int64_t>());
      CHECK(rose == (calculator.num_microbatches() > previous));
      previous = calculator.num_microbatches();
    }
    // The trace visits consecutive steps, so a run of all its samples has as many iterations.
    const auto& trace = c.at("trace_consumed_gbs_nmb");
    t.train_samples = trace.back().at(0).get<std::int64_t>() + trace.back().at(1).get<std::int64_t>();
    CHECK(pgpt::config::iterations_for_samples(t) == static_cast<std::int64_t>(trace.size()));
    t.train_samples -= 1;
    CHECK(pgpt::config::iterations_for_samples(t) == static_cast<std::int64_t>(trace.size()) - 1);
  }
}

TEST_CASE("malformed batch size schedules are refused", "[cpu][batching]") {
  CHECK(parse_batch_size_schedule("1.5K:16,\t0:8", 100) == Schedule{{0, 8}, {15, 16}});
  CHECK(parse_batch_size_schedule("0:1k", std::nullopt) == Schedule{{0, 1000}});
  CHECK(parse_batch_size_schedule("0:1 1M:2 1B:3 1T:4", std::nullopt) ==
        Schedule{{0, 1}, {1'000'000, 2}, {1'000'000'000, 3}, {1'000'000'000'000, 4}});
  for (const char* text : {"", " , ", "64:8", "0", "0:0", "0:-4", "0:4 -5:8", "x:4", "0:4K5", "0:4:5", ":4",
                           "0:", "0:K", "0:4 100:8 120:16", "0:nan", "0:1e30", "0:0x10"}) {
    INFO("'" << text << "'");
    CHECK(error_of([&] { (void)parse_batch_size_schedule(text, 64); }).find("--step-batch-size-schedule") == 0);
  }
  TrainingConfig t;
  t.micro_batch_size = 2;
  t.batch_size_schedule = {{0, 4}, {8, 6}, {20, 2}};
  BatchCalculator calculator(t, 1);
  CHECK(calculator.num_microbatches() == 2);
  CHECK(calculator.update(8));
  CHECK(calculator.num_microbatches() == 3);
  CHECK(contains(error_of([&] { calculator.update(20); }), "may only grow"));
  t.batch_size_schedule = {{0, 4}, {8, 7}};
  BatchCalculator odd(t, 1);
  CHECK(contains(error_of([&] { odd.update(8); }), "not divisible"));
  t.decrease_batch_size_if_needed = true;
  CHECK(contains(error_of([&] { BatchCalculator(t, 1); }), "exclude"));
}

TEST_CASE("requested samples equal the reference's", "[cpu][batching]") {
  REQUIRE(golden().at("num_samples").size() == 7);
  for (const Json& c : golden().at("num_samples")) {
    INFO(c.dump());
    const Json& a = c.at("arguments");
    TrainingConfig t;
    t.train_samples = integer_or(a.at("train_samples"), 0);
    t.train_iters = a.at("train_iters");
    t.global_batch_size = a.at("global_batch_size");
    t.full_validation = a.at("full_validation");
    t.skip_train = a.at("skip_train");
    t.eval_iters = a.at("eval_iters");
    t.eval_interval = a.at("eval_interval");
    t.start_eval_at_iter = integer_or(a.at("start_eval_at_iter"), 0);
    t.eval_global_batch_size = a.at("eval_global_batch_size");
    const auto requested = pgpt::config::requested_samples(t);
    const Json& expected = c.at("train_valid_test");
    CHECK(requested.train == expected.at(0).get<std::int64_t>());
    CHECK(requested.validation.has_value() == !expected.at(1).is_null());
    if (requested.validation) CHECK(*requested.validation == expected.at(1).get<std::int64_t>());
    CHECK(requested.test == expected.at(2).get<std::int64_t>());
  }
  TrainingConfig t;
  t.train_samples = 1000, t.global_batch_size = 8;
  CHECK(pgpt::config::iterations_for_samples(t) == 125);
  t.train_samples = 1007;
  CHECK(pgpt::config::iterations_for_samples(t) == 125);
  // Never evaluated during training: the final evaluation still needs its samples.
  t.eval_iters = 3, t.eval_global_batch_size = 8, t.train_iters = 125, t.eval_interval = 0;
  CHECK(pgpt::config::requested_samples(t).validation == 24);
  t.eval_interval = 10, t.skip_train = true;
  CHECK(pgpt::config::requested_samples(t).validation == 24);
}

TEST_CASE("FLOPs of a step follow the reference's formula", "[cpu][flops]") {
  pgpt::config::ModelConfig m;
  m.num_layers = 2, m.hidden_size = 128, m.ffn_hidden_size = 256, m.num_attention_heads = 4, m.num_query_groups = 4;
  m.kv_channels = 32, m.seq_length = 64, m.padded_vocab_size = 128;
  // 128 tokens * (786432 + 786432 + 98304) + 2 * 64^2 * 1536.
  CHECK(pgpt::config::training_flops(m, 2) == 226492416.0);
  // Packed: 100 real tokens in documents of 60 and 40.
  CHECK(pgpt::config::training_flops(m, 100.0, 60.0 * 60 + 40 * 40) == 100.0 * 1671168 + 5200.0 * 1536);
  m.activation = pgpt::config::Activation::kSwiglu;  // three matrices: the first term is 1.5 times as large
  m.num_query_groups = 1;                            // k and v shrink to 32 columns: 6*2*(128*192 + 128*128)
  CHECK(pgpt::config::training_flops(m, 2) == 128.0 * (1179648 + 491520 + 98304) + 8192.0 * 1536);
  CHECK(pgpt::config::tflops_per_gpu(4e12, 0.5, 4) == 2.0);
  CHECK(pgpt::config::tflops_per_gpu(4e12, 0.0, 4) == 0.0);
  m.activation = pgpt::config::Activation::kGeluTanh;
  m.num_query_groups = 4;
  CHECK(contains(pgpt::config::describe_flops(m), "tokens * 1671168 + sum(length^2) * 1536"));
}

// Samplers against the reference's own outputs, and the loader with and without its thread.
#include <map>
#include <set>

#include "pgpt/data/loader.h"
#include "pgpt/data/sampler.h"
#include "support/catch.h"
#include "test_data_support.h"

using namespace pgpt;
using namespace pgpt::data;
using namespace pgpt::data::test;

namespace {

using Batches = std::vector<std::vector<std::int64_t>>;

Batches drain(Sampler& sampler, std::size_t most = SIZE_MAX) {
  Batches batches;
  while (batches.size() < most) {
    auto batch = sampler.next();
    if (!batch) break;
    batches.push_back(std::move(*batch));
  }
  return batches;
}

SamplerRequest request_of(const json& c, std::int64_t rank) {
  SamplerRequest request;
  request.total = c["total"];
  request.consumed = c.value("consumed", 0);
  request.micro_batch = c.value("micro_batch_size", 1);
  request.rank = rank;
  request.size = c["dp_size"];
  return request;
}

SamplerRequest make_request(std::int64_t total, std::int64_t consumed, std::int64_t micro_batch, std::int64_t rank,
                            std::int64_t size) {
  return {"train", total, consumed, micro_batch, rank, size};
}

/// A data set whose sample i is the single token i, failing at one index.
class Counting : public Dataset {
 public:
  explicit Counting(std::int64_t size, std::int64_t fails_at = -1) : size_(size), fails_at_(fails_at) {}
  [[nodiscard]] std::int64_t size() const override { return size_; }
  [[nodiscard]] std::int64_t seq_length() const override { return 1; }
  [[nodiscard]] Sample sample(std::int64_t index) const override {
    if (index == fails_at_) throw DataError("bad sample");
    Sample sample;
    sample.tokens = sample.labels = {index};
    sample.position_ids = {0};
    sample.loss_mask = {1.0F};
    sample.document_lengths = {1};
    return sample;
  }

 private:
  std::int64_t size_, fails_at_;
};

std::unique_ptr<DataLoader> counting_loader(std::int64_t total, bool background, std::int64_t fails_at = -1,
                                            std::int64_t consumed = 0) {
  LoaderOptions options;
  options.background = background;
  options.depth = 3;
  return std::make_unique<DataLoader>(std::make_shared<Counting>(total, fails_at),
                                      std::make_unique<SingleSampler>(make_request(total, consumed, 2, 0, 1)), options);
}

}  // namespace

TEST_CASE("the single sampler gives the reference's batches", "[cpu]") {
  for (const auto& c : golden("samplers.json")["single"]) {
    for (std::int64_t rank = 0; rank < c["dp_size"].get<std::int64_t>(); ++rank) {
      SingleSampler sampler(request_of(c, rank), c["drop_last"]);
      CHECK(drain(sampler) == c["batches_per_rank"][static_cast<std::size_t>(rank)].get<Batches>());
    }
  }
}

TEST_CASE("the cyclic sampler gives the reference's batches in this epoch and the next", "[cpu]") {
  for (const auto& c : golden("samplers.json")["cyclic"]) {
    const std::int64_t ranks = c["dp_size"];
    const std::int64_t group = ranks * c["micro_batch_size"].get<std::int64_t>();
    const std::int64_t active = c["total"].get<std::int64_t>() / group * group;
    const std::int64_t left = (active - c["consumed"].get<std::int64_t>() % active) / group;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      CyclicSampler sampler(request_of(c, rank), c["data_sharding"]);
      const Batches batches = drain(sampler, static_cast<std::size_t>(left));
      auto expected = c["batches_per_rank"][static_cast<std::size_t>(rank)].get<Batches>();
      // With a remainder of a micro-batch or more the reference's unsharded order gives low ranks one more and drifts
      // apart.
      const bool drifts = !c["data_sharding"].get<bool>() && c["total"].get<std::int64_t>() != active;
      REQUIRE(expected.size() >= static_cast<std::size_t>(left));
      CHECK((drifts || expected.size() == static_cast<std::size_t>(left)));
      expected.resize(static_cast<std::size_t>(left));
      CHECK(batches == expected);
      if (rank == 0 && !drifts) {
        const auto next = c["next_epoch_batches_rank0"].get<Batches>();
        CHECK(drain(sampler, next.size()) == next);
      }
    }
  }
}

TEST_CASE("the full-validation sampler gives the reference's items, again and again", "[cpu]") {
  for (const auto& c : golden("samplers.json")["full_validation"]) {
    const std::int64_t ranks = c["dp_size"];
    const std::int64_t total = c["total"];
    if (total < ranks) {
      // The reference lets the ranks without an item die.
      CHECK(contains(error_of<DataError>([&] { FullValidationSampler(request_of(c, 0)); }),
                     "3 samples for 4 data ranks"));
      continue;
    }
    std::int64_t longest = 0;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      FullValidationSampler sampler(request_of(c, rank));
      const auto expected = c["batches_per_rank"][static_cast<std::size_t>(rank)].get<Batches>();
      CHECK(drain(sampler, expected.size()) == expected);
      CHECK(drain(sampler, expected.size()) == expected);
      longest = std::max(longest, c["len_per_rank"][static_cast<std::size_t>(rank)].get<std::int64_t>());
    }
    CHECK(FullValidationSampler::iterations(total, ranks) == longest);
  }
}

TEST_CASE("all ranks get the same number of batches for every remainder, and no sample twice", "[cpu]") {
  for (const std::int64_t ranks : {1, 2, 3}) {
    for (const std::int64_t micro_batch : {1, 2, 4}) {
      const std::int64_t group = ranks * micro_batch;
      for (std::int64_t total = group; total < 4 * group; ++total) {
        for (const int kind : {0, 1, 2}) {
          std::set<std::int64_t> seen;
          for (std::int64_t rank = 0; rank < ranks; ++rank) {
            const auto request = make_request(total, 0, micro_batch, rank, ranks);
            std::unique_ptr<Sampler> sampler;
            if (kind == 0)
              sampler = std::make_unique<SingleSampler>(request);
            else
              sampler = std::make_unique<CyclicSampler>(request, kind == 1);
            const auto count = static_cast<std::size_t>(total / group);
            const Batches batches = drain(*sampler, kind == 0 ? SIZE_MAX : count);
            REQUIRE(batches.size() == count);
            for (const auto& batch : batches) {
              REQUIRE(batch.size() == static_cast<std::size_t>(micro_batch));
              for (const std::int64_t id : batch) {
                REQUIRE(id < total);
                REQUIRE(seen.insert(id).second);
              }
            }
          }
        }
      }
    }
  }
}

TEST_CASE("the samples of a global batch do not depend on the number of data ranks", "[cpu]") {
  // Global batch 8, micro-batch 1: 8 micro-batches on one rank, 4 on two, 2 on four.
  std::vector<std::set<std::int64_t>> reference;
  for (const std::int64_t ranks : {1, 2, 4}) {
    std::vector<std::set<std::int64_t>> steps(5);
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      SingleSampler sampler(make_request(48, 8, 1, rank, ranks));
      for (auto& step : steps) {
        for (const auto& batch : drain(sampler, static_cast<std::size_t>(8 / ranks)))
          step.insert(batch.begin(), batch.end());
      }
    }
    if (reference.empty()) reference = steps;
    CHECK(steps == reference);
    std::int64_t next = 8;
    for (const auto& step : steps) {
      std::set<std::int64_t> expected;
      for (int i = 0; i < 8; ++i) expected.insert(next++);
      CHECK(step == expected);
    }
  }
}

TEST_CASE("a cyclic run stopped in epoch 2 and resumed sees every sample once an epoch", "[cpu]") {
  for (const bool sharding : {true, false}) {
    std::vector<std::int64_t> whole;
    std::vector<std::int64_t> resumed;
    std::map<std::int64_t, int> times;
    for (std::int64_t rank = 0; rank < 2; ++rank) {
      CyclicSampler all(make_request(100, 0, 5, rank, 2), sharding);
      for (const auto& batch : drain(all, 50)) {  // 5 epochs of 10 batches a rank
        whole.insert(whole.end(), batch.begin(), batch.end());
        for (const std::int64_t id : batch) ++times[id];
      }
      std::int64_t consumed = 0;
      for (const std::size_t part : {13U, 9U, 28U}) {  // stops inside epochs 2 and 3
        CyclicSampler sampler(make_request(100, consumed, 5, rank, 2), sharding);
        for (const auto& batch : drain(sampler, part)) resumed.insert(resumed.end(), batch.begin(), batch.end());
        consumed += static_cast<std::int64_t>(part) * 10;
      }
    }
    CHECK(resumed == whole);
    CHECK(times.size() == 100);
    for (const auto& [id, count] : times) CHECK(count == 5);
  }
}

TEST_CASE("samplers explain what is missing", "[cpu]") {
  const auto single = [](std::int64_t total, std::int64_t consumed) {
    return error_of<DataError>([&] { SingleSampler(make_request(total, consumed, 2, 0, 2)); });
  };
  CHECK(contains(single(0, 0), "no full sample"));
  CHECK(contains(single(16, 16), "gives 16 samples and 16 are consumed"));
  CHECK(single(16, 12).empty());
  const auto cyclic = [](std::int64_t total, std::int64_t consumed) {
    return error_of<DataError>([&] { CyclicSampler(make_request(total, consumed, 2, 0, 2), true); });
  };
  CHECK(contains(cyclic(3, 0), "has 3 samples"));
  CHECK(contains(cyclic(3, 0), "needs 4"));
  CHECK(contains(cyclic(16, 18), "2 into its epoch of 16"));
}

TEST_CASE("the loader gives the same batches with and without its thread", "[cpu]") {
  for (const bool background : {false, true}) {
    const auto loader = counting_loader(100, background);
    for (std::int64_t i = 0; i < 50; ++i) {
      const MicroBatch batch = loader->next();
      CHECK(batch.tokens == std::vector<std::int64_t>{2 * i, 2 * i + 1});
      CHECK(batch.sample_ids == batch.tokens);
    }
    for (int again = 0; again < 2; ++again) {
      const std::string message = error_of<DataError>([&] { (void)loader->next(); });
      CHECK(contains(message, "gives 100 samples and 100 are consumed"));
      CHECK(contains(message, "--train-samples"));
    }
  }
}

TEST_CASE("a failing sample reaches the consumer after the good ones and stays", "[cpu]") {
  for (const bool background : {false, true}) {
    const auto loader = counting_loader(100, background, 11);
    for (std::int64_t i = 0; i < 5; ++i) CHECK(loader->next().tokens[0] == 2 * i);
    for (int again = 0; again < 3; ++again) {
      CHECK(error_of<DataError>([&] { (void)loader->next(); }) == "bad sample");
    }
  }
}

TEST_CASE("loaders stop cleanly at any moment", "[cpu]") {
  for (int round = 0; round < 200; ++round) {
    const auto loader = counting_loader(1000, true, round % 3 == 0 ? round : -1);
    for (int i = 0; i < round % 4; ++i) {
      try {
        (void)loader->next();
      } catch (const DataError&) {
      }
    }
  }
  SUCCEED("200 loaders were destroyed with a full, empty or failed queue");
}

TEST_CASE("a loader resumed after consumed samples continues where it stopped", "[cpu]") {
  const auto whole = counting_loader(100, true);
  for (int i = 0; i < 17; ++i) (void)whole->next();
  const auto resumed = counting_loader(100, false, -1, 34);
  for (int i = 0; i < 33; ++i) CHECK(resumed->next().sample_ids == whole->next().sample_ids);
}

TEST_CASE("a micro-batch carries attention segments and packed statistics", "[cpu]") {
  const TemporaryFolder folder;
  // Documents of 5 and 4 tokens in order 0, 1 or 1, 0; S = 8, one sample.
  const std::int64_t e = 127;
  write_corpus(folder / "c", {{1, 2, 3, 4, e}, {5, 6, 7, e}});
  config::Config config = small_config(folder / "c");
  config.training.train_iters = 1;
  const auto batch_of = [&](const config::Config& c) {
    return make_loader(c, build(c).train, Split::kTrain, 0, 1, 0)->next();
  };

  const MicroBatch plain = batch_of(config);
  CHECK(plain.cu_seqlens.empty());
  CHECK(plain.statistics.tokens == 8);
  CHECK(plain.statistics.valid_tokens == 8);
  CHECK(plain.statistics.documents == 2);
  CHECK(plain.statistics.segments == 1);
  CHECK(plain.statistics.squared_segment_lengths == 64);
  // The last token is only a label: the pieces are 5 + 3 or 4 + 4.
  const bool first_is_long = plain.tokens[0] == 1;
  CHECK(plain.statistics.squared_document_lengths == (first_is_long ? 25 + 9 : 16 + 16));

  config::Config masked = config;
  masked.data.eod_mask_loss = masked.data.reset_position_ids = masked.data.reset_attention_mask = true;
  const MicroBatch resets = batch_of(masked);
  CHECK(resets.tokens == plain.tokens);
  CHECK(resets.statistics.valid_tokens == 7);
  CHECK(resets.statistics.segments == 2);
  CHECK(resets.statistics.squared_segment_lengths == plain.statistics.squared_document_lengths);
  CHECK(resets.cu_seqlens == std::vector<std::int32_t>{0, first_is_long ? 5 : 4, 8});
  CHECK_FALSE(resets.restart_positions);  // only learned positions restart, and only with --reset-position-ids
  masked.data.create_attention_mask = false;
  Lines lines;
  (void)build(masked, lines.sink());
  CHECK(lines.has("--reset-attention-mask has no effect together with --no-create-attention-mask-in-dataloader"));
  CHECK(batch_of(masked).cu_seqlens.empty());

  config::Config packed = config;
  packed.data.inter_document_masking = true;
  packed.training.micro_batch_size = 2;
  packed.training.global_batch_size = 2;
  const MicroBatch two = batch_of(packed);
  CHECK(two.restart_positions);
  CHECK(two.micro_batch == 2);
  CHECK(two.tokens.size() == 16);
  CHECK(two.cu_seqlens.front() == 0);
  CHECK(two.cu_seqlens.back() == 16);
  CHECK(std::count(two.cu_seqlens.begin(), two.cu_seqlens.end(), 8) == 1);
  std::int64_t squares = 0;
  for (std::size_t k = 1; k < two.cu_seqlens.size(); ++k) {
    const std::int32_t length = two.cu_seqlens[k] - two.cu_seqlens[k - 1];
    CHECK(length > 0);
    squares += length * length;
    for (std::int32_t i = 0; i < length; ++i)
      CHECK(two.position_ids[static_cast<std::size_t>(two.cu_seqlens[k - 1] + i)] == i);
  }
  CHECK(two.statistics.squared_segment_lengths == squares);
  CHECK(two.statistics.segments == static_cast<std::int64_t>(two.cu_seqlens.size()) - 1);
  CHECK(two.statistics.segments == two.statistics.documents);

  packed.data.reset_attention_mask = true;
  packed.data.create_attention_mask = false;  // as the command line derives it
  Lines both;
  (void)build(packed, both.sink());
  CHECK(both.has("--reset-attention-mask has no effect together with --dataloader-inter-document-masking"));
}

TEST_CASE("documents of no or one token between others leave whole segments", "[cpu]") {
  const TemporaryFolder folder;
  const std::int64_t e = 127;
  write_corpus(folder / "c", {{1, 2, e}, {}, {e}, {3, 4, 5, e}, {}, {6, e}});
  config::Config config = small_config(folder / "c");
  config.data.inter_document_masking = true;
  config.training.train_iters = 6;
  const auto loader = make_loader(config, build(config).train, Split::kTrain, 0, 1, 0);
  for (int i = 0; i < 6; ++i) {
    const MicroBatch batch = loader->next();
    REQUIRE(batch.cu_seqlens.front() == 0);
    REQUIRE(batch.cu_seqlens.back() == 8);
    for (std::size_t k = 1; k < batch.cu_seqlens.size(); ++k) {
      const auto begin = static_cast<std::size_t>(batch.cu_seqlens[k - 1]),
                 end = static_cast<std::size_t>(batch.cu_seqlens[k]);
      REQUIRE(begin < end);
      // Documents end with EOD, so inside a segment it can only come last.
      for (std::size_t t = begin; t + 1 < end; ++t) CHECK(batch.tokens[t] != e);
      CHECK(batch.position_ids[begin] == 0);
    }
  }
}

// Sample order, sample contents and masks against the reference's own outputs.
#include "pgpt/data/gpt_dataset.h"
#include "pgpt/data/sample_order.h"
#include "support/catch.h"
#include "test_data_support.h"

using namespace pgpt;
using namespace pgpt::data;
using namespace pgpt::data::test;

namespace {

/// Mask [S, S] as the reference builds it, row-major, 1 = masked: column > row, and every earlier attention segment.
std::vector<std::uint8_t> attention_mask(std::int64_t seq_length, const std::vector<std::int32_t>& segment_starts) {
  std::vector<std::uint8_t> mask;
  for (std::int64_t row = 0; row < seq_length; ++row) {
    std::int64_t begin = 0;
    for (const std::int32_t start : segment_starts) begin = start <= row ? start : begin;
    for (std::int64_t column = 0; column < seq_length; ++column) mask.push_back(column > row || column < begin ? 1 : 0);
  }
  return mask;
}

void check_array(const IntArray& array, const json& expected) {
  const std::string type = expected["dtype"];
  CHECK(array.type() == (type == "int32" ? IntType::kInt32 : type == "uint32" ? IntType::kUint32 : IntType::kInt64));
  REQUIRE(array.rows() == expected["shape"][0].get<std::int64_t>());
  CHECK(crc32(array.bytes()) == expected["crc32_le"].get<std::uint32_t>());
  if (!expected.contains("data")) return;
  const auto& data = expected["data"];
  for (std::size_t i = 0; i < data.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i);
    if (array.columns() == 1) {
      CHECK(array[row] == data[i].get<std::int64_t>());
    } else {
      CHECK(array.at(row, 0) == data[i][0].get<std::int64_t>());
      CHECK(array.at(row, 1) == data[i][1].get<std::int64_t>());
    }
  }
}

OrderRequest request_of(const json& c) {
  OrderRequest request;
  request.documents = {c["document_range"][0], c["document_range"][1]};
  if (!c["num_samples"].is_null()) request.num_samples = c["num_samples"].get<std::int64_t>();
  request.seq_length = c["seq_length"];
  request.seed = c["seed"];
  request.extra_token = c["add_extra_token"];
  request.keep_last_partial = c["index_split"] == "valid" && !c["drop_last_partial_validation_sequence"].get<bool>();
  return request;
}

SampleOptions options_of(const json& c) {
  SampleOptions options;
  options.eod = c["eod"];
  options.pad = c["pad"];
  options.eod_mask_loss = c["eod_mask_loss"];
  options.reset_position_ids = c["reset_position_ids"];
  options.reset_attention_mask = c["reset_attention_mask"];
  options.inter_document_masking = c["inter_document_masking"];
  return options;
}

GptDataset make(std::shared_ptr<const DocumentSource> source, const OrderRequest& request,
                const SampleOptions& options) {
  SampleOrder order = build_order(*source, request);
  return {std::move(source), request, options, std::move(order)};
}

/// One document of the given tokens, cut into one sample of all but the last.
Sample sample_of(const TemporaryFolder& folder, const std::vector<std::int64_t>& tokens, const SampleOptions& options) {
  write_corpus(folder / "seam", {tokens});
  OrderRequest request;
  request.documents = {0, 1};
  request.seq_length = static_cast<std::int64_t>(tokens.size()) - 1;
  return make(std::make_shared<IndexedDataset>(folder / "seam"), request, options).sample(0);
}

}  // namespace

TEST_CASE("index arrays and every sample equal the reference's", "[cpu]") {
  const json file = golden("gpt_samples.json");
  REQUIRE(file["cases"].size() == 16);
  for (const auto& c : file["cases"]) {
    INFO(c["name"].get<std::string>());
    if (c["name"] == "a_none_index") {
      // Batch padding, which no sampler asks for, is sample 0 of the first case without loss.
      const json& first = file["cases"][0];
      const Sample sample =
          make(std::make_shared<IndexedDataset>(golden_path("corpus_a")), request_of(first), options_of(first))
              .sample(0);
      CHECK(sample.tokens == c["tokens"].get<std::vector<std::int64_t>>());
      CHECK(sample.labels == c["labels"].get<std::vector<std::int64_t>>());
      continue;
    }
    const bool upstream_defect = c["name"] == "a_padid5_cached_upstream_defect";
    const auto source = std::make_shared<IndexedDataset>(golden_path(c["corpus"]));
    const GptDataset dataset = make(source, request_of(c), options_of(c));
    const OrderPlan& plan = dataset.order().plan;
    CHECK(plan.tokens_per_epoch == c["tokens_per_epoch"].get<std::int64_t>());
    CHECK(plan.epochs == c["num_epochs"].get<std::int64_t>());
    CHECK(plan.separate_last_epoch == c["separate_final_epoch"].get<bool>());
    if (c.contains("samples_sans_final_epoch")) {
      CHECK(plan.samples_before_last_epoch == c["samples_sans_final_epoch"].get<std::int64_t>());
    }
    REQUIRE(dataset.size() == c["length"].get<std::int64_t>());
    check_array(dataset.order().document_index, c["document_index"]);
    check_array(dataset.order().sample_index, c["sample_index"]);
    check_array(dataset.order().shuffle_index, c["shuffle_index"]);
    for (const auto& expected : c["samples"]) {
      const auto index = expected["dataset_index"].get<std::int64_t>();
      INFO("sample " << index);
      const Sample sample = dataset.sample(index);
      CHECK(dataset.order().shuffle_index[index] == expected["shuffled_index"].get<std::int64_t>());
      CHECK(sample.tokens == expected["tokens"].get<std::vector<std::int64_t>>());
      CHECK(sample.labels == expected["labels"].get<std::vector<std::int64_t>>());
      if (expected.contains("loss_mask") && (!upstream_defect || index == 0)) {
        CHECK(sample.loss_mask == expected["loss_mask"].get<std::vector<float>>());
      }
      if (expected.contains("position_ids")) {
        CHECK(sample.position_ids == expected["position_ids"].get<std::vector<std::int64_t>>());
      }
      if (expected.contains("attention_mask_true_means_masked_rows_as_hex")) {
        const auto mask = attention_mask(dataset.seq_length(), sample.segment_starts);
        const auto s = static_cast<std::size_t>(dataset.seq_length());
        for (std::size_t row = 0; row < s; ++row) {
          std::uint64_t bits = 0;
          for (std::size_t column = 0; column < s; ++column) bits = 2 * bits + mask[row * s + column];
          const std::string hex = expected["attention_mask_true_means_masked_rows_as_hex"][row];
          CHECK(bits == std::stoull(hex, nullptr, 16));
        }
      }
      std::int64_t total = 0;
      for (const auto length : sample.document_lengths) total += length;
      CHECK(total == dataset.seq_length());
      if (expected.contains("cu_seqlens")) {
        std::vector<std::int64_t> ends = {0};
        for (const auto length : sample.document_lengths) ends.push_back(ends.back() + length);
        CHECK(std::vector<std::int64_t>(sample.segment_starts.begin(), sample.segment_starts.end()) ==
              std::vector<std::int64_t>(ends.begin(), ends.end() - 1));
        ends.resize(static_cast<std::size_t>(dataset.seq_length()) + 1, dataset.seq_length());
        CHECK(ends == expected["cu_seqlens"].get<std::vector<std::int64_t>>());
        CHECK(*std::max_element(sample.document_lengths.begin(), sample.document_lengths.end()) ==
              expected["max_seqlen"].get<std::int64_t>());
      }
    }
  }
}

TEST_CASE("pad labels lose their loss in their own sample only", "[cpu]") {
  // The reference lets the first sample's pad positions stick to all later samples; here each mask is its own.
  for (const auto& c : golden("gpt_samples.json")["cases"]) {
    if (c["name"] != "a_padid5_cached_upstream_defect") continue;
    const auto source = std::make_shared<IndexedDataset>(golden_path("corpus_a"));
    const GptDataset dataset = make(source, request_of(c), options_of(c));
    SampleOptions raw = options_of(c);
    raw.pad = -1;
    const GptDataset unpadded = make(source, request_of(c), raw);
    for (std::int64_t i = 0; i < dataset.size(); ++i) {
      const Sample sample = dataset.sample(i);
      const Sample before = unpadded.sample(i);
      for (std::size_t k = 0; k < sample.tokens.size(); ++k) {
        CHECK(sample.loss_mask[k] == (before.labels[k] == 5 ? 0.0F : 1.0F));
        CHECK(sample.labels[k] == (before.labels[k] == 5 ? 0 : before.labels[k]));
        CHECK(sample.tokens[k] == (before.tokens[k] == 5 ? 0 : before.tokens[k]));
      }
    }
    return;
  }
  FAIL("golden case is missing");
}

TEST_CASE("the mock run's order and tokens equal the reference's", "[cpu]") {
  const json run = golden("mock_run.json");
  OrderRequest request;
  request.seq_length = 64;
  const auto mock = std::make_shared<MockDocuments>(128, 127);
  constexpr const char* kSplits[] = {"train", "valid", "test"};
  for (std::size_t i = 0; i < 3; ++i) {
    request.documents = {run["split_bounds"][i][0], run["split_bounds"][i][1]};
    request.num_samples = i == 0 ? 6 : 0;
    const SampleOrder order = build_order(*mock, request);
    CHECK(order.plan.samples == run[kSplits[i]]["length"].get<std::int64_t>());
    check_array(order.document_index, run[kSplits[i]]["document_index"]);
    check_array(order.sample_index, run[kSplits[i]]["sample_index"]);
    check_array(order.shuffle_index, run[kSplits[i]]["shuffle_index"]);
  }
  request.documents = {0, 33333};
  request.num_samples = 6;
  for (const std::int64_t vocab : {128, 50257}) {
    SampleOptions options;
    options.eod = vocab - 1;
    options.vocab_limit = vocab;
    const GptDataset dataset = make(std::make_shared<MockDocuments>(vocab, vocab - 1), request, options);
    const json& expected = run["samples_vocab_" + std::to_string(vocab)];
    for (const char* list : {"first6", "crossing_documents"}) {
      for (const auto& item : expected[list]) {
        const Sample sample = dataset.sample(item["dataset_index"]);
        CHECK(sample.tokens == item["tokens"].get<std::vector<std::int64_t>>());
        CHECK(sample.labels == item["labels"].get<std::vector<std::int64_t>>());
      }
    }
  }
}

TEST_CASE("three epochs of mock data with a separate last epoch equal the reference's", "[cpu]") {
  const json expected = golden("mock_run.json")["multi_epoch_seq4096_num_samples_40000"];
  OrderRequest request;
  request.documents = {0, 33333};
  request.num_samples = 40000;
  request.seq_length = 4096;
  const SampleOrder order = build_order(MockDocuments(128, 127), request);
  CHECK(order.plan.epochs == expected["num_epochs"].get<std::int64_t>());
  CHECK(order.plan.tokens_per_epoch == expected["tokens_per_epoch"].get<std::int64_t>());
  CHECK(order.plan.samples_before_last_epoch == expected["samples_sans_final"].get<std::int64_t>());
  CHECK(order.plan.separate_last_epoch == expected["separate_final_epoch"].get<bool>());
  check_array(order.document_index, expected["document_index"]);
  check_array(order.sample_index, expected["sample_index"]);
  check_array(order.shuffle_index, expected["shuffle_index"]);
}

TEST_CASE("the seam between documents is masked as specified", "[cpu]") {
  const TemporaryFolder folder;
  const std::int64_t e = 9;
  SampleOptions options;
  options.eod = e;
  options.eod_mask_loss = options.reset_position_ids = options.reset_attention_mask = true;
  // EOD first, two in a row, and last among the inputs; the label after the last input is 4.
  const Sample sample = sample_of(folder, {e, 1, 2, e, e, 3, e, 4}, options);
  CHECK(sample.tokens == std::vector<std::int64_t>{e, 1, 2, e, e, 3, e});
  CHECK(sample.labels == std::vector<std::int64_t>{1, 2, e, e, 3, e, 4});
  CHECK(sample.loss_mask == std::vector<float>{0, 1, 1, 0, 0, 1, 0});
  CHECK(sample.position_ids == std::vector<std::int64_t>{0, 0, 1, 2, 0, 0, 1});
  CHECK(sample.segment_starts == std::vector<std::int32_t>{0, 1, 4, 5});
  const auto mask = attention_mask(7, sample.segment_starts);
  const std::vector<std::int64_t> eods = {0, 3, 4, 6};
  for (std::int64_t row = 0; row < 7; ++row) {
    for (std::int64_t column = 0; column < 7; ++column) {
      bool masked = column > row;
      for (const std::int64_t p : eods) masked = masked || (row > p && column <= p);
      CHECK(mask[static_cast<std::size_t>(7 * row + column)] == (masked ? 1 : 0));
    }
  }
}

TEST_CASE("a pad id equal to EOD is dropped unless ambiguity is allowed", "[cpu]") {
  TokenizerFacts facts;
  facts.eod = 9;
  facts.pad = 9;
  CHECK(facts.effective_pad(false) == -1);
  CHECK(facts.effective_pad(true) == 9);
  facts.pad = 3;
  CHECK(facts.effective_pad(false) == 3);

  const TemporaryFolder folder;
  SampleOptions options;
  options.eod = options.pad = 9;
  options.reset_position_ids = true;
  const Sample sample = sample_of(folder, {1, 9, 2, 9, 3}, options);
  CHECK(sample.tokens == std::vector<std::int64_t>{1, 0, 2, 0});
  CHECK(sample.labels == std::vector<std::int64_t>{0, 2, 0, 3});
  CHECK(sample.loss_mask == std::vector<float>{0, 1, 0, 1});
  CHECK(sample.position_ids == std::vector<std::int64_t>{0, 1, 0, 1});
}

TEST_CASE("mask flags without an EOD id are refused", "[cpu]") {
  const TemporaryFolder folder;
  SampleOptions options;
  options.eod_mask_loss = true;
  CHECK(
      contains(error_of<ConfigError>([&] { (void)sample_of(folder, {1, 2, 3}, options); }), "--null-tokenizer-eod-id"));
}

TEST_CASE("tiny corpora give as many epochs as are needed", "[cpu]") {
  const TemporaryFolder folder;
  struct Case {
    std::int64_t tokens, samples, epochs, length;
  };
  // S = 8: E is the smallest with E * T >= N * 8 + 1, and (E * T - 1) / 8 samples come out.
  for (const Case& c : {Case{3, 1, 3, 1}, Case{8, 1, 2, 1}, Case{9, 1, 1, 1}, Case{10, 1, 1, 1}, Case{9, 2, 2, 2},
                        Case{1, 2, 17, 2}, Case{17, 2, 1, 2}}) {
    std::vector<std::int64_t> tokens;
    for (std::int64_t t = 0; t < c.tokens; ++t) tokens.push_back(t);
    write_corpus(folder / "tiny", {tokens, {}});
    OrderRequest request;
    request.documents = {0, 2};
    request.num_samples = c.samples;
    request.seq_length = 8;
    const GptDataset dataset = make(std::make_shared<IndexedDataset>(folder / "tiny"), request, {});
    CHECK(dataset.order().plan.epochs == c.epochs);
    REQUIRE(dataset.size() == c.length);
    for (std::int64_t i = 0; i < dataset.size(); ++i) {
      const Sample sample = dataset.sample(i);
      for (std::size_t k = 0; k < 8; ++k) CHECK(sample.labels[k] == (sample.tokens[k] + 1) % c.tokens);
    }
  }
}

TEST_CASE("a split without tokens and impossible sizes are errors with numbers", "[cpu]") {
  const TemporaryFolder folder;
  write_corpus(folder / "c", {{1, 2, 3}, {}, {}});
  const IndexedDataset source(folder / "c");
  OrderRequest request;
  request.documents = {1, 3};
  request.num_samples = 1;
  request.seq_length = 8;
  CHECK(contains(error_of<DataError>([&] { (void)plan_order(source, request); }), "documents [1, 3)"));
  request.documents = {0, 4};
  CHECK(contains(error_of<DataError>([&] { (void)plan_order(source, request); }), "asked of 3"));
  request.documents = {0, 1};
  request.num_samples = std::int64_t{1} << 61;
  CHECK(contains(error_of<DataError>([&] { (void)plan_order(source, request); }), "epochs"));
  request.seq_length = 0;
  CHECK(contains(error_of<ConfigError>([&] { (void)plan_order(source, request); }), "--seq-length"));
}

TEST_CASE("a token id outside the vocabulary names document, position and id", "[cpu]") {
  const TemporaryFolder folder;
  write_corpus(folder / "c", {{1, 2, 3, 4}, {5, 6, 500, 7, 8}});
  OrderRequest request;
  request.documents = {0, 2};
  request.seq_length = 8;
  SampleOptions options;
  options.vocab_limit = 128;
  const auto source = std::make_shared<IndexedDataset>(folder / "c");
  const std::string message = error_of<DataError>([&] { (void)make(source, request, options).sample(0); });
  INFO(message);
  CHECK(contains(message, "document 1 holds token id 500 at position 2"));
  CHECK(contains(message, "[0, 128)"));
  options.vocab_limit = 501;
  CHECK(make(source, request, options).sample(0).tokens.size() == 8);

  write_corpus(folder / "negative", {{1, 2, -7, 4, 5}}, TokenType::kInt32);
  request.documents = {0, 1};
  request.seq_length = 4;
  const auto negative = std::make_shared<IndexedDataset>(folder / "negative");
  CHECK(contains(error_of<DataError>([&] { (void)make(negative, request, options).sample(0); }), "token id -7"));
}

TEST_CASE("an order of many documents is built quickly and covers every token once an epoch", "[cpu]") {
  // 200000 documents of 1..5 tokens; ids count up, so that a sum over all samples proves coverage.
  const TemporaryFolder folder;
  std::int64_t tokens = 0;
  {
    IndexedDatasetWriter writer(folder / "many", TokenType::kInt32);
    std::vector<std::int64_t> document;
    for (std::int64_t d = 0; d < 200000; ++d) {
      document.clear();
      for (std::int64_t k = 0; k <= d % 5; ++k) document.push_back(tokens++);
      writer.add_sequence(document);
      writer.end_document();
    }
    writer.finish();
  }
  OrderRequest request;
  request.documents = {0, 200000};
  request.seq_length = 7;
  const GptDataset dataset = make(std::make_shared<IndexedDataset>(folder / "many"), request, {});
  CHECK(dataset.size() == (tokens - 1) / 7);
  std::vector<char> seen(static_cast<std::size_t>(tokens), 0);
  std::int64_t inputs = 0;
  int repeated = 0;
  for (std::int64_t i = 0; i < dataset.size(); ++i) {
    for (const std::int64_t token : dataset.sample(i).tokens) {
      repeated += seen[static_cast<std::size_t>(token)];
      seen[static_cast<std::size_t>(token)] = 1;
      ++inputs;
    }
  }
  CHECK(inputs == dataset.size() * 7);
  CHECK(repeated == 0);
}

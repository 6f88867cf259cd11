// What a run asks for and which data sets it gets.
#include <fstream>

#include "support/catch.h"
#include "test_data_support.h"

using namespace pgpt;
using namespace pgpt::data;
using namespace pgpt::data::test;

namespace {

/// A corpus of `count` documents of 20 tokens.
std::string corpus(const TemporaryFolder& folder, std::int64_t count, const std::string& name = "c") {
  std::vector<std::vector<std::int64_t>> documents;
  for (std::int64_t d = 0; d < count; ++d) {
    std::vector<std::int64_t> document;
    for (std::int64_t k = 0; k < 20; ++k) document.push_back((d * 20 + k) % 128);
    documents.push_back(document);
  }
  write_corpus(folder / name, documents);
  return folder / name;
}

std::string build_error(const config::Config& config) {
  return error_of([&] { (void)build(config); });
}

}  // namespace

TEST_CASE("requested samples are the reference's", "[cpu]") {
  for (const auto& c : golden("batching.json")["num_samples"]) {
    const json& arguments = c["arguments"];
    const auto number = [&](const char* key) {
      return arguments[key].is_null() ? std::int64_t{0} : arguments[key].get<std::int64_t>();
    };
    REQUIRE(arguments["phase_transition_iterations"].is_null());
    config::Config config;
    config.training.train_samples = number("train_samples");
    config.training.train_iters = number("train_iters");
    config.training.global_batch_size = number("global_batch_size");
    config.training.eval_global_batch_size = number("eval_global_batch_size");
    config.training.full_validation = arguments["full_validation"];
    config.training.skip_train = arguments["skip_train"];
    config.training.eval_iters = number("eval_iters");
    config.training.eval_interval = number("eval_interval");
    config.training.start_eval_at_iter = number("start_eval_at_iter");
    const SampleCounts counts = requested_samples(config);
    CHECK(counts.train == c["train_valid_test"][0].get<std::int64_t>());
    REQUIRE(counts.valid.has_value() == !c["train_valid_test"][1].is_null());
    if (counts.valid) CHECK(*counts.valid == c["train_valid_test"][1].get<std::int64_t>());
    CHECK(counts.test == c["train_valid_test"][2].get<std::int64_t>());
  }
  config::Config config;
  config.training.train_iters = 100;
  config.training.global_batch_size = config.training.eval_global_batch_size = 8;
  config.training.eval_iters = 10;
  CHECK(*requested_samples(config).valid == 80);  // no interval: only the final evaluation
  config.training.eval_interval = 20;
  config.training.skip_train = true;
  CHECK(*requested_samples(config).valid == 80);
}

TEST_CASE("the seed command's ranks get the reference's first samples", "[cpu]") {
  const json expected = golden("mock_run.json")["samples_vocab_128"]["first6"];
  config::Config config = small_config("");
  config.model.seq_length = 64;
  config.training.train_iters = 3;
  config.training.global_batch_size = 2;
  config.training.eval_interval = 100;
  for (const std::int64_t workers : {0, 2}) {
    config.data.num_workers = workers;
    Lines lines;
    const Datasets sets = build(config, lines.sink());
    CHECK(sets.valid == nullptr);
    CHECK(sets.test == nullptr);
    for (std::int64_t rank = 0; rank < 2; ++rank) {
      const auto loader = make_loader(config, sets.train, Split::kTrain, rank, 2, 0);
      for (std::int64_t step = 0; step < 3; ++step) {
        const MicroBatch batch = loader->next();
        const json& sample = expected[static_cast<std::size_t>(2 * step + rank)];
        CHECK(batch.sample_ids == std::vector<std::int64_t>{2 * step + rank});
        CHECK(batch.tokens == sample["tokens"].get<std::vector<std::int64_t>>());
        CHECK(batch.labels == sample["labels"].get<std::vector<std::int64_t>>());
      }
    }
    const std::vector<std::string> start = {"> building train, validation, and test datasets ...",
                                            " > datasets target sizes (minimum size):",
                                            "    train:      6",
                                            "    validation: 0",
                                            "    test:       0",
                                            "> building train, validation, and test datasets for GPT ..."};
    REQUIRE(lines.lines.size() > start.size());
    CHECK(std::vector<std::string>(lines.lines.begin(), lines.lines.begin() + 6) == start);
    CHECK(lines.lines.back() == "> finished creating GPT datasets ...");
    CHECK(lines.has("train:      1065473 samples from 1 epoch of 68190290 tokens"));
  }
}

TEST_CASE("evaluation sets exist where they are used, and missing documents are explained", "[cpu]") {
  const TemporaryFolder folder;
  const std::string prefix = corpus(folder, 7);
  config::Config config = small_config(prefix, "969, 30, 1");
  Lines lines;
  CHECK(build(config, lines.sink()).valid == nullptr);  // eval_iters is 0: no complaint about [7, 7)
  CHECK(lines.has("validation: documents [7, 7) of 7 in " + prefix + ", not used"));
  config.training.eval_iters = 1;
  const std::string message = build_error(config);
  INFO(message);
  CHECK(contains(message, "valid split needs documents"));
  CHECK(contains(message, "--split '969, 30, 1'"));
  CHECK(contains(message, "[7, 7) of 7"));
  CHECK(contains(message, "--eval-iters 0"));

  config.data.split = "100,0,0";
  Lines warned;
  const Datasets sets = build(config, warned.sink());
  CHECK(sets.train != nullptr);
  CHECK(sets.valid == nullptr);
  CHECK(warned.has("WARNING: --split '100,0,0' gives no documents to the valid split"));
  CHECK(make_loader(config, sets.valid, Split::kValid, 0, 1, 0) == nullptr);

  config.data.split = "0,1,1";
  CHECK(contains(build_error(config), "--split '0,1,1' gives no documents to training"));
  config.training.skip_train = true;
  CHECK(build(config).train == nullptr);
  CHECK(build(config).test->size() > 0);
}

TEST_CASE("the validation stream goes on where the last evaluation ended, the test set starts anew", "[cpu]") {
  const TemporaryFolder folder;
  config::Config config = small_config(corpus(folder, 40), "2,1,1");
  config.training.eval_iters = 3;
  config.training.eval_global_batch_size = 4;
  config.training.eval_micro_batch_size = 2;
  config.training.eval_interval = 2;
  const Datasets sets = build(config);
  const auto whole = make_loader(config, sets.valid, Split::kValid, 1, 2, 0);
  for (int i = 0; i < 3; ++i) (void)whole->next();
  const auto later = make_loader(config, sets.valid, Split::kValid, 1, 2, 12);
  for (int i = 0; i < 3; ++i) CHECK(later->next().sample_ids == whole->next().sample_ids);
  CHECK(make_loader(config, sets.test, Split::kTest, 0, 2, 12)->next().sample_ids == std::vector<std::int64_t>{0, 1});
}

TEST_CASE("full validation uses one epoch, one sample at a time", "[cpu]") {
  const TemporaryFolder folder;
  config::Config config = small_config(corpus(folder, 10), "8,2,0");
  config.training.full_validation = true;
  Lines lines;
  const Datasets sets = build(config, lines.sink());
  CHECK(lines.has("    validation: None"));
  REQUIRE(sets.valid != nullptr);
  CHECK(sets.valid->size() == (40 - 1) / 8);
  const auto loader = make_loader(config, sets.valid, Split::kValid, 1, 2, 6);
  CHECK(loader->next().sample_ids == std::vector<std::int64_t>{1});
  CHECK(loader->next().sample_ids == std::vector<std::int64_t>{3});
  CHECK(loader->next().sample_ids == std::vector<std::int64_t>{1});

  config.model.seq_length = 64;
  CHECK(contains(build_error(config), "no full sample fits"));
  CHECK(contains(build_error(config), "40 tokens"));
}

TEST_CASE("per-split paths use whole files", "[cpu]") {
  const TemporaryFolder folder;
  config::Config config = small_config("");
  config.data.mock = false;
  config.data.train_data_path = {corpus(folder, 3, "train")};
  config.data.valid_data_path = {"1.0", corpus(folder, 2, "valid")};
  config.training.eval_iters = 1;
  const Datasets sets = build(config);
  CHECK(dynamic_cast<const GptDataset&>(*sets.train).request().documents == DocumentRange{0, 3});
  CHECK(dynamic_cast<const GptDataset&>(*sets.valid).request().documents == DocumentRange{0, 2});
  CHECK(sets.test == nullptr);
  config.data.train_data_path.clear();
  CHECK(contains(build_error(config), "--train-data-path"));
}

TEST_CASE("sources that contradict or are missing name the options", "[cpu]") {
  const TemporaryFolder folder;
  config::Config config = small_config(corpus(folder, 3));
  config.data.mock = true;
  CHECK(contains(build_error(config), "several data sources"));
  config.data.mock = false;
  config.data.data_path.clear();
  CHECK(contains(build_error(config), "no data is given; use exactly one of --mock-data"));
  config.data.data_path = {folder / "nothing"};
  CHECK(contains(build_error(config), folder / "nothing.idx"));
}

TEST_CASE("blends that cannot last are refused before the run", "[cpu]") {
  const TemporaryFolder folder;
  config::Config config = small_config(corpus(folder, 2, "a"));  // 4 samples of 8
  config.data.data_path.push_back(corpus(folder, 2, "b"));
  config.training.train_iters = 9;
  CHECK(contains(build_error(config), "give 8 samples (one epoch of each), but 9 are asked for"));
  config.data.dataloader = config::DataloaderType::kCyclic;
  CHECK(build(config).train->size() == 8);
  config.data.dataloader = config::DataloaderType::kSingle;
  config.training.train_iters = 8;
  CHECK(build(config).train->size() == 8);
  config.data.data_path = {"1", folder / "a", "1", folder / "b"};
  config.data.split = "1,1,0";
  config.training.full_validation = true;
  CHECK(contains(build_error(config), "--full-validation"));
}

TEST_CASE("resuming behind the end of the data says how much there was", "[cpu]") {
  const TemporaryFolder folder;
  const config::Config config = small_config(corpus(folder, 3));  // (60 - 1) / 8 = 7 samples
  const Datasets sets = build(config);
  CHECK(contains(error_of<DataError>([&] { (void)make_loader(config, sets.train, Split::kTrain, 0, 1, 7); }),
                 "gives 7 samples and 7 are consumed"));
}

TEST_CASE("tokens that no index tells of are noticed", "[cpu]") {
  const TemporaryFolder folder;
  const std::string prefix = corpus(folder, 3);
  const auto lines = [&] {
    std::string text;
    (void)build(small_config(prefix), [&](const std::string& line) { text += line + "\n"; });
    return text;
  };
  CHECK_FALSE(contains(lines(), "WARNING"));
  std::ofstream(prefix + ".bin", std::ios::app | std::ios::binary) << "12345678";
  CHECK(contains(lines(), "WARNING: " + prefix + ".bin has 8 bytes more than " + prefix + ".idx tells of"));
}

TEST_CASE("a run of no steps needs no training data", "[cpu]") {
  config::Config config = small_config("");
  config.training.train_iters = 0;
  CHECK(build(config).train == nullptr);
}

// Split strings, blend lists and blend indexes against the reference's own outputs.
#include <cmath>

#include "pgpt/data/blend.h"
#include "pgpt/data/split.h"
#include "support/catch.h"
#include "test_data_support.h"

using namespace pgpt;
using namespace pgpt::data;
using namespace pgpt::data::test;

namespace {

std::vector<double> weights_of(const json& c) {
  if (!c["weights"].is_null()) return c["weights"].get<std::vector<double>>();
  std::vector<double> weights;
  for (int i = 0; i < c["n"].get<int>(); ++i) weights.push_back((i * 37 % 101 + 1) / 8.0 + 0.1);
  return weights;
}

double from_hex(const json& value) { return std::strtod(value.get<std::string>().c_str(), nullptr); }

template <class T>
std::vector<std::int64_t> elements(const T& array, std::size_t most = SIZE_MAX) {
  std::vector<std::int64_t> values;
  for (std::int64_t i = 0; i < array.rows() && values.size() < most; ++i) values.push_back(array[i]);
  return values;
}

void check_index(const BlendIndex& index, const json& c, std::size_t parts) {
  CHECK(elements(index.dataset, 40) == c["dataset_index_first40"].get<std::vector<std::int64_t>>());
  CHECK(elements(index.dataset_sample, 40) == c["dataset_sample_index_first40"].get<std::vector<std::int64_t>>());
  std::vector<std::int64_t> counts(parts, 0);
  for (const std::int64_t d : elements(index.dataset)) ++counts[static_cast<std::size_t>(d)];
  CHECK(counts == c["counts"].get<std::vector<std::int64_t>>());
  CHECK(crc32(index.dataset.bytes()) == c["dataset_index_crc32_le_int16"].get<std::uint32_t>());
  CHECK(crc32(index.dataset_sample.bytes()) == c["dataset_sample_index_crc32_le_int64"].get<std::uint32_t>());
}

}  // namespace

TEST_CASE("split strings give the reference's shares, bounds and documents", "[cpu]") {
  for (const auto& c : golden("splits.json")["cases"]) {
    const std::string text = c["split"];
    INFO(text);
    const auto shares = parse_split(text);
    for (std::size_t i = 0; i < 3; ++i) CHECK(shares[i] == from_hex(c["vector_hex"][i]));
    const SplitMatrix matrix = split_matrix(shares);
    for (std::size_t i = 0; i < 3; ++i) {
      REQUIRE(matrix[i].has_value() == !c["matrix"][i].is_null());
      if (!matrix[i]) continue;
      CHECK(matrix[i]->first == c["matrix"][i][0].get<double>());
      CHECK(matrix[i]->second == c["matrix"][i][1].get<double>());
    }
    for (const auto& [count, bounds] : c["bounds"].items()) {
      for (std::size_t i = 0; i < 3; ++i) {
        const auto range = split_range(matrix, static_cast<Split>(i), std::stoll(count));
        REQUIRE(range.has_value() == !bounds[i].is_null());
        if (range) CHECK(*range == DocumentRange{bounds[i][0], bounds[i][1]});
      }
    }
  }
}

TEST_CASE("odd split strings are read as the reference reads them, or refused with the string", "[cpu]") {
  CHECK(parse_split("1e-3") == parse_split("1,3"));
  CHECK(parse_split("-2;3 x 5") == parse_split("2,3,5"));
  for (const std::string bad : {"0,0,0", "", "1,2,3,4", ".", "1.2.3", "1,."}) {
    CHECK(contains(error_of<ConfigError>([&] { (void)parse_split(bad); }), "--split '" + bad + "'"));
  }
}

TEST_CASE("weights are summed pairwise and normalised as numpy does", "[cpu]") {
  const json blending = golden("blending.json");
  for (const auto& c : blending["normalize"]) {
    const auto weights = weights_of(c);
    CHECK(pairwise_sum(weights) == from_hex(c["sum_hex"]));
    CHECK(crc_of(normalize(weights)) == c["normalized_crc32_le_f64"].get<std::uint32_t>());
  }
  for (const auto& c : blending["double_normalized"]) {
    const auto weights = c["weights_in"].get<std::vector<double>>();
    const auto once = normalize(weights);
    const auto twice = normalize(once);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      CHECK(once[i] == from_hex(c["once_hex"][i]));
      CHECK(twice[i] == from_hex(c["twice_hex"][i]));
    }
    check_index(blend_by_weight(once, c["size"]), c, weights.size());
  }
}

TEST_CASE("blend indexes equal the reference's", "[cpu]") {
  const json blending = golden("blending.json");
  for (const auto& c : blending["weighted"]) {
    const auto weights = c["weights_in"].get<std::vector<double>>();
    const auto normalized = normalize(weights);
    for (std::size_t i = 0; i < weights.size(); ++i) CHECK(normalized[i] == from_hex(c["weights_hex"][i]));
    check_index(blend_by_weight(weights, c["size"]), c, weights.size());
  }
  for (const auto& c : blending["exhaustive"]) {
    const BlendIndex index = blend_all(c["sizes"].get<std::vector<std::int64_t>>());
    CHECK(elements(index.dataset) == c["dataset_index"].get<std::vector<std::int64_t>>());
    CHECK(elements(index.dataset_sample) == c["dataset_sample_index"].get<std::vector<std::int64_t>>());
  }
  for (const auto& c : blending["sizes"]) {
    const auto weights = c["weights_in"].get<std::vector<double>>();
    for (std::size_t split = 0; split < 3; ++split) {
      const BlendSizes sizes = blend_sizes(weights, c["target_per_split"][split], 0.005);
      for (std::size_t d = 0; d < weights.size(); ++d) {
        CHECK(sizes.target[d] == c["per_dataset_target"][d][split].get<std::int64_t>());
        CHECK(sizes.built[d] == c["per_dataset_with_surplus_0.005"][d][split].get<std::int64_t>());
      }
    }
  }
}

TEST_CASE("blend lists are told apart, and mixed lists are refused", "[cpu]") {
  for (const auto& c : golden("blending.json")["blend_list_parsing"]) {
    const auto entries = c["list"].get<std::vector<std::string>>();
    if (entries == std::vector<std::string>{"1", "a", "x", "b"}) {
      // The reference takes "1" for a prefix here; a list that is half weighted is an error for us.
      CHECK(
          contains(error_of<ConfigError>([&] { (void)parse_blend_list(entries, "--data-path"); }), "'x' stands where"));
      continue;
    }
    const BlendList list = parse_blend_list(entries, "--data-path");
    CHECK(list.prefixes == c["result"][0].get<std::vector<std::string>>());
    REQUIRE(list.weights.has_value() == !c["result"][1].is_null());
    if (list.weights) CHECK(*list.weights == c["result"][1].get<std::vector<double>>());
  }
  const auto parse = [](std::vector<std::string> entries) { return parse_blend_list(entries, "--data-path"); };
  CHECK(*parse({"1e-3", "a", "+1_000.5", "b"}).weights == std::vector<double>{1e-3, 1000.5});
  CHECK(parse({"1__0", "a"}).prefixes.size() == 2);
  for (const std::string bad : {"0", "-1", "nan", "inf", "1e999"}) {
    CHECK(contains(error_of<ConfigError>([&] { (void)parse({"1", "a", bad, "b"}); }),
                   "'" + bad + "' must be a positive"));
  }
  CHECK(contains(error_of<ConfigError>([&] { (void)parse({"x", "a", "1", "b"}); }), "'x' stands where"));
  CHECK(contains(error_of<ConfigError>([&] { (void)parse({}); }), "at least one"));
  CHECK(contains(error_of<ConfigError>([&] { (void)parse({"a", " ", "b"}); }), "entry 2 is empty"));
}

TEST_CASE("whole blends over the corpora equal the reference's", "[cpu]") {
  const TemporaryFolder folder;
  for (const auto& c : golden("blending.json")["end_to_end"]) {
    INFO(c["name"].get<std::string>());
    config::Config config = small_config("", c["split"]);
    config.data.mock = false;
    config.data.data_path.clear();
    const auto prefixes = c["prefixes"].get<std::vector<std::string>>();
    for (std::size_t i = 0; i < prefixes.size(); ++i) {
      if (!c["weights"].is_null()) config.data.data_path.push_back(c["weights"][i].dump());
      // A copy, because the default cache folder stands beside the corpus.
      for (const char* suffix : {".bin", ".idx"}) {
        std::filesystem::copy_file(golden_path(prefixes[i] + suffix), folder / (prefixes[i] + suffix),
                                   std::filesystem::copy_options::skip_existing);
      }
      config.data.data_path.push_back(folder / prefixes[i]);
    }
    config.model.seq_length = c["seq_length"];
    config.training.seed = c["seed"];
    SampleCounts counts;
    const json& requested = c["sizes_requested"];
    const bool exhaustive = requested[0].is_null();
    // An exhaustive blend is what --full-validation builds; give it the training documents' share.
    if (exhaustive) {
      config.training.full_validation = config.training.skip_train = true;
      config.data.split = "0,1,0";
      counts.valid = std::nullopt;
    } else {
      counts = {requested[0], requested[1].get<std::int64_t>(), requested[2]};
      config.training.eval_iters = 1;
    }
    const Datasets sets = build_datasets(config, resolve_tokenizer(config), counts, {});
    const std::shared_ptr<const Dataset> found[] = {exhaustive ? sets.valid : sets.train,
                                                    exhaustive ? nullptr : sets.valid, sets.test};
    constexpr const char* kSplits[] = {"train", "valid", "test"};
    for (std::size_t i = 0; i < 3; ++i) {
      const json& expected = c[kSplits[i]];
      REQUIRE((found[i] != nullptr) == !expected.is_null());
      if (!found[i]) continue;
      CHECK(found[i]->size() == expected["length"].get<std::int64_t>());
      CHECK(all_tokens(*found[i]) == expected["tokens"].get<std::vector<std::vector<std::int64_t>>>());
      const auto* blended = dynamic_cast<const BlendedDataset*>(found[i].get());
      REQUIRE((blended != nullptr) == (expected["kind"] == "blended"));
      if (blended == nullptr) continue;
      CHECK(elements(blended->index().dataset) == expected["dataset_index"].get<std::vector<std::int64_t>>());
      CHECK(elements(blended->index().dataset_sample) ==
            expected["dataset_sample_index"].get<std::vector<std::int64_t>>());
      for (std::size_t d = 0; d < expected["mid_level"].size(); ++d) {
        const json& part = expected["mid_level"][d];
        const auto& dataset = dynamic_cast<const GptDataset&>(blended->part(d));
        CHECK(dataset.size() == part["length"].get<std::int64_t>());
        CHECK(dataset.order().plan.epochs == part["num_epochs"].get<std::int64_t>());
        CHECK(dataset.request().num_samples.has_value() == !part["num_samples"].is_null());
        if (dataset.request().num_samples)
          CHECK(*dataset.request().num_samples == part["num_samples"].get<std::int64_t>());
        CHECK(dataset.request().documents.size() == static_cast<std::int64_t>(part["documents"].size()));
      }
    }
  }
}

TEST_CASE("a blend that asks a part for too much names the surplus option", "[cpu]") {
  const auto source = std::make_shared<IndexedDataset>(golden_path("corpus_a"));
  OrderRequest request;
  request.documents = {0, 7};
  request.seq_length = 8;  // 7 samples
  std::vector<std::shared_ptr<const Dataset>> parts = {
      std::make_shared<GptDataset>(source, request, SampleOptions{}, build_order(*source, request))};
  const std::string names[] = {"corpus_a"};
  const std::vector<double> weights = {1.0};
  const std::string message =
      error_of<DataError>([&] { (void)BlendedDataset(parts, names, blend_by_weight(weights, 8)); });
  CHECK(contains(message, "corpus_a for 8 samples"));
  CHECK(contains(message, "built with 7"));
  CHECK(contains(message, "--mid-level-dataset-surplus"));
}

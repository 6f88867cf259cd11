// gpt_tool compare on evidence: planted errors are found, layouts compare by their logical tensors, pictures and JSON
// are written.

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "pgpt/base/error.h"
#include "pgpt/training/compare.h"
#include "pgpt/training/tool_commands.h"
#include "support/catch.h"
#include "support/evidence_runs.h"
#include "support/processes.h"
#include "support/text.h"

using namespace pgpt;
using namespace pgpt::test;
using nlohmann::json;
using training::CompareOptions;
using training::CompareReport;
using training::Match;

namespace {

CompareReport compare(const std::string& a, const std::string& b, const std::string& preset = "") {
  CompareOptions options;
  options.preset = preset;
  return training::compare_tensors(a, b, options);
}

/// Why a folder cannot be compared.
std::string message_of(const std::string& path) {
  return error_of<DataError>([&] { (void)compare(path, path); });
}

std::size_t count(const CompareReport& report, Match match) {
  return static_cast<std::size_t>(
      std::count_if(report.rows.begin(), report.rows.end(), [&](const auto& row) { return row.match == match; }));
}

const training::TensorRow& row_of(const CompareReport& report, const std::string& text) {
  for (const auto& row : report.rows) {
    if (row.key.text() == text) return row;
  }
  FAIL("no row " << text);
  throw std::logic_error("unreachable");
}

}  // namespace

TEST_CASE("a single flipped bit in a weight, gradient, moment or activation is found and named", "[cpu][dist]") {
  const TemporaryFolder folder;
  const std::string flags = kSmallFlags + "--bf16 --global-batch-size 2 --evidence-iterations 1 " + kGtp2;
  train(flags + "--evidence-dir " + folder / "a", 2);
  REQUIRE(compare(folder / "a", folder / "a", "exact").match() == Match::kEqual);

  struct Plant {
    const char* tensor;
    int rank;
    std::int64_t element;
    std::string expected;
    std::vector<std::int64_t> at;
  };
  // Rank 1 holds rows 32 and up of a matrix of 40 rows (two shards of 32 with padding), 24 columns.
  const Plant plants[] = {
      {"param.decoder.layers.0.mlp.linear_fc1.weight",
       1,
       24 * 3 + 5,
       "iteration 1: param.decoder.layers.0.mlp.linear_fc1.weight",
       {35, 5}},
      {"main_grad.decoder.layers.1.mlp.linear_fc2.weight",
       0,
       40 * 2 + 7,
       "iteration 1: main_grad.decoder.layers.1.mlp.linear_fc2.weight",
       {2, 7}},
      {"exp_avg.decoder.layers.0.self_attention.linear_qkv.weight",
       0,
       9,
       "iteration 1: exp_avg.decoder.layers.0.self_attention.linear_qkv.weight",
       {0, 9}},
      {"exp_avg_sq.decoder.final_layernorm.weight",
       0,
       4,
       "iteration 1: exp_avg_sq.decoder.final_layernorm.weight",
       {4}},
      {"mb0.activation.decoder.layers.0.mlp",
       1,
       24 * 6 + 1,
       "iteration 1, sample 1: activation.decoder.layers.0.mlp",
       {6, 1}},
      {"mb0.grad.decoder.layers.0.mlp.linear_fc2.weight",
       1,
       41,
       "iteration 1, sample 1: grad.decoder.layers.0.mlp.linear_fc2.weight",
       {1, 1}},
      {"mb0.logits", 0, 130, "iteration 1, sample 0: logits", {1, 2}},
  };
  for (const Plant& plant : plants) {
    for (const int bit : {0, 13}) {  // the last place, and an exponent bit of either type
      INFO(plant.tensor << " bit " << bit);
      std::filesystem::copy(folder / "a", folder / "b", std::filesystem::copy_options::recursive);
      flip_bit(folder / "b/iter_0000001/rank_0000" + std::to_string(plant.rank) + ".safetensors", plant.tensor,
               plant.element, bit);
      const CompareReport report = compare(folder / "a", folder / "b", "exact");
      std::filesystem::remove_all(folder / "b");
      REQUIRE(report.first_difference() != nullptr);
      const training::TensorRow& found = *report.first_difference();
      CHECK(found.key.text() == plant.expected);
      if (found.remark.find("hold different copies") == std::string::npos) CHECK(found.first_at == plant.at);
      CHECK(report.match() == Match::kDifferent);
      CHECK(count(report, Match::kEqual) == report.rows.size() - 1);
      REQUIRE(report.notes.size() == 1);  // the checksum in the manifest tells the same
      CHECK(contains(report.notes[0], "changed after it was written"));
    }
  }
}

TEST_CASE("an isolated large error is different even where the norm of the tensor hides it", "[cpu]") {
  const at::Tensor a = at::arange(100000, at::kFloat).remainder(97).add(1.0);
  at::Tensor b = a.clone();
  b[4321] += 60.0;
  const training::Bounds bounds = training::Bounds::preset("bf16");
  const auto key = training::make_key(1, "main_grad", "output_layer.weight");
  const training::TensorRow row = training::compare_pair(key, a, b, bounds, 3e-2, {});
  CHECK(row.relative_l2 < 3e-2);
  CHECK(row.match == Match::kDifferent);
  CHECK(contains(row.remark, "isolated"));
  // A rounding of the same single element is one.
  b[4321] = a[4321] * (1.0 + 0x1p-9);
  CHECK(training::compare_pair(key, a, b, bounds, 3e-2, {}).match == Match::kWithin);
}

TEST_CASE("errors are counted in units of the last place", "[cpu]") {
  const training::Bounds bounds = training::Bounds::preset("bf16");
  const auto key = training::make_key(1, "logits", "", 0, 1);
  const at::Tensor a = at::tensor({1.0F, 2.0F, -4.0F, 0.0F}).to(at::kBFloat16);
  at::Tensor b = a.clone();
  b[1] = 2.0F + 3 * 0x1p-6F;  // bf16 values from 2 to 4 are 2^-6 apart
  const training::TensorRow row = training::compare_pair(key, a, b, bounds, 1e-1, {});
  CHECK(row.differing == 1);
  CHECK(row.max_ulps == 3.0);
  CHECK(row.mean_ulps == 0.75);
  CHECK(row.first_at == std::vector<std::int64_t>{1});
  CHECK(row.first_a == 2.0);
  CHECK(row.first_b == 2.0 + 3 * 0x1p-6);
  at::Tensor nan = a.clone();
  nan[2] = std::nan("");
  CHECK(training::compare_pair(key, a, nan, bounds, 1e-1, {}).match == Match::kDifferent);
  CHECK(training::compare_pair(key, nan, nan, bounds, 1e-1, {}).match == Match::kEqual);
}

TEST_CASE("a GTP 2 run and a DP 2 run part first at the main gradients: halves rounded to bf16 before the sum",
          "[cpu][dist]") {
  const TemporaryFolder folder;
  train(kSeedFlags + kInvariant + kGtp2 + "--evidence-dir " + folder / "gtp", 2);
  train(kSeedFlags + kInvariant + "--evidence-dir " + folder / "dp", 2);
  const CompareReport report = compare(folder / "gtp", folder / "dp");
  CHECK(report.match() == Match::kWithin);
  REQUIRE(report.first_difference() != nullptr);
  CHECK(report.first_difference()->key.kind == "main_grad");
  CHECK(report.first_difference()->key.iteration == 1);
  for (const auto& row : report.rows) {
    INFO(row.key.text());
    // Equal weights, samples, activations, losses and local gradients in iterations 1 and 2: step 1 runs at learning
    // rate 0.
    if (row.key.iteration <= 2 && row.key.phase <= training::Phase::kBackward) CHECK(row.match == Match::kEqual);
    if (row.key.iteration == 1 && (row.key.kind == "param" || row.key.kind == "delta"))
      CHECK(row.match == Match::kEqual);
  }
  // In fp32 halving is exact and both ways add the same two halves once, so nothing differs.
  std::string fp32 = kSeedFlags + kInvariant;
  fp32.replace(fp32.find("--bf16 "), 7, "");
  train(fp32 + kGtp2 + "--evidence-dir " + folder / "gtp32", 2);
  train(fp32 + "--evidence-dir " + folder / "dp32", 2);
  const CompareReport exact = compare(folder / "gtp32", folder / "dp32");
  CHECK(exact.preset == "fp32");
  CHECK(exact.match() == Match::kEqual);
  CHECK(exact.rows.size() > 600);
}

TEST_CASE("fp32 scatter of fused gradients makes GTP 2 and DP 2 agree in every bit of the sharded gradients",
          "[cpu][dist]") {
  const TemporaryFolder folder;
  std::string flags = kSeedFlags + kInvariant;
  flags.replace(flags.find("--no-gradient-accumulation-fusion "), 34, "");
  train(flags + kGtp2 + "--evidence-dir " + folder / "gtp", 2);
  train(flags + "--evidence-dir " + folder / "dp", 2);
  const CompareReport report = compare(folder / "gtp", folder / "dp");
  CHECK(report.match() != Match::kDifferent);
  for (const auto& row : report.rows) {
    if (row.key.kind != "main_grad" || row.key.iteration != 1) continue;
    INFO(row.key.text());
    // Transformer Engine linears scatter in fp32; embedding and output layer stay in bf16 (spec: weight gradients).
    if (row.key.name.find("linear_") != std::string::npos) CHECK(row.match == Match::kEqual);
  }
}

TEST_CASE("runs compare across layouts: padding dropped, samples matched, gradient scales aligned", "[cpu][dist]") {
  const TemporaryFolder folder;
  const std::string flags = kSmallFlags + kInvariant + "--global-batch-size 4 --evidence-dir ";
  train(flags + folder / "one", 1);
  train(flags + folder / "gtp" + " " + kGtp2, 2);
  train(flags + folder / "two" + " --micro-batch-size 2", 1);
  const CompareReport report = compare(folder / "gtp", folder / "one");
  INFO(training::format_table(report, false));
  CHECK(report.match() != Match::kDifferent);
  CHECK(report.only_a.empty());
  CHECK(report.only_b.empty());
  CHECK(row_of(report, "iteration 1, sample 3: tokens").match == Match::kEqual);
  CHECK(row_of(report, "iteration 1, sample 3: logits").match == Match::kEqual);
  CHECK(row_of(report, "iteration 1, sample 3: grad.decoder.layers.0.mlp.linear_fc1.weight").shape ==
        std::vector<std::int64_t>{40, 24});
  CHECK(row_of(report, "iteration 2: exp_avg.decoder.layers.1.mlp.linear_fc1.weight").match != Match::kDifferent);
  // Another micro-batch size shares samples, not micro-batch gradients.
  const CompareReport other = compare(folder / "two", folder / "one");
  INFO(training::format_table(other, false));
  CHECK(other.match() != Match::kDifferent);
  CHECK(row_of(other, "iteration 1, sample 3: logits").match != Match::kDifferent);
  CHECK(other.only_a.count("grad") == 1);
  CHECK(other.only_a.size() == 1);
}

TEST_CASE("copies that should be equal and are not are told inside one run", "[cpu][dist]") {
  const TemporaryFolder folder;
  train(kSmallFlags + "--global-batch-size 2 --evidence-iterations 1 --evidence-content parameters --evidence-dir " +
            folder / "a",
        2);
  flip_bit(folder / "a/iter_0000001/rank_00001.safetensors", "param.decoder.final_layernorm.weight", 0, 3);
  const CompareReport report = compare(folder / "a", folder / "a");
  CHECK(report.match() == Match::kDifferent);
  REQUIRE(report.first_beyond() != nullptr);
  CHECK(report.first_beyond()->remark == "inside B ranks 0 and 1 hold different copies");
}

TEST_CASE("incomplete and foreign evidence is refused", "[cpu][dist]") {
  const TemporaryFolder folder;
  train(kSmallFlags + "--global-batch-size 2 --evidence-iterations 1 --evidence-dir " + folder / "a", 2);
  std::filesystem::remove(folder / "a/iter_0000001/rank_00001.json");
  CHECK(contains(message_of(folder / "a"), "rank_00001.json is missing of 2 ranks"));
  std::filesystem::create_directories(folder / "empty");
  CHECK(contains(message_of(folder / "empty"), "holds no evidence"));
  std::filesystem::create_directories(folder / "saved/iter_0000001");
  std::ofstream(folder / "saved/iter_0000001/manifest.json") << "{}";
  CHECK(contains(message_of(folder / "saved"), "is a checkpoint; gpt_tool diff compares two of them"));
}

TEST_CASE("gpt_tool compare returns 0 or 1, prints the first difference, JSON, and a picture", "[cpu][dist]") {
  const TemporaryFolder folder;
  train(kSmallFlags + "--bf16 --global-batch-size 2 --evidence-iterations 1 --evidence-dir " + folder / "a", 1);
  std::filesystem::copy(folder / "a", folder / "b", std::filesystem::copy_options::recursive);
  const auto tool = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {PGPT_TOOL, "compare"});
    Process process(words, {});
    return process.wait(std::chrono::seconds(60));
  };
  const Ended same = tool({folder / "a", folder / "b"});
  INFO(same.output);
  CHECK(same.exit_code == 0);
  CHECK(contains(same.output, "verdict: equal: all"));

  flip_bit(folder / "b/iter_0000001/rank_00000.safetensors", "mb1.logits", 7, 0);
  const Ended rounded = tool({folder / "a", folder / "b", "--plot", folder / "p.svg"});
  INFO(rounded.output);
  CHECK(rounded.exit_code == 0);
  CHECK(contains(rounded.output, "first tensor whose bits differ: iteration 1, sample 1: logits"));
  CHECK(contains(rounded.output, "first at [0, 7]"));
  CHECK(contains(rounded.output, "verdict: within rounding"));
  std::ifstream picture(folder / "p.svg");
  std::stringstream svg;
  svg << picture.rdbuf();
  CHECK(svg.str().rfind("<svg", 0) == 0);
  CHECK(contains(svg.str(), "iteration 1, sample 1: logits: within rounding"));

  const Ended exact = tool({folder / "a", folder / "b", "--exact", "--json"});
  CHECK(exact.exit_code == 1);
  const json document = json::parse(exact.output);
  CHECK(document["verdict"] == "different");
  CHECK(document["first_difference"]["tensor"] == "logits");
  CHECK(document["first_difference"]["first"]["at"] == std::vector<int>{0, 7});
  CHECK(tool({folder / "a", folder / "b", "--tolerance", "logits=0"}).exit_code == 1);
  CHECK(tool({folder / "a", folder / "b", "--exact", "--kinds", "param", "main_grad"}).exit_code == 0);
  CHECK(tool({folder / "a", folder / "nowhere"}).exit_code == 2);
  CHECK(tool({folder / "a", folder / "b", "--plot", folder / "p.png"}).exit_code == 2);
  CHECK(tool({folder / "a"}).exit_code == 2);
}

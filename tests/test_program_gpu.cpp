// The program on one GPU: the published comparison with two ranks sharing it, one rank through NCCL, and the reference's fused-attention runs.

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "support/catch.h"
#include "support/processes.h"
#include "support/seed_run.h"

using namespace pgpt;
using namespace std::chrono_literals;
using nlohmann::json;

namespace {

bool gpu_visible() {
  if (std::filesystem::exists("/dev/nvidiactl")) return true;
  WARN("no GPU here: skipped");
  return false;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("two ranks sharing one GPU reproduce the published comparison", "[gpu][dist]") {
  if (!gpu_visible()) return;
  const auto folder = test::scratch_folder("gpu_seed");
  struct Case {
    const char* kernels;
    test::SeedTolerance tolerance;  // measured spread of correct GPU implementations (docs/seed-comparison.md)
  };
  for (const Case& c : {Case{"reference", {2e-6, 6e-4}}, Case{"fast", {5e-5, 6e-4}}}) {
    INFO("--kernels " << c.kernels);
    const auto metrics = folder / c.kernels;
    const auto ranks = test::run_ranks(2,
                                       test::program(std::string(test::kSeedFlags) + " --distributed-backend gloo --kernels " + c.kernels +
                                                     " --metrics-file " + metrics.string()),
                                       {}, 120s);
    INFO(test::describe(ranks));
    for (const test::Ended& rank : ranks) CHECK(rank.exit_code == 0);
    test::check_published(test::read_steps(metrics), c.tolerance);
    CHECK(contains(ranks[0].output, "cudnn"));
  }
}

TEST_CASE("one rank through NCCL with two micro-batches starts from the other initial weights", "[gpu][dist]") {
  if (!gpu_visible()) return;
  const auto metrics = test::scratch_folder("gpu_one") / "metrics";
  const auto ranks = test::run_ranks(
      1, test::program(std::string(test::kSeedFlags) + " --tensor-parallel-num-weight-shards 1 --metrics-file " + metrics.string()), {}, 120s);
  INFO(test::describe(ranks));
  CHECK(ranks[0].exit_code == 0);
  CHECK(contains(ranks[0].output, "backend nccl"));
  const std::vector<json> steps = test::read_steps(metrics);
  REQUIRE(steps.size() == 3);
  const double losses[] = {4.905784, 4.902406, 4.789462};
  for (std::size_t i = 0; i < 3; ++i) CHECK(std::abs(steps[i]["lm_loss"].get<double>() - losses[i]) <= 3e-4);
}

TEST_CASE("the reference's fused-attention runs are reproduced on a GPU", "[gpu][dist][conformance]") {
  if (!gpu_visible()) return;
  const auto folder = test::scratch_folder("gpu_fused");
  for (const char* file : {"dense.json", "gtp.json"}) {
    std::ifstream in(std::string(PGPT_TEST_DATA) + "/reference/" + file);
    const json cases = json::parse(in);
    for (const auto& [name, entry] : cases.items()) {
      if (!contains(name, "-fused")) continue;
      INFO(name);
      std::string flags;
      if (entry["flags"].is_string()) {
        flags = entry["flags"].get<std::string>();
      } else {
        for (const auto& word : entry["flags"]) flags += word.get<std::string>() + " ";
      }
      const auto ranks = test::run_ranks(entry["ranks"].get<int>(),
                                         test::program(flags + " --distributed-backend gloo --metrics-file " + (folder / name).string()), {}, 120s);
      INFO(test::describe(ranks));
      const std::vector<json> steps = test::read_steps(folder / name);
      REQUIRE(steps.size() == entry["steps"].size());
      for (std::size_t i = 0; i < steps.size(); ++i) {
        INFO("step " << i + 1);
        const json& expected = entry["steps"][i];
        // Bounds of the reference's README for bf16.
        const double loss = expected["losses"]["lm loss"].get<double>();
        CHECK(std::abs(steps[i]["lm_loss"].get<double>() - loss) <= (i == 0 ? 5e-4 : 5e-3));
        const double norm = expected["grad_norm"].get<double>();
        CHECK(std::abs(steps[i]["grad_norm"].get<double>() - norm) <= 1e-2 * norm);
      }
    }
  }
}

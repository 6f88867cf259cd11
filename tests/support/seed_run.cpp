#include "support/seed_run.h"

#include <unistd.h>

#include <cmath>

#include "support/catch.h"
#include "support/json.h"

namespace pgpt::test {

std::filesystem::path scratch_folder(const std::string& name) {
  const auto path = std::filesystem::temp_directory_path() / ("pgpt_" + std::to_string(::getpid()) + "_" + name);
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

std::vector<nlohmann::json> read_steps(const std::filesystem::path& metrics) {
  std::vector<nlohmann::json> result;
  for (nlohmann::json& object : read_json_lines(metrics)) {
    if (object["kind"] == "step") result.push_back(std::move(object));
  }
  return result;
}

void check_published(const std::vector<nlohmann::json>& steps, SeedTolerance tolerance) {
  REQUIRE(steps.size() == 3);
  const double losses[] = {4.860444, 4.827285, 4.781815};
  const double norms[] = {2.126, 2.480, 2.413};
  const double rates[] = {3e-4, 1.65e-4, 3e-5};
  for (std::size_t i = 0; i < 3; ++i) {
    INFO("step " << i + 1);
    CHECK(std::abs(steps[i]["lm_loss"].get<double>() - losses[i]) <=
          (i < 2 ? tolerance.early_losses : tolerance.last_loss));
    CHECK(std::abs(steps[i]["grad_norm"].get<double>() - norms[i]) <= 3e-3);
    CHECK(static_cast<float>(steps[i]["learning_rate_printed"].get<double>()) == static_cast<float>(rates[i]));
    CHECK(steps[i]["consumed_samples"] == 2 * (i + 1));
    CHECK(steps[i]["skipped"] == false);
    CHECK(steps[i]["nan"] == false);
  }
}

}  // namespace pgpt::test

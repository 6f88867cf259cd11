// gpt_tool compare on training logs and metrics files: reporting artefacts are told from real differences.

#include <cstdio>
#include <fstream>

#include "pgpt/base/error.h"
#include "pgpt/training/compare_runs.h"
#include "pgpt/training/tool_commands.h"
#include "support/catch.h"
#include "support/evidence_runs.h"
#include "support/text.h"

using namespace pgpt;
using namespace pgpt::test;
using training::NumbersReport;

namespace {

struct Step {
  double loss, norm, rate;
};
// The published figures of the two-rank comparison.
const std::vector<Step> kBridge = {{4.860444, 2.126, 3e-4}, {4.827285, 2.480, 1.65e-4}, {4.781815, 2.413, 3e-5}};
const std::vector<Step> kMegatron = {{4.860444, 2.126, 3e-4}, {4.843864, 2.480, 1.65e-4}, {4.781815, 2.413, 3e-5}};

/// A log as rank 1 prints it; `optional` adds the fields that some options print.
std::string write_log(const std::string& path, const std::vector<Step>& steps, const std::string& head = "",
                      const std::string& tail = "", bool optional = false, std::int64_t stride = 1) {
  std::ofstream out(path);
  out << head;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const long long iteration = i == 0 ? 1 : static_cast<long long>(i) * stride + (stride == 1 ? 1 : 0);
    char line[512];
    std::snprintf(line, sizeof line,
                  " [2025-01-01 00:00:0%zu.000000] iteration %8lld/%8d | consumed samples: %12lld |%s elapsed time per "
                  "iteration (ms): %.1f |%s learning "
                  "rate: %.6E | global batch size: %5d | lm loss: %.6E | loss scale: 1.0 | grad norm: %.3f |%s number "
                  "of skipped iterations: %3d | "
                  "number of nan iterations: %3d |\n",
                  i, iteration, 3, 2 * iteration, optional ? " skipped samples:            0 |" : "",
                  812.4 - static_cast<double>(i), optional ? " throughput per GPU (TFLOP/s/GPU): 1.5 |" : "",
                  steps[i].rate, 2, steps[i].loss, steps[i].norm,
                  optional ? " num zeros: 3.0 | params norm: 12.345 |" : "", 0, 0);
    out << line;
  }
  out << tail;
  return path;
}

NumbersReport compare(const std::string& a, const std::string& b) { return training::compare_logs(a, b, {}); }

}  // namespace

TEST_CASE("the two published columns are the same training: the second line is a first-window mean", "[cpu]") {
  const TemporaryFolder folder;
  const std::string bridge = write_log(folder / "bridge.log", kBridge),
                    megatron = write_log(folder / "megatron.log", kMegatron);
  for (const bool swapped : {false, true}) {
    const NumbersReport report = swapped ? compare(megatron, bridge) : compare(bridge, megatron);
    INFO(training::format_table(report, true));
    CHECK(report.agrees());
    REQUIRE(report.artefacts.size() == 1);
    CHECK(contains(report.artefacts[0], "megatron.log prints a first-window mean"));
    CHECK(contains(report.artefacts[0], "(4.860444 + 4.827285) / 2 = 4.8438645"));
    CHECK(training::format_table(report, false).find("verdict: the same training, reported differently") !=
          std::string::npos);
  }
  CHECK(training::tool_compare({"--log", bridge, megatron}) == ExitCode::kDone);
  CHECK(compare(bridge, bridge).artefacts.empty());
}

TEST_CASE("a second step that is neither the step nor the mean is a real difference", "[cpu]") {
  const TemporaryFolder folder;
  const std::string bridge = write_log(folder / "a.log", kBridge);
  std::vector<Step> other = kMegatron;
  other[1].loss = 4.8500;  // not (4.860444 + 4.827285) / 2
  const NumbersReport report = compare(bridge, write_log(folder / "b.log", other));
  CHECK_FALSE(report.agrees());
  CHECK(report.real.front().find("iteration 2, lm loss") == 0);
  CHECK(static_cast<int>(training::tool_compare({"--log", folder / "a.log", folder / "b.log"})) == 1);
  // The same gap at the third line cannot be a first window.
  other = kBridge;
  other[2].loss = (kBridge[1].loss + kBridge[2].loss) / 2;
  CHECK(compare(bridge, write_log(folder / "b.log", other)).real.front().find("iteration 3, lm loss") == 0);
  // Nor can one after a first line that differs already.
  other = kMegatron;
  other[0].loss += 0.01;
  CHECK(compare(bridge, write_log(folder / "b.log", other)).real.size() == 2);
  other = kBridge;
  other[1].norm = 2.6;
  CHECK(contains(compare(bridge, write_log(folder / "b.log", other)).real.front(), "grad norm"));
}

TEST_CASE("the first window is recognised with a longer log interval, and optional fields are read", "[cpu]") {
  const TemporaryFolder folder;
  // Lines at 1, 10, 20: one log shows the mean of steps 2 to 10, the other that of 1 to 10.
  const std::vector<Step> plain = {{5.0, 2.0, 1e-4}, {4.0, 1.5, 1e-4}, {3.0, 1.2, 1e-4}};
  std::vector<Step> windowed = plain;
  windowed[1].loss = (5.0 + 9 * 4.0) / 10;
  const NumbersReport report = compare(write_log(folder / "a.log", plain, "", "", true, 10),
                                       write_log(folder / "b.log", windowed, "", "", false, 10));
  INFO(training::format_table(report, true));
  CHECK(report.agrees());
  CHECK(has_line(report.artefacts, "(5.000000 + 9 x 4.000000) / 10 = 4.1000000"));
  const training::TrainingRunLog log = training::read_training_log(folder / "a.log");
  CHECK(log.lines.at(1).iteration == 10);
  CHECK(log.lines.at(1).values.at("params norm") == 12.345);
  CHECK(log.lines.at(1).values.at("num zeros") == 3.0);
}

TEST_CASE("a learning rate printed after the step is told, from two logs and from the arguments of one", "[cpu]") {
  const TemporaryFolder folder;
  std::vector<Step> applied = kBridge;  // the rates that the steps used
  applied[0].rate = 0;
  applied[1].rate = 3e-4;
  applied[2].rate = 1.65e-4;
  const NumbersReport report =
      compare(write_log(folder / "applied.log", applied), write_log(folder / "printed.log", kBridge));
  INFO(training::format_table(report, true));
  CHECK(report.agrees());
  CHECK(has_line(report.artefacts, "printed.log prints the rate after the step"));
  std::vector<Step> wrong = applied;
  wrong[2].rate = 2e-4;
  CHECK_FALSE(compare(write_log(folder / "wrong.log", wrong), folder / "printed.log").agrees());

  const std::string arguments =
      "  lr .............................................. 0.0003\n"
      "  lr_warmup_init .................................. 0.0\n"
      "  lr_warmup_iters ................................. 1\n";
  const NumbersReport described = compare(write_log(folder / "full.log", kBridge, arguments), folder / "printed.log");
  CHECK(has_line(described.remarks, "step 1 ran at 0, not at the printed 0.0003, so it changed no weights"));
}

TEST_CASE("an evaluation over a part of the ranks is told from a real difference", "[cpu]") {
  const TemporaryFolder folder;
  const auto evaluation = [](double loss) {
    char text[256];
    std::snprintf(text, sizeof text, " validation loss at iteration 3 | lm loss value: %.6E | lm loss PPL: %.6E | \n",
                  loss, std::exp(loss));
    return std::string(text);
  };
  const std::string gtp = "> initialized gtp weight remat with size 2\n";
  const std::string ours = write_log(folder / "ours.log", kBridge, gtp, evaluation(4.801));
  const NumbersReport report = compare(ours, write_log(folder / "reference.log", kBridge, gtp, evaluation(4.795)));
  INFO(training::format_table(report, true));
  CHECK(report.agrees());
  CHECK(has_line(report.artefacts, "an evaluation averaged over a part of the ranks"));
  // Without GTP there is no such axis, and after a training difference nothing of the kind can be said.
  CHECK_FALSE(compare(write_log(folder / "a.log", kBridge, "", evaluation(4.801)),
                      write_log(folder / "b.log", kBridge, "", evaluation(4.795)))
                  .agrees());
  std::vector<Step> other = kBridge;
  other[2].loss += 0.1;
  CHECK(compare(ours, write_log(folder / "c.log", other, gtp, evaluation(4.795))).real.size() == 2);
}

TEST_CASE("our own logs in both windows are told apart the same way", "[cpu][dist]") {
  const TemporaryFolder folder;
  for (const std::string window : {"step", "megatron"}) {
    const auto results = run_ranks(parse(kSeedFlags + kGtp2 + "--loss-window " + window, 2), 2,
                                   [](int, training::Trainer& trainer) { trainer.run(); });
    std::ofstream out(folder / window);
    for (const std::string& line : results.back().lines) out << line << "\n";
  }
  const NumbersReport report = compare(folder / "step", folder / "megatron");
  INFO(training::format_table(report, true));
  CHECK(report.agrees());
  CHECK(has_line(report.artefacts, "megatron prints a first-window mean"));
}

TEST_CASE("metrics files compare by iteration, with measurements of the machine left out", "[cpu]") {
  const TemporaryFolder folder;
  const auto write = [&](const std::string& name, double loss, double rate, double time) {
    std::ofstream out(folder / name);
    out.precision(17);
    out << R"({"kind":"step","iteration":1,"consumed_samples":2,"lm_loss":)" << loss
        << R"(,"grad_norm":2.5,"learning_rate_applied":)" << rate
        << R"(,"skipped":false,"params_norm":null,"step_time_ms":)" << time << "}\n";
    return folder / name;
  };
  const std::string a = write("a", 4.5, 1e-4, 10), same = write("b", 4.5, 1e-4, 20),
                    near = write("c", 4.5003, 1e-4, 20), rate = write("d", 4.5, 1.1e-4, 20);
  CHECK(training::compare_metrics(a, same, "exact", {}).agrees());
  CHECK(training::compare_metrics(a, near, "", {}).agrees());
  CHECK_FALSE(training::compare_metrics(a, near, "exact", {}).agrees());
  CHECK_FALSE(training::compare_metrics(a, near, "fp32", {}).agrees());
  CHECK(training::compare_metrics(a, near, "fp32", {{"lm_loss", 1e-3}}).agrees());
  CHECK(contains(training::compare_metrics(a, rate, "", {}).real.front(), "learning_rate_applied"));
  CHECK(training::compare_metrics(a, same, "", {}, {1}).agrees());
  CHECK_THROWS_AS(training::compare_metrics(a, same, "", {}, {2}), DataError);
  CHECK_THROWS_AS(training::compare_metrics(a, folder / "missing", "", {}), DataError);
  std::ofstream(folder / "e") << "{\"kind\":\"step\"}\n";
  CHECK_THROWS_AS(training::compare_metrics(a, folder / "e", "", {}), DataError);
}

// N steps, stop, resume M steps equals N + M steps, in every bit, on the same layout.

#include <algorithm>
#include <nlohmann/json.hpp>

#include "support/catch.h"
#include "support/json.h"
#include "test_checkpoint_support.h"

using namespace pgpt;
using test::Outcome;

namespace {

const std::string kDropout = "--attention-dropout 0.1 --hidden-dropout 0.1 ";
const std::string kEvaluation = "--eval-interval 2 --eval-iters 2 ";

/// An unbroken run against one that was stopped at each of `stops` by --exit-interval. Returns the steps.
std::vector<training::StepReport> check_resume(const std::string& flags, int ranks,
                                               const std::vector<std::int64_t>& stops) {
  const test::ScratchFolder folder;
  const Outcome whole = test::train(flags + "--save " + folder.path("whole"), ranks);
  REQUIRE(whole.steps.size() == 8);
  for (const std::int64_t stop : stops) {
    INFO("stopped after iteration " << stop);
    const std::string save = folder.path(std::to_string(stop));
    const Outcome first = test::train(flags + "--save " + save + " --exit-interval " + std::to_string(stop), ranks);
    REQUIRE(first.steps.size() == static_cast<std::size_t>(stop));
    const Outcome second = test::train(flags + "--save " + save + " --load " + save, ranks);
    std::vector<training::StepReport> steps = first.steps;
    steps.insert(steps.end(), second.steps.begin(), second.steps.end());
    test::require_same_steps(steps, whole.steps);
    std::vector<std::string> evaluations = first.evaluations;
    evaluations.insert(evaluations.end(), second.evaluations.begin(), second.evaluations.end());
    CHECK(evaluations == whole.evaluations);
    test::require_same_checkpoints(test::iteration_path(save, 8), test::iteration_path(folder.path("whole"), 8));
  }
  return whole.steps;
}

}  // namespace

TEST_CASE("a resumed run equals the unbroken one bit for bit", "[cpu][checkpoint]") {
  struct Precision {
    const char* name;
    std::string flags;
  };
  const Precision precisions[] = {
      {"adam bf16", "--bf16 "},
      {"adam fp32", ""},
      {"sgd bf16", "--bf16 --optimizer sgd "},
      // Logit gradients are up to scale / 16 here, and half precision ends at 2^16: 2^22 overflows, and every two good
      // steps double the scale, so that skipped steps lie before and after the stop.
      {"adam fp16", "--fp16 --hysteresis 1 --loss-scale-window 2 --initial-loss-scale 4194304 "}};
  for (const Precision& precision : precisions) {
    for (const int shards : {1, 2, 4}) {
      for (const int accumulation : {1, 3}) {
        INFO(precision.name << ", GTP " << shards << ", accumulation " << accumulation);
        const std::vector<training::StepReport> steps =
            check_resume(precision.flags + kDropout + kEvaluation + test::gtp(shards) + "--global-batch-size " +
                             std::to_string(shards * accumulation) + " ",
                         shards, {3});
        if (precision.flags.find("--fp16") == std::string::npos) continue;
        const auto skipped = [](const training::StepReport& step) { return step.skipped; };
        CHECK(std::count_if(steps.begin(), steps.begin() + 3, skipped) > 0);
        CHECK(std::count_if(steps.begin() + 3, steps.end(), skipped) > 0);
        CHECK(std::count_if(steps.begin(), steps.end(), skipped) < 8);
      }
    }
  }
}

TEST_CASE("it does not matter where a run stops", "[cpu][checkpoint]") {
  (void)check_resume("--bf16 " + kDropout + kEvaluation + test::kPadded + test::gtp(2), 2, {1, 4, 7});
}

TEST_CASE("padding rows, replicas, per-rank seeds and other learning rates resume too", "[cpu][checkpoint]") {
  (void)check_resume("--bf16 " + kDropout + kEvaluation + test::kPadded + test::gtp(4), 4, {3});
  (void)check_resume("--bf16 " + kDropout + kEvaluation + test::kPadded + test::gtp(2), 4,
                     {3});  // GTP 2 x data parallel 2
  (void)check_resume("--bf16 --data-parallel-random-init " + kDropout, 2, {3});
  (void)check_resume("--bf16 --dataloader-type cyclic --decoupled-lr 5e-3 --decoupled-min-lr 1e-4 " + kDropout +
                         kEvaluation + test::gtp(2),
                     2, {5});
}

TEST_CASE("a rising batch size saves by itself and resumes on both sides of the rise", "[cpu][checkpoint]") {
  // Tokens 64 are 4 samples: batches 2, 2, then six times 4, 28 samples in 8 iterations.
  std::string base = test::base_flags();
  for (const auto& [old, better] : {std::pair<std::string, std::string>{"--train-iters 8", "--train-samples 28"},
                                    {"--global-batch-size 4", "--step-batch-size-schedule \"0:2 64:4\""},
                                    {"--lr-warmup-iters 2", "--lr-warmup-samples 4"}}) {
    base.replace(base.find(old), old.size(), better);
  }
  const std::string flags = "--bf16 " + kDropout + test::gtp(2);
  const test::ScratchFolder folder;
  const Outcome whole = test::train(flags + "--save " + folder.path("whole"), 2, base);
  REQUIRE(whole.steps.size() == 8);
  CHECK(whole.steps[1].batch_size == 2);
  CHECK(whole.steps[2].batch_size == 4);
  for (const std::int64_t stop : {1, 2, 5}) {
    INFO("stopped after iteration " << stop);
    const std::string save = folder.path(std::to_string(stop));
    const Outcome first = test::train(flags + "--save " + save + " --exit-interval " + std::to_string(stop), 2, base);
    const Outcome second = test::train(flags + "--save " + save + " --load " + save, 2, base);
    test::require_same_steps(first.steps, {whole.steps.begin(), whole.steps.begin() + stop});
    test::require_same_steps(second.steps, test::tail(whole.steps, static_cast<std::size_t>(stop)));
    test::require_same_checkpoints(test::iteration_path(save, 8), test::iteration_path(folder.path("whole"), 8));
  }
  CHECK(std::filesystem::exists(test::iteration_path(folder.path("whole"), 2)));  // the rise came next
  const Outcome due = test::train(flags + "--save-interval 2 --save " + folder.path("due"), 2, base);
  CHECK_FALSE(test::has_line(due.lines, "WARNING: overwriting"));  // one save, though the interval asks for it too
}

TEST_CASE("a run may be resumed many times and evaluates the promised samples", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string flags = "--bf16 " + kDropout + kEvaluation + test::gtp(2);
  const Outcome whole = test::train(flags, 2);
  std::vector<training::StepReport> steps;
  std::vector<std::string> evaluations;
  const std::string save = folder.path("s");
  const std::string metrics = folder.path("metrics.jsonl");
  for (int part = 1; part <= 4; ++part) {
    // Multiples of 2: each part adds two iterations.
    const Outcome outcome =
        test::train(flags + "--save " + save + " --load " + save + " --exit-interval 2 --metrics-file " + metrics, 2);
    CHECK(outcome.steps.size() == 2);
    steps.insert(steps.end(), outcome.steps.begin(), outcome.steps.end());
    evaluations.insert(evaluations.end(), outcome.evaluations.begin(), outcome.evaluations.end());
  }
  test::require_same_steps(steps, whole.steps);
  // The last part leaves at --exit-interval, before the final evaluations.
  CHECK(evaluations == std::vector<std::string>(whole.evaluations.begin(), whole.evaluations.begin() + 4));
  std::vector<std::int64_t> iterations;
  for (const nlohmann::json& object : test::read_json_lines(metrics)) {
    if (object.at("kind") == "step") iterations.push_back(object.at("iteration").get<std::int64_t>());
  }
  CHECK(iterations == std::vector<std::int64_t>{1, 2, 3, 4, 5, 6, 7, 8});
}

TEST_CASE("a finished run that is resumed trains nothing and evaluates", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string flags = "--bf16 " + kEvaluation + "--save " + folder.path("s") + " --load " + folder.path("s");
  const Outcome whole = test::train(flags, 1);
  const Outcome again = test::train(flags, 1);
  CHECK(again.steps.empty());
  REQUIRE(again.evaluations.size() == 2);
  CHECK(again.evaluations[0] == whole.evaluations[4]);
  CHECK(again.evaluations[1] == whole.evaluations[5]);
}

// Leaving a run early and publishing background saves: ranks tell each other with what steps reduce anyway.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>

#include "pgpt/checkpoint/directory.h"
#include "pgpt/training/exit_signals.h"
#include "support/catch.h"
#include "support/counting_world.h"
#include "support/thread_ranks.h"
#include "test_checkpoint_support.h"

using namespace pgpt;
using namespace std::chrono_literals;

namespace {

const std::string kBackground = "--async-save --use-persistent-ckpt-worker ";

/// Runs base flags and `flags` on two thread ranks under the handlers of --exit-signal-handler; `after_step` is called
/// when a rank has finished a step.
std::vector<test::RankResult> run(
    const std::string& flags,
    const std::function<void(int rank, training::Trainer& trainer, std::int64_t iteration)>& after_step) {
  const config::Config config = test::parse(test::base_flags() + "--bf16 " + test::gtp(2) + flags, 2);
  const training::ExitSignals signals(config.training);
  return test::run_ranks(config, 2, [&](int rank, training::Trainer& trainer) {
    trainer.on_step = [&, rank, record = trainer.on_step](const training::StepReport& report) {
      record(report);
      after_step(rank, trainer, report.iteration);
    };
    trainer.run();
  });
}

/// Both ranks ended after this iteration, and rank 0 told why.
void require_end(const std::vector<test::RankResult>& ranks, std::int64_t iteration, const std::string& reason) {
  for (const test::RankResult& rank : ranks) REQUIRE(rank.steps.back().iteration == iteration);
  CHECK(test::has_line(ranks[0].lines, "[exiting program " + reason));
}

std::size_t position_of(const std::vector<std::string>& lines, const std::string& text) {
  return static_cast<std::size_t>(
      std::find_if(lines.begin(), lines.end(), [&](const std::string& line) { return test::contains(line, text); }) -
      lines.begin());
}

/// How many collectives a run of two ranks launches, the same on both.
std::int64_t collectives(const std::string& flags) {
  std::atomic<std::int64_t> counts[2] = {0, 0};
  std::vector<std::unique_ptr<comm::World>> worlds = comm::World::connect_threads(2);
  for (std::size_t rank = 0; rank < 2; ++rank)
    worlds[rank] = std::make_unique<test::CountingWorld>(std::move(worlds[rank]), counts[rank]);
  (void)test::run_ranks(test::parse(test::base_flags() + "--bf16 " + test::gtp(2) + flags, 2), std::move(worlds),
                        [](int, training::Trainer& trainer) { trainer.run(); });
  REQUIRE(counts[0] == counts[1]);
  return counts[0];
}

}  // namespace

TEST_CASE("exit options and background saves add no collective to a step", "[cpu][dist][checkpoint]") {
  const test::ScratchFolder folder;
  CHECK(collectives("--exit-signal-handler --exit-duration-in-mins 1000 ") == collectives(""));
  // 8 iterations save at 3, 6 and the end. Each background save has one agreement more than a blocking one, since
  // copying and writing may fail apart from each other; one more takes the host memory at the start.
  const std::string save = "--save-interval 3 --save ";
  CHECK(collectives(kBackground + save + folder.path("background")) == collectives(save + folder.path("blocking")) + 4);
}

TEST_CASE("when one rank's time is up both save and end at the next step", "[cpu][dist][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = "--exit-duration-in-mins 30 --save " + folder.path("s") + " ";
  const auto after_third = [](int rank, training::Trainer& trainer, std::int64_t iteration) {
    if (rank == 1 && iteration == 3) trainer.add_run_time(31min);
  };
  require_end(run(save, after_third), 4, "after 0.");  // rank 0 tells its own time
  CHECK(checkpoint::read_tracker(folder.path("s"))->iteration == 4);
  const std::string flags = "--bf16 " + test::gtp(2);
  test::require_same_steps(test::train(flags + "--load " + folder.path("s"), 2).steps,
                           test::tail(test::train(flags, 2).steps, 4));

  // An evaluation looks at the clock itself, and no step follows.
  const auto ranks = run(save + "--eval-interval 3 --eval-iters 4 ", after_third);
  require_end(ranks, 3, "after 0.");
  CHECK(test::has_line(ranks[0].lines, "Exiting during evaluation, timelimit reached"));
  CHECK_FALSE(test::has_line(ranks[1].lines, "validation loss at iteration"));
  CHECK(checkpoint::read_tracker(folder.path("s"))->iteration == 3);
}

TEST_CASE("a signal is obeyed at the next step, or after the evaluation it comes in", "[cpu][dist][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = "--exit-signal-handler --save " + folder.path("s") + " ";
  const auto send = [](int number, std::int64_t when) {
    return [=](int rank, training::Trainer&, std::int64_t iteration) {
      if (rank == 0 && iteration == when) std::raise(number);
    };
  };
  require_end(run(save, send(SIGTERM, 3)), 4, "after receiving SIGTERM.");
  CHECK(checkpoint::read_tracker(folder.path("s"))->iteration == 4);

  const auto evaluated = run(save + "--eval-interval 3 --eval-iters 2 ", send(SIGTERM, 3));
  require_end(evaluated, 3, "after receiving SIGTERM.");
  CHECK(test::has_line(evaluated[1].lines, "validation loss at iteration 3"));
  CHECK(checkpoint::read_tracker(folder.path("s"))->iteration == 3);

  // SIGUSR1 saves once and goes on, also where a save is due anyway.
  for (const std::string due : {"", "--save-interval 4 "}) {
    const auto saved = run(save + due, send(SIGUSR1, 3));
    CHECK(saved[0].steps.size() == 8);
    CHECK(test::has_line(saved[0].lines, "saving checkpoint at iteration       4 "));
    CHECK_FALSE(test::has_line(saved[0].lines, "saving checkpoint at iteration       5 "));
  }
}

TEST_CASE("a background save is published while training goes on, the last one before the run ends",
          "[cpu][dist][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = folder.path("s");
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  std::int64_t seen_at = 0;
  const auto ranks = run(kBackground + "--exit-signal-handler --save " + save +
                             " --save-interval 100000000 --train-iters 1000000 --lr-decay-iters 1000000 ",
                         [&](int rank, training::Trainer&, std::int64_t iteration) {
                           if (rank != 0) return;
                           if (iteration == 1) std::raise(SIGUSR1);  // saved at 2
                           if (seen_at != 0) return;
                           if (checkpoint::read_tracker(save)) seen_at = iteration;
                           if (seen_at != 0 || std::chrono::steady_clock::now() > deadline) std::raise(SIGTERM);
                         });
  REQUIRE(seen_at > 2);
  require_end(ranks, seen_at + 1, "after receiving SIGTERM.");
  const std::vector<std::string>& lines = ranks[0].lines;
  CHECK(position_of(lines, "scheduled an async checkpoint save at iteration       2 ") <
        position_of(lines, "successfully saved checkpoint from iteration       2 "));
  CHECK_FALSE(test::has_line(lines, "is not finished; waiting for it"));
  REQUIRE(checkpoint::read_tracker(save)->iteration == seen_at + 1);
  for (const std::int64_t iteration : {std::int64_t{2}, seen_at + 1})
    checkpoint::Checkpoint(test::iteration_path(save, iteration)).verify({});
}

TEST_CASE("a skipped iteration is saved and left at like any other, but not evaluated at", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = folder.path("saved");
  const auto saved = [&](std::int64_t iteration) {
    return std::filesystem::exists(test::iteration_path(save, iteration));
  };
  (void)test::train("--train-iters 6 --iterations-to-skip 3 6 --save-interval 3 --save " + save, 1);
  CHECK(saved(3));
  CHECK(saved(6));
  const test::Outcome left =
      test::train("--iterations-to-skip 5 --exit-interval 5 --eval-interval 5 --eval-iters 1 --save " + save, 1);
  CHECK(left.steps.back().iteration == 4);
  CHECK(saved(5));
  CHECK(left.evaluations.empty());
}

TEST_CASE("a loss that is not finite ends a run with a constant loss scale, and an evaluation", "[cpu][checkpoint]") {
  // Weights this large overflow the first logits.
  const test::Failure step = test::train_fails("--fp16 --loss-scale 128 --init-method-std 1e30 " + test::gtp(2), 2);
  CHECK(step.code == 5);
  CHECK(step.message.starts_with("iteration 1: the loss of rank"));
  const test::Failure evaluation =
      test::train_fails("--init-method-std 1e30 --skip-train --eval-iters 1 " + test::gtp(2), 2);
  CHECK(evaluation.code == 5);
  CHECK(evaluation.message.starts_with("the validation loss after iteration 0 is NaN or Inf"));
}

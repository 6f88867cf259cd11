// Groups whose shared tensors move by copy engine, on two GPUs, against NCCL on the same data.
#include <signal.h>

#include <stdexcept>

#include "pgpt/base/error.h"
#include "pgpt/comm/world.h"
#include "support/catch.h"
#include "support/processes.h"
#include "support/text.h"

namespace {

using namespace pgpt::test;
using pgpt::comm::World;

constexpr Milliseconds kLimit{180'000};

std::vector<std::string> scenario(const std::string& name) { return {PGPT_COMM_WORKER, "copy-engine", name}; }

bool two_gpus() {
  const int found = pgpt::comm::visible_gpus();
  if (found < 2) WARN("needs 2 GPUs, found " << found << ": skipped");
  return found >= 2;
}

void check_done(const std::string& name) {
  const auto ranks = run_ranks(2, scenario(name), {{"PGPT_TEST_TIMEOUT_MS", "60000"}}, kLimit);
  INFO(describe(ranks));
  for (size_t r = 0; r < ranks.size(); ++r) {
    CHECK(ranks[r].exit_code == 0);
    CHECK(ranks[r].output == "rank " + std::to_string(r) + " done\n");  // the watchdog says nothing
  }
}

}  // namespace

TEST_CASE("a copy-engine group without NCCL is refused with the option to use", "[cpu][dist]") {
  const auto worlds = World::connect_threads(2);
  const pgpt::comm::GroupOptions options{.high_priority = false, .transport = pgpt::comm::Transport::kCopyEngine};
  try {
    (void)worlds[0]->create_group("gtp", {0, 1}, options);
    FAIL("accepted");
  } catch (const pgpt::ConfigError& error) {
    CHECK(contains(error.what(), "--gtp-transport copy-engine needs --distributed-backend nccl"));
    CHECK(contains(error.what(), "use --gtp-transport nccl"));
  }
  // Alone there is nobody to copy from.
  CHECK(worlds[0]->create_group("alone", {0}, options)->size() == 1);
}

TEST_CASE("copy-engine gathers and scatters of two GPUs equal NCCL's bit for bit", "[gpu][nccl]") {
  if (two_gpus()) check_done("equal");
}

TEST_CASE("500 copy-engine gathers and scatters in flight together beside GEMMs see only current data", "[gpu][nccl]") {
  if (two_gpus()) check_done("overlap");
}

TEST_CASE("fenced copy-engine gathers see what was written before the fence and nothing after the next",
          "[gpu][nccl]") {
  if (two_gpus()) check_done("fences");
}

TEST_CASE("a copy-engine operation inside a graph capture is refused", "[gpu][nccl]") {
  if (two_gpus()) check_done("capture");
}

TEST_CASE("memory that other processes cannot map is refused on both ranks, naming the setting", "[gpu][nccl]") {
  if (!two_gpus()) return;
  const auto ranks =
      run_ranks(2, scenario("overlap"), {{"PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"}}, kLimit);
  INFO(describe(ranks));
  for (const Ended& rank : ranks) {
    CHECK(rank.exit_code == 2);
    CHECK(contains(rank.output, "expandable_segments:True"));
    CHECK(contains(rank.output, "use --gtp-transport nccl"));
  }
}

TEST_CASE("a group that may choose copies where it can, and says why it does not", "[gpu][nccl]") {
  if (!two_gpus()) return;
  for (const bool possible : {true, false}) {
    pgpt::test::Environment environment;
    if (!possible) environment = {{"PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"}};
    const auto ranks = run_ranks(2, scenario("automatic"), environment, kLimit);
    INFO(describe(ranks));
    for (const Ended& rank : ranks) {
      CHECK(rank.exit_code == 0);
      CHECK(contains(rank.output, possible ? "by copies" : "by collectives"));
    }
    CHECK(contains(ranks[0].output, "> GTP moves weights and gradients by NCCL, since") == !possible);
    CHECK_FALSE(contains(ranks[1].output, "> GTP moves weights and gradients by NCCL, since"));
  }
}

TEST_CASE("a killed or stopped peer of a copy-engine group ends the other in time, naming group and operation",
          "[gpu][nccl]") {
  if (!two_gpus()) return;
  for (const int signal : {SIGKILL, SIGSTOP}) {
    INFO("signal " << signal);
    Job job(2, scenario("endless"), {{"PGPT_TEST_TIMEOUT_MS", "5000"}});
    REQUIRE(job.rank(0).wait_for_output("looping", kLimit));
    REQUIRE(job.rank(1).wait_for_output("looping", kLimit));
    job.rank(1).signal(signal);
    // The deadline is 5 s; heartbeats, the last words and the end of the process need a few more.
    const Ended first = job.rank(0).wait(Milliseconds(25'000));
    INFO(job.tails());
    CHECK_FALSE(first.timed_out);
    CHECK(first.exit_code == 3);
    CHECK(contains(first.output, "rank 1"));
    if (signal == SIGSTOP) {
      CHECK(contains(first.output, "all_gather"));
      CHECK(contains(first.output, "group 'gtp'"));
      job.rank(1).signal(SIGCONT);
      (void)job.rank(1).wait(kLimit);
    }
  }
}

TEST_CASE("speed of gathers and scatters by NCCL and by copy engine, alone and beside GEMMs", "[.bench]") {
  if (!two_gpus()) return;
  const auto ranks = run_ranks(2, scenario("bench"), {{"PGPT_TEST_TIMEOUT_MS", "120000"}}, kLimit);
  INFO(describe(ranks));
  for (const Ended& rank : ranks) CHECK(rank.exit_code == 0);
  WARN(ranks[0].output);
}

// Ranks as processes: normal runs under every launcher, and every way of failing ends all ranks in time with one line
// each.
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "pgpt/comm/world.h"
#include "support/catch.h"
#include "support/processes.h"
#include "support/text.h"

namespace {

using namespace pgpt::test;
using Clock = std::chrono::steady_clock;

constexpr Milliseconds kLimit{60'000};

std::vector<std::string> worker(const std::vector<std::string>& arguments) {
  std::vector<std::string> command{PGPT_COMM_WORKER};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return command;
}

Environment timeouts(int rendezvous_ms, int collective_ms) {
  return {{"PGPT_TEST_RENDEZVOUS_MS", std::to_string(rendezvous_ms)},
          {"PGPT_TEST_TIMEOUT_MS", std::to_string(collective_ms)}};
}

/// The rank printed exactly one error line, which holds `part`, and left with `code`.
void check_end(const Ended& ended, int code, const std::string& part) {
  INFO(describe(ended));
  CHECK_FALSE(ended.timed_out);
  CHECK(ended.exit_code == code);
  CHECK(count(ended.output, "error:") == 1);
  CHECK(contains(ended.output, part));
}

/// Milliseconds since `start`.
int64_t since(Clock::time_point start) {
  return std::chrono::duration_cast<Milliseconds>(Clock::now() - start).count();
}

/// A program that holds a port and never answers.
class Holder {
 public:
  Holder() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), address_{} {
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_ANY);
    socklen_t length = sizeof address_;
    if (::bind(fd_, reinterpret_cast<sockaddr*>(&address_), sizeof address_) != 0 || ::listen(fd_, 16) != 0 ||
        ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address_), &length) != 0) {
      throw std::runtime_error("cannot hold a port");
    }
  }
  ~Holder() { ::close(fd_); }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;
  [[nodiscard]] int port() const { return ntohs(address_.sin_port); }

 private:
  int fd_;
  sockaddr_in address_;
};

}  // namespace

TEST_CASE("two ranks in plain environments connect, sum and leave without a word of the watchdog", "[cpu][dist]") {
  const auto ranks = run_ranks(2, worker({"once"}), {}, kLimit);
  for (size_t r = 0; r < ranks.size(); ++r) {
    INFO(describe(ranks));
    CHECK(ranks[r].exit_code == 0);
    const std::string name = "rank " + std::to_string(r);
    CHECK(ranks[r].output == name + " of 2 connected by environment\n" + name + " done\n");
  }
}

TEST_CASE("every collective works between processes, with several in flight", "[cpu][dist]") {
  for (const auto& ended : run_ranks(2, worker({"collectives", "gloo", "cpu"}), {}, kLimit)) {
    INFO(describe(ended));
    CHECK(ended.exit_code == 0);
  }
}

TEST_CASE("two ranks may share one GPU through gloo", "[gpu][dist]") {
  if (pgpt::comm::visible_gpus() < 1) {
    WARN("no GPU: skipped");
    return;
  }
  for (const auto& ended : run_ranks(2, worker({"collectives", "gloo", "cuda"}), {}, kLimit)) {
    INFO(describe(ended));
    CHECK(ended.exit_code == 0);
  }
}

TEST_CASE("every collective works through nccl, one GPU a rank, and more ranks than GPUs are refused", "[gpu][dist]") {
  const int gpus = pgpt::comm::visible_gpus();
  if (gpus < 1) {
    WARN("no GPU: skipped");
    return;
  }
  for (const auto& ended : run_ranks(gpus + 1, worker({"collectives", "nccl", "cuda"}), {}, kLimit)) {
    check_end(ended, 2, "--distributed-backend gloo");
  }
  if (gpus < 2) {
    WARN("one GPU: the rest is skipped");
    return;
  }
  for (const auto& ended : run_ranks(gpus, worker({"collectives", "nccl", "cuda"}), {}, kLimit)) {
    INFO(describe(ended));
    CHECK(ended.exit_code == 0);
    CHECK(count(ended.output, "\n") == 1);  // no watchdog text
  }
}

TEST_CASE("Ctrl-C ends a process without a launcher with 130", "[cpu][dist]") {
  Process alone(worker({"loop"}), {});
  REQUIRE(alone.wait_for_output("looping", kLimit));
  alone.signal(SIGINT);
  check_end(alone.wait(kLimit), 130, "stopped by SIGINT (Ctrl-C)");
}

TEST_CASE("a process without a launcher is one rank", "[cpu][dist]") {
  const auto ended = Process(worker({"once"}), {{"SLURM_JOB_ID", "5"}, {"SLURM_NTASKS", "4"}}).wait(kLimit);
  INFO(describe(ended));
  CHECK(ended.exit_code == 0);
  CHECK(ended.output == "rank 0 of 1 connected by none\nrank 0 done\n");
}

TEST_CASE("two ranks under torchrun share its agent's store; a failing one is named", "[cpu][dist]") {
  const auto good = run_torchrun(2, worker({"once"}), {}, kLimit);
  INFO(describe(good));
  CHECK(good.exit_code == 0);
  CHECK(count(good.output, "connected by torchrun") == 2);
  CHECK(count(good.output, "done") == 2);
  const auto bad = run_torchrun(2, worker({"throw", "1"}), {}, kLimit);
  INFO(describe(bad));
  CHECK(bad.exit_code != 0);
  CHECK(contains(bad.output, "the disk is on fire"));
}

TEST_CASE("two ranks under mpirun connect without any MASTER variable; a failing one is named", "[cpu][dist]") {
  if (!has_mpirun()) {
    WARN("mpirun is not installed: skipped");
    return;
  }
  const auto good = run_mpirun(2, worker({"once"}), {}, kLimit);
  INFO(describe(good));
  CHECK(good.exit_code == 0);
  CHECK(count(good.output, "connected by Open MPI") == 2);
  CHECK(count(good.output, "done") == 2);
  const auto bad = run_mpirun(2, worker({"throw", "1"}), {}, kLimit);
  INFO(describe(bad));
  CHECK((bad.exit_code == 2 || bad.exit_code == 3));
  CHECK(contains(bad.output, "the disk is on fire"));
}

TEST_CASE("worlds can be opened and closed many times in a row, on one port", "[cpu][dist]") {
  const auto ranks = run_ranks(2, worker({"cycles", "20"}), {}, kLimit);
  for (size_t r = 0; r < ranks.size(); ++r) {
    INFO(describe(ranks));
    CHECK(ranks[r].exit_code == 0);
    CHECK(ranks[r].output == "rank " + std::to_string(r) + " done\n");
  }
}

TEST_CASE("a rank that fails ends the others at once with its reason", "[cpu][dist]") {
  for (const int victim : {0, 1}) {
    Job job(3, worker({"throw", std::to_string(victim)}));
    const auto ranks = job.wait(kLimit);
    for (int r = 0; r < 3; ++r) {
      const auto& ended = ranks[static_cast<size_t>(r)];
      if (r == victim) {
        check_end(ended, 2, "the disk is on fire");
      } else {
        check_end(ended, 3, "rank " + std::to_string(victim) + " failed: the disk is on fire (this rank was in ");
      }
    }
  }
}

TEST_CASE("a rank that is killed is named by the others within seconds, long before the deadline", "[cpu][dist]") {
  for (const int victim : {0, 1}) {
    Job job(3, worker({"loop"}), timeouts(30'000, 120'000));
    REQUIRE(job.rank(victim).wait_for_output("looping", kLimit));
    const auto start = Clock::now();
    job.rank(victim).signal(SIGKILL);
    const auto ranks = job.wait(kLimit);
    CHECK(since(start) < 10'000);
    CHECK(ranks[static_cast<size_t>(victim)].exit_code == 128 + SIGKILL);
    for (int r = 0; r < 3; ++r) {
      if (r != victim) check_end(ranks[static_cast<size_t>(r)], 3, "rank " + std::to_string(victim));
      if (r != victim) CHECK(contains(ranks[static_cast<size_t>(r)].output, "all_reduce #"));
    }
  }
}

TEST_CASE("a stopped rank ends the others at the deadline, and itself when it is continued", "[cpu][dist]") {
  constexpr int kDeadline = 2500;
  // One job loses rank 0, the other rank 1, at the same time.
  Job first(2, worker({"loop"}), timeouts(30'000, kDeadline));
  Job second(2, worker({"loop"}), timeouts(30'000, kDeadline));
  Job* const jobs[] = {&first, &second};
  for (Job* job : jobs) REQUIRE(job->rank(1).wait_for_output("looping", kLimit));
  const auto start = Clock::now();
  for (int victim : {0, 1}) jobs[victim]->rank(victim).signal(SIGSTOP);
  for (int victim : {0, 1}) {
    Job& job = *jobs[victim];
    const auto other = job.rank(1 - victim).wait(kLimit);
    CHECK(since(start) >= kDeadline - 100);  // the clock of the watchdog ticks every 25 ms
    CHECK(since(start) < kDeadline + 15'000);
    check_end(other, 3, "did not finish within 2.5 s");
    CHECK(
        contains(other.output, victim == 0 ? "rank 0, which hosts the store at 127.0.0.1:" : "rank 1 does not answer"));
    CHECK(contains(other.output, "of group 'data'"));
    CHECK(job.rank(victim).running());
    job.rank(victim).signal(SIGCONT);
    check_end(job.rank(victim).wait(kLimit), 3, "rank " + std::to_string(1 - victim));
  }
}

TEST_CASE("a rank that lives but stays away from a collective is named with what it does", "[cpu][dist]") {
  Job job(2, worker({"idle", "1"}), timeouts(30'000, 2000));
  const auto ranks = job.wait(kLimit);
  check_end(ranks[0], 3,
            "rank 1 has not joined: barrier #2 of group 'data' did not finish within 2 s; rank 1 is in a long nap");
  check_end(ranks[1], 3, "rank 0 gave up: rank 1 has not joined");
}

TEST_CASE("announced slow work is waited for beyond the deadline, but not for ever", "[cpu][dist]") {
  Job patient(2, worker({"idle", "1", "20000", "2500"}), timeouts(30'000, 1000));
  Job late(2, worker({"idle", "1", "1000", "60000"}), timeouts(30'000, 1000));
  for (const auto& ended : patient.wait(kLimit)) {
    INFO(describe(ended));
    CHECK(ended.exit_code == 0);
  }
  check_end(late.wait(kLimit)[0], 3, "rank 1 has not joined");
}

TEST_CASE("ranks that never start are named at the end of the rendezvous", "[cpu][dist]") {
  Job job(4, worker({"once"}), timeouts(2000, 30'000), 0, {1, 3});
  const auto start = Clock::now();
  const auto ranks = job.wait(kLimit);
  CHECK(since(start) < 15'000);
  for (const size_t r : {0u, 2u}) check_end(ranks[r], 3, "ranks 1, 3 of 4 have not arrived at 127.0.0.1:");
}

TEST_CASE("a missing rank 0 is an unreachable address", "[cpu][dist]") {
  Job job(2, worker({"once"}), timeouts(1500, 30'000), 0, {0});
  check_end(job.wait(kLimit)[1], 3, "could not connect to 127.0.0.1:" + std::to_string(job.port()));
}

TEST_CASE("an address that cannot be resolved is named", "[cpu][dist]") {
  Job job(2, worker({"once"}), {{"MASTER_ADDR", "no-such-host.invalid"}, {"PGPT_TEST_RENDEZVOUS_MS", "1000"}}, 0, {0});
  check_end(job.wait(kLimit)[1], 3, "MASTER_ADDR=no-such-host.invalid");
}

TEST_CASE("a port held by another program is named by every rank", "[cpu][dist]") {
  const Holder holder;
  Job job(2, worker({"once"}), timeouts(1500, 30'000), holder.port());
  const auto ranks = job.wait(kLimit);
  const std::string where = "127.0.0.1:" + std::to_string(holder.port());
  check_end(ranks[0], 3, "rank 0 cannot listen on " + where);
  CHECK(contains(ranks[0].output, "the port is in use"));
  check_end(ranks[1], 3, where);
}

TEST_CASE("two processes with one rank end the joining job, but not a running one", "[cpu][dist]") {
  Job joining(3, worker({"once"}), timeouts(20'000, 30'000), 0, {2});
  const auto twin = joining.extra(1, 3);
  // On a busy machine one of the three may start only after the others have found out and left: it then finds nobody.
  std::vector<Ended> ends = joining.wait(kLimit);
  ends.push_back(twin->wait(kLimit));
  int told = 0;
  for (const auto& ended : ends) {
    if (ended.exit_code == -1) continue;
    const bool twice = contains(ended.output, "rank 1 exists twice");
    told += twice ? 1 : 0;
    check_end(ended, 3, twice ? "rank 1 exists twice" : "could not connect");
  }
  CHECK(told >= 2);

  Job running(2, worker({"loop"}));
  REQUIRE(running.rank(1).wait_for_output("looping", kLimit));
  check_end(running.extra(1, 2)->wait(kLimit), 3, "rank 1 exists twice");
  check_end(running.extra(1, 3)->wait(kLimit), 3, "has 2 ranks, but rank 1");
  CHECK(running.rank(0).running());
  CHECK(running.rank(1).running());
}

TEST_CASE("a rank with another world size ends the job that it tries to join", "[cpu][dist]") {
  Job job(2, worker({"once"}), timeouts(20'000, 30'000), 0, {1});
  const auto wrong = job.extra(1, 3);
  check_end(wrong->wait(kLimit), 3, "WORLD_SIZE=3");
  check_end(job.wait(kLimit)[0], 3, "WORLD_SIZE=3");
}

TEST_CASE("Ctrl-C on one rank ends all cleanly with 130, a second one ends at once", "[cpu][dist]") {
  Job job(2, worker({"loop"}));
  REQUIRE(job.rank(1).wait_for_output("looping", kLimit));
  const auto start = Clock::now();
  job.rank(1).signal(SIGINT);
  const auto ranks = job.wait(kLimit);
  CHECK(since(start) < 10'000);
  check_end(ranks[0], 130, "stopped: rank 1 received SIGINT (Ctrl-C)");
  check_end(ranks[1], 130, "stopped by SIGINT (Ctrl-C)");

  // The store's host is stopped, so telling the others takes its time: the second signal does not wait for it.
  Job stuck(2, worker({"loop"}), timeouts(30'000, 60'000));
  REQUIRE(stuck.rank(1).wait_for_output("looping", kLimit));
  stuck.rank(0).signal(SIGSTOP);
  stuck.rank(1).signal(SIGINT);
  std::this_thread::sleep_for(Milliseconds(320));  // signals within 0.3 s count as one key press
  stuck.rank(1).signal(SIGINT);
  const auto second = stuck.rank(1).wait(kLimit);
  INFO(describe(second));
  CHECK(second.exit_code == 130);
}

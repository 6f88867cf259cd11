#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// Starts the ranks of a job as processes, for launch, fault and start-stop tests.
namespace pgpt::test {

using Milliseconds = std::chrono::milliseconds;
using Environment = std::map<std::string, std::string>;

/// A TCP port on 127.0.0.1 that nobody holds now.
int free_port();

/// How a process ended.
struct Ended {
  int exit_code = -1;      ///< 128 + signal when a signal killed it, as in a shell
  bool timed_out = false;  ///< still ran at the limit and was killed
  std::string output;      ///< stdout and stderr together
};

/// One child in a process group of its own; the destructor kills whatever is left of the group.
class Process {
 public:
  /// Starts `command` (found through PATH). The child sees this process's environment without any launcher's variables,
  /// with OMP_NUM_THREADS=1, plus `environment`. Throws std::runtime_error if it cannot start.
  Process(const std::vector<std::string>& command, const Environment& environment);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] bool running();
  /// Sends a signal to the process alone.
  void signal(int number) const;
  /// Waits until it ends or `limit` is over (then kills the group).
  Ended wait(Milliseconds limit);
  /// Everything written so far.
  [[nodiscard]] std::string output() const;
  /// Waits until the output holds `text`; false when `limit` passes or the process ends first.
  bool wait_for_output(const std::string& text, Milliseconds limit);

 private:
  bool collect(bool block);
  pid_t pid_ = -1;
  std::optional<int> status_;
  std::string output_path_;
};

/// The last `lines` lines of a text.
std::string last_lines(const std::string& text, int lines = 20);

/// `world_size` ranks started with torchrun's variable names (plain environment) on 127.0.0.1.
class Job {
 public:
  /// Rank r runs `command` with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
  /// `environment`. A `port` of 0 takes a free one. `absent` ranks are not started.
  Job(int world_size, const std::vector<std::string>& command, const Environment& environment = {}, int port = 0,
      const std::vector<int>& absent = {});

  [[nodiscard]] int port() const { return port_; }
  Process& rank(int r) { return *ranks_.at(static_cast<size_t>(r)); }
  /// Starts one more process with the variables of rank `rank` of `world_size`.
  std::unique_ptr<Process> extra(int rank, int world_size);
  /// Waits for all started ranks, at most `limit` in all. Absent ranks have exit code -1.
  std::vector<Ended> wait(Milliseconds limit);
  /// The last 20 lines of each rank.
  [[nodiscard]] std::string tails() const;

 private:
  [[nodiscard]] Environment variables(int rank, int world_size) const;
  std::vector<std::string> command_;
  Environment environment_;
  int port_;
  std::vector<std::unique_ptr<Process>> ranks_;
};

/// Runs all ranks in plain environments to their end. When rank 0 reports the port in use (another program took it in
/// between), tries twice more with new ports.
std::vector<Ended> run_ranks(int world_size, const std::vector<std::string>& command, const Environment& environment,
                             Milliseconds limit);

/// pretrain_gpt and its options as an argument vector.
std::vector<std::string> program(const std::string& flags);
/// Runs gpt_tool, without GPUs, to its end.
Ended tool(const std::vector<std::string>& words, Milliseconds limit = Milliseconds{60'000});

/// True when mpirun is installed (Open MPI).
bool has_mpirun();
/// Runs all ranks under mpirun; the output of all ranks is in one text.
Ended run_mpirun(int world_size, const std::vector<std::string>& command, const Environment& environment,
                 Milliseconds limit);
/// Runs all ranks under torchrun of the Python whose torch is used. torchrun returns 1 when any worker fails.
Ended run_torchrun(int world_size, const std::vector<std::string>& command, const Environment& environment,
                   Milliseconds limit);

/// "rank 0 -> exit code 3" and the last 20 lines, for failure messages.
std::string describe(const std::vector<Ended>& ranks);
std::string describe(const Ended& ended);

}  // namespace pgpt::test

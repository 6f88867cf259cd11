#include "support/processes.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "support/text.h"

extern char** environ;

namespace pgpt::test {
namespace {

using Clock = std::chrono::steady_clock;

/// Variables by which a launcher would speak to a child of this test.
bool from_launcher(const std::string& entry) {
  static const char* const kNames[] = {"RANK=",
                                       "WORLD_SIZE=",
                                       "LOCAL_RANK=",
                                       "LOCAL_WORLD_SIZE=",
                                       "MASTER_ADDR=",
                                       "MASTER_PORT=",
                                       "OMP_NUM_THREADS=",
                                       "GROUP_",
                                       "ROLE_",
                                       "TORCHELASTIC_",
                                       "OMPI_",
                                       "PMIX_",
                                       "PMI_",
                                       "MPI_",
                                       "SLURM_"};
  return std::any_of(std::begin(kNames), std::end(kNames), [&](const char* name) { return entry.rfind(name, 0) == 0; });
}

std::vector<std::string> child_environment(const Environment& added) {
  std::vector<std::string> entries;
  for (char** e = environ; *e != nullptr; ++e) {
    const std::string entry = *e;
    if (!from_launcher(entry) && added.count(entry.substr(0, entry.find('='))) == 0) entries.push_back(entry);
  }
  if (added.count("OMP_NUM_THREADS") == 0) entries.emplace_back("OMP_NUM_THREADS=1");
  for (const auto& [name, value] : added) entries.push_back(name + "=" + value);
  return entries;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (auto& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const bool ok = fd >= 0 && ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
                  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  if (fd >= 0) ::close(fd);
  if (!ok) throw std::runtime_error("no free port on 127.0.0.1");
  return ntohs(address.sin_port);
}

Process::Process(const std::vector<std::string>& command, const Environment& environment) {
  const char* folder = std::getenv("TMPDIR");
  output_path_ = std::string(folder != nullptr ? folder : "/tmp") + "/pgpt_process_XXXXXX";
  const int out = ::mkostemp(output_path_.data(), O_CLOEXEC | O_APPEND);
  if (out < 0) throw std::runtime_error("cannot create " + output_path_);
  auto arguments = command;
  auto variables = child_environment(environment);
  auto argv = pointers(arguments);
  auto envp = pointers(variables);
  pid_ = ::fork();
  if (pid_ == 0) {
    ::setpgid(0, 0);
    const int null = ::open("/dev/null", O_RDONLY);
    ::dup2(null, STDIN_FILENO);
    ::dup2(out, STDOUT_FILENO);
    ::dup2(out, STDERR_FILENO);
    ::execvpe(argv[0], argv.data(), envp.data());
    ::_exit(127);
  }
  ::close(out);
  if (pid_ < 0) throw std::runtime_error(std::string("fork: ") + std::strerror(errno));
  ::setpgid(pid_, pid_);  // in both processes: whoever comes first
}

Process::~Process() {
  if (!status_) {
    ::kill(-pid_, SIGKILL);
    collect(true);
  } else {
    ::kill(-pid_, SIGKILL);  // grandchildren that it left behind
  }
  ::unlink(output_path_.c_str());
}

bool Process::collect(bool block) {
  if (status_) return true;
  int status = 0;
  pid_t got = 0;
  do {
    got = ::waitpid(pid_, &status, block ? 0 : WNOHANG);
  } while (got < 0 && errno == EINTR);
  if (got != pid_) return false;
  status_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return true;
}

bool Process::running() { return !collect(false); }

void Process::signal(int number) const {
  if (!status_) ::kill(pid_, number);
}

Ended Process::wait(Milliseconds limit) {
  Ended ended;
  const auto until = Clock::now() + limit;
  while (!collect(false) && Clock::now() < until) std::this_thread::sleep_for(Milliseconds(10));
  if (!status_) {
    ended.timed_out = true;
    ::kill(-pid_, SIGKILL);
    collect(true);
  }
  ended.exit_code = *status_;
  ended.output = output();
  return ended;
}

std::string Process::output() const { return read_text(output_path_); }

bool Process::wait_for_output(const std::string& text, Milliseconds limit) {
  const auto until = Clock::now() + limit;
  while (Clock::now() < until) {
    const bool over = !running();
    if (output().find(text) != std::string::npos) return true;
    if (over) return false;
    std::this_thread::sleep_for(Milliseconds(10));
  }
  return false;
}

std::string last_lines(const std::string& text, int lines) {
  size_t at = text.size();
  for (int i = 0; i <= lines && at != std::string::npos && at > 0; ++i) at = text.rfind('\n', at - 1);
  return at == std::string::npos || at == 0 ? text : text.substr(at + 1);
}

Job::Job(int world_size, const std::vector<std::string>& command, const Environment& environment, int port,
         const std::vector<int>& absent)
    : command_(command), environment_(environment), port_(port != 0 ? port : free_port()) {
  for (int r = 0; r < world_size; ++r) {
    const bool starts = std::find(absent.begin(), absent.end(), r) == absent.end();
    ranks_.push_back(starts ? std::make_unique<Process>(command_, variables(r, world_size)) : nullptr);
  }
}

Environment Job::variables(int rank, int world_size) const {
  Environment result{{"RANK", std::to_string(rank)},       {"WORLD_SIZE", std::to_string(world_size)},
                     {"LOCAL_RANK", std::to_string(rank)}, {"LOCAL_WORLD_SIZE", std::to_string(world_size)},
                     {"MASTER_ADDR", "127.0.0.1"},         {"MASTER_PORT", std::to_string(port_)}};
  for (const auto& [name, value] : environment_) result[name] = value;
  return result;
}

std::unique_ptr<Process> Job::extra(int rank, int world_size) {
  return std::make_unique<Process>(command_, variables(rank, world_size));
}

std::vector<Ended> Job::wait(Milliseconds limit) {
  const auto until = Clock::now() + limit;
  std::vector<Ended> all;
  for (const auto& process : ranks_) {
    all.emplace_back();
    if (!process) continue;
    all.back() =
        process->wait(std::max(Milliseconds(0), std::chrono::duration_cast<Milliseconds>(until - Clock::now())));
  }
  return all;
}

std::string Job::tails() const {
  std::ostringstream out;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r]) out << "--- rank " << r << "\n" << last_lines(ranks_[r]->output()) << "\n";
  }
  return out.str();
}

std::vector<Ended> run_ranks(int world_size, const std::vector<std::string>& command, const Environment& environment,
                             Milliseconds limit) {
  for (int attempt = 0;; ++attempt) {
    Job job(world_size, command, environment);
    auto all = job.wait(limit);
    const bool port_taken = all[0].exit_code == 3 && all[0].output.find("the port is in use") != std::string::npos;
    if (!port_taken || attempt == 2) return all;
  }
}

std::vector<std::string> program(const std::string& flags) {
  std::vector<std::string> command = split_words(flags);
  command.insert(command.begin(), PGPT_PROGRAM);
  return command;
}

Ended tool(const std::vector<std::string>& words, Milliseconds limit) {
  std::vector<std::string> command = {PGPT_TOOL};
  command.insert(command.end(), words.begin(), words.end());
  return Process(command, {{"CUDA_VISIBLE_DEVICES", ""}}).wait(limit);
}

bool has_mpirun() {
  static const bool found = std::system("mpirun --version > /dev/null 2>&1") == 0;
  return found;
}

Ended run_mpirun(int world_size, const std::vector<std::string>& command, const Environment& environment,
                 Milliseconds limit) {
  std::vector<std::string> full{"mpirun", "--allow-run-as-root", "--oversubscribe", "-n", std::to_string(world_size)};
  full.insert(full.end(), command.begin(), command.end());
  // Without ssh on the machine mpirun refuses to start even local ranks; any existing program satisfies it.
  Environment variables = environment;
  variables.try_emplace("OMPI_MCA_plm_rsh_agent", "/bin/sh");
  return Process(full, variables).wait(limit);
}

Ended run_torchrun(int world_size, const std::vector<std::string>& command, const Environment& environment,
                   Milliseconds limit) {
  std::vector<std::string> full{PGPT_PYTHON,     "-m",        "torch.distributed.run", "--no-python",
                                "--nnodes",      "1",         "--nproc-per-node",      std::to_string(world_size),
                                "--master-addr", "127.0.0.1", "--master-port",         std::to_string(free_port())};
  full.insert(full.end(), command.begin(), command.end());
  return Process(full, environment).wait(limit);
}

std::string describe(const Ended& ended) {
  return "exit code " + std::to_string(ended.exit_code) + (ended.timed_out ? " (killed at the limit)" : "") + "\n" +
         last_lines(ended.output) + "\n";
}

std::string describe(const std::vector<Ended>& ranks) {
  std::string text;
  for (size_t r = 0; r < ranks.size(); ++r) text += "--- rank " + std::to_string(r) + ": " + describe(ranks[r]);
  return text;
}

}  // namespace pgpt::test

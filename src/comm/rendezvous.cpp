#include "rendezvous.h"

#include <arpa/inet.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "pgpt/base/error.h"

namespace pgpt::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr char kSeparator = '\x1f';
constexpr milliseconds kNameGrace{10'000};  // a host name may appear late, e.g. of a pod that is still starting

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream in(text);
  for (std::string part; std::getline(in, part, kSeparator);) parts.push_back(part);
  return parts;
}

template <class... Fields>
std::string join_fields(const Fields&... fields) {
  std::ostringstream out;
  ((out << fields << kSeparator), ...);
  return out.str();
}

std::string encode(const PeerIdentity& peer) {
  return join_fields(peer.host, peer.pid, peer.start_time, peer.local_rank);
}

PeerIdentity decode_peer(const std::string& text) {
  const auto parts = split(text);
  PGPT_CHECK(CommError, parts.size() >= 4, "the store holds a malformed process identity: ", text);
  return {parts[0], std::stoi(parts[1]), std::stoull(parts[2]), std::stoi(parts[3])};
}

std::string name_process(const PeerIdentity& peer) { return concat("process ", peer.pid, " on ", peer.host); }

/// How far the joining got; read by the waiting thread for its message.
enum class Stage { kResolving, kConnecting, kTalking, kHandshake, kArriving };

struct Progress {
  std::atomic<Stage> stage{Stage::kResolving};
  std::atomic<bool> abandoned{false};
};

const char* host_of_store(const LaunchEnvironment& env) { return env.store_from_agent ? "torchrun's agent" : "rank 0"; }

class Joiner {
 public:
  Joiner(const LaunchEnvironment& env, milliseconds timeout, std::shared_ptr<Progress> progress)
      : env_(env), timeout_(timeout), deadline_(Clock::now() + timeout), progress_(std::move(progress)) {
    result_.address = concat(env.master_address, ":", env.master_port);
    result_.hosts_store = env.rank == 0 && !env.store_from_agent;
    result_.store_owner = env.store_from_agent ? concat("the store of torchrun's agent at ", result_.address)
                                               : concat("rank 0, which hosts the store at ", result_.address, ",");
  }

  Rendezvous run() {
    if (result_.hosts_store) {
      open_server();
      arrive();
      return result_;
    }
    // A server of an earlier job on this port may just be closing: lost connections are tried again until the deadline.
    std::string last_error;
    while (!late()) {
      try {
        connect();
        arrive();
        return result_;
      } catch (const Error&) {
        throw;
      } catch (const std::exception& error) {
        last_error = brief(error);
        progress_->stage = Stage::kConnecting;
        pause(milliseconds(100));
      }
    }
    throw CommError(concat("rank ", env_.rank, " could not join the job at ", result_.address, " within ",
                           seconds_text(timeout_), ": ", last_error));
  }

 private:
  [[nodiscard]] bool late() const { return Clock::now() >= deadline_ || progress_->abandoned; }
  [[nodiscard]] milliseconds remaining() const {
    return std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now()));
  }
  static void pause(milliseconds time) { std::this_thread::sleep_for(time); }

  c10d::TCPStoreOptions store_options(bool server) const {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(env_.master_port);
    options.isServer = server;
    options.waitWorkers = false;
    options.timeout = remaining();
    return options;
  }

  void use(StorePtr owner, StorePtr second) {
    const std::string prefix = env_.store_from_agent ? "/pretrain_gpt/" + env_.job_id : "/pretrain_gpt";
    result_.owner = owner;
    result_.worker_store = c10::make_intrusive<c10d::PrefixStore>(prefix, owner);
    result_.main_store = c10::make_intrusive<c10d::PrefixStore>(prefix, second);
  }

  void open_server() {
    progress_->stage = Stage::kTalking;
    try {
      auto server = c10::make_intrusive<c10d::TCPStore>(env_.master_address, store_options(true));
      use(server, c10::make_intrusive<c10d::TCPStore>(env_.master_address, store_options(false)));
    } catch (const std::exception& error) {
      const std::string text = error.what();
      PGPT_CHECK(CommError, text.find("EADDRINUSE") == std::string::npos, "rank 0 cannot listen on ", result_.address,
                 " (MASTER_PORT=", env_.master_port,
                 "): the port is in use by another program or another job's rank 0; choose another MASTER_PORT");
      throw CommError(concat("rank 0 cannot host the store at ", result_.address, ": ", brief(error),
                             " (MASTER_ADDR must name the host that rank 0 runs on)"));
    }
  }

  void connect() {
    const sockaddr_list addresses = resolve();
    progress_->stage = Stage::kConnecting;
    while (!reachable(addresses)) {
      if (late()) {
        throw CommError(concat("rank ", env_.rank, " could not connect to ", result_.address,
                               " (MASTER_ADDR, MASTER_PORT) within ", seconds_text(timeout_), ": ", host_of_store(env_),
                               " has not started there, or the network does not let it through"));
      }
      pause(milliseconds(50));
    }
    progress_->stage = Stage::kTalking;
    try {
      auto first = c10::make_intrusive<c10d::TCPStore>(env_.master_address, store_options(false));
      use(first, c10::make_intrusive<c10d::TCPStore>(env_.master_address, store_options(false)));
    } catch (const std::exception& error) {
      throw std::runtime_error(concat(
          "what listens there does not answer as a job's store (another program on MASTER_PORT?): ", brief(error)));
    }
  }

  using sockaddr_list = std::shared_ptr<addrinfo>;

  sockaddr_list resolve() {
    progress_->stage = Stage::kResolving;
    const auto give_up = std::min(deadline_, Clock::now() + kNameGrace);
    while (true) {
      addrinfo hints{};
      hints.ai_socktype = SOCK_STREAM;
      addrinfo* found = nullptr;
      const int status =
          ::getaddrinfo(env_.master_address.c_str(), std::to_string(env_.master_port).c_str(), &hints, &found);
      if (status == 0) return {found, ::freeaddrinfo};
      PGPT_CHECK(CommError, Clock::now() < give_up, "environment variable MASTER_ADDR=", env_.master_address,
                 " cannot be resolved to an address: ", ::gai_strerror(status));
      pause(milliseconds(200));
    }
  }

  /// One connection attempt of at most a second.
  [[nodiscard]] bool reachable(const sockaddr_list& addresses) const {
    for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
      const int fd = ::socket(a->ai_family, a->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, a->ai_protocol);
      if (fd < 0) continue;
      bool connected = ::connect(fd, a->ai_addr, a->ai_addrlen) == 0;
      if (!connected && errno == EINPROGRESS) {
        pollfd waiting{fd, POLLOUT, 0};
        const auto limit = std::min(remaining(), milliseconds(1000));
        int failure = 0;
        socklen_t length = sizeof failure;
        connected = ::poll(&waiting, 1, static_cast<int>(limit.count())) == 1 &&
                    ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &failure, &length) == 0 && failure == 0;
      }
      ::close(fd);
      if (connected) return true;
    }
    return false;
  }

  void arrive() {
    progress_->stage = Stage::kHandshake;
    auto& store = *result_.worker_store;
    shake_hands(store);
    claim_rank(store);
    progress_->stage = Stage::kArriving;
    wait_for_all(store);
    for (int r = 0; r < env_.world_size; ++r) result_.peers.push_back(decode_peer(store.get_to_str(who_key(r))));
  }

  static std::string who_key(int rank) { return "who/" + std::to_string(rank); }

  /// Ranks of different jobs on one port find out here.
  void shake_hands(c10d::Store& store) {
    const std::string key = "job";
    if (env_.rank == 0) {
      store.set(key, join_fields(env_.world_size, env_.job_id, "end"));
      return;
    }
    while (!store.check({key})) {
      if (late()) throw missing(store);
      pause(milliseconds(20));
    }
    const auto parts = split(store.get_to_str(key));
    PGPT_CHECK(CommError, parts.size() == 3, "the store at ", result_.address,
               " does not belong to this program; choose another MASTER_PORT");
    check_not_ending(store);
    const bool same_job = parts[1] == env_.job_id;
    if (parts[0] != std::to_string(env_.world_size)) {
      const std::string text =
          concat("the job at ", result_.address, " has ", parts[0], " ranks, but rank ", env_.rank, " (",
                 name_process(own_identity(env_.local_rank)), ") was started with WORLD_SIZE=", env_.world_size,
                 ": give all ranks one WORLD_SIZE, and each job its own MASTER_PORT");
      if (same_job) fail_while_joining(store, text);
      throw CommError(text);
    }
    PGPT_CHECK(CommError, same_job, "the store at ", result_.address, " belongs to job '", parts[1],
               "', this rank to job '", env_.job_id, "': give each job its own MASTER_PORT");
  }

  void claim_rank(c10d::Store& store) {
    const PeerIdentity self = own_identity(env_.local_rank);
    if (store.add("claim/" + std::to_string(env_.rank), 1) == 1) {
      store.set(who_key(env_.rank), encode(self));
      return;
    }
    check_not_ending(store);
    std::string other = "another process";
    for (int i = 0; i < 10 && other == "another process"; ++i) {
      if (store.check({who_key(env_.rank)})) {
        other = name_process(decode_peer(store.get_to_str(who_key(env_.rank))));
      } else {
        pause(milliseconds(50));
      }
    }
    const std::string text =
        concat("rank ", env_.rank, " exists twice at ", result_.address, ": ", other, " and ", name_process(self),
               "; every process needs its own RANK, and every job its own MASTER_PORT");
    fail_while_joining(store, text);
    throw CommError(text);
  }

  void wait_for_all(c10d::Store& store) {
    std::vector<std::string> all;
    for (int r = 0; r < env_.world_size; ++r) all.push_back(who_key(r));
    const auto interval = milliseconds(env_.world_size > 64 ? 200 : 20);
    while (!store.check({"ready"})) {
      if (env_.rank == 0 && store.check(all)) {
        store.set("ready", "1");
        return;
      }
      if (const auto failure = read_failure(store)) {
        acknowledge(store);
        throw CommError(failure->text);
      }
      if (late()) throw missing(store);
      pause(interval);
    }
  }

  /// Names the ranks that have not come, to this process and to all others.
  CommError missing(c10d::Store& store) {
    std::vector<int> absent;
    for (int r = 0; r < env_.world_size; ++r) {
      if (r != env_.rank && !store.check({who_key(r)})) absent.push_back(r);
    }
    std::ostringstream names;
    for (size_t i = 0; i < absent.size() && i < 16; ++i) names << (i == 0 ? "" : ", ") << absent[i];
    if (absent.size() > 16) names << " and " << absent.size() - 16 << " more";
    const std::string text = concat(absent.size() == 1 ? "rank " : "ranks ", names.str(), " of ", env_.world_size,
                                    absent.size() == 1 ? " has" : " have", " not arrived at ", result_.address,
                                    " within ", seconds_text(timeout_), " of rank ", env_.rank, "'s start");
    fail_while_joining(store, text);
    return CommError(text);
  }

  /// Ends the others too, unless the job already runs (then this process is a stranger to it).
  void fail_while_joining(c10d::Store& store, const std::string& text) {
    if (store.check({"ready"})) return;
    publish_failure(store, {Failure::Kind::kFailed, env_.rank, 3, text});
    acknowledge(store);
  }

  void acknowledge(c10d::Store& store) {
    store.add(kFailureAcksKey, 1);
    if (!result_.hosts_store) return;
    // The store ends with this process: let the ranks that are here read the reason first.
    const auto until = Clock::now() + milliseconds(1000);
    while (Clock::now() < until) {
      int arrived = 0;
      for (int r = 0; r < env_.world_size; ++r) arrived += store.check({who_key(r)}) ? 1 : 0;
      if (store.add(kFailureAcksKey, 0) >= arrived) return;
      pause(milliseconds(20));
    }
  }

  /// The previous job on this port has ended and its store is about to close: not a mistake, just early.
  void check_not_ending(c10d::Store& store) const {
    if (store.add(kLeavingKey, 0) > 0)
      throw std::runtime_error("the store at " + result_.address + " belongs to a job that is ending");
  }

  const LaunchEnvironment env_;
  const milliseconds timeout_;
  const Clock::time_point deadline_;
  const std::shared_ptr<Progress> progress_;
  Rendezvous result_;
};

std::string stuck_message(const LaunchEnvironment& env, Stage stage, milliseconds timeout) {
  const std::string where = concat(env.master_address, ":", env.master_port);
  const std::string time = seconds_text(timeout);
  switch (stage) {
    case Stage::kResolving:
      return concat("environment variable MASTER_ADDR=", env.master_address, " was not resolved to an address within ",
                    time);
    case Stage::kConnecting:
      return concat("rank ", env.rank, " could not connect to ", where, " (MASTER_ADDR, MASTER_PORT) within ", time);
    case Stage::kTalking:
      if (env.rank == 0 && !env.store_from_agent) {
        return concat("rank 0 listens on port ", env.master_port, " but cannot reach itself as ", where, " within ",
                      time, ": MASTER_ADDR must name the host that rank 0 runs on");
      }
      return concat("the program at ", where, " takes connections but does not answer as a job's store within ", time,
                    ": another program holds MASTER_PORT, or ", host_of_store(env), " is stopped");
    case Stage::kHandshake:
    case Stage::kArriving:
      break;
  }
  return concat("the store at ", where, " stopped answering while rank ", env.rank, " joined (", time,
                "): ", host_of_store(env), " is stopped or lost");
}

}  // namespace

std::string seconds_text(milliseconds time) {
  std::ostringstream out;
  out << static_cast<double>(time.count()) / 1000.0 << " s";
  return out.str();
}

std::string brief(const std::exception& error) {
  std::string text = error.what();
  if (const auto* torch_error = dynamic_cast<const c10::Error*>(&error)) text = torch_error->what_without_backtrace();
  return text.substr(0, text.find('\n'));
}

std::optional<uint64_t> process_start_time(int pid) {
  std::ifstream in(concat("/proc/", pid, "/stat"));
  std::string text;
  if (!std::getline(in, text)) return std::nullopt;
  // The command name stands in parentheses and may hold anything; 20 fields after it comes the start time.
  std::istringstream fields(text.substr(std::min(text.size(), text.rfind(')') + 1)));
  std::string state;
  std::string skipped;
  uint64_t start = 0;
  fields >> state;
  for (int i = 0; i < 18; ++i) fields >> skipped;
  if (!(fields >> start) || state == "Z" || state == "X") return std::nullopt;
  return start;
}

PeerIdentity own_identity(int local_rank) {
  char host[256] = "unknown";
  ::gethostname(host, sizeof host - 1);
  const int pid = static_cast<int>(::getpid());
  return {host, pid, process_start_time(pid).value_or(0), local_rank};
}

Failure publish_failure(c10d::Store& store, const Failure& failure) {
  store.compareSet(kFailureKey, "",
                   join_fields(static_cast<int>(failure.kind), failure.rank, failure.exit_code, failure.text, "end"));
  return read_failure(store).value_or(failure);
}

std::optional<Failure> read_failure(c10d::Store& store) {
  if (!store.check({kFailureKey})) return std::nullopt;
  const auto parts = split(store.get_to_str(kFailureKey));
  PGPT_CHECK(CommError, parts.size() == 5, "the store holds a malformed failure report");
  return Failure{static_cast<Failure::Kind>(std::stoi(parts[0])), std::stoi(parts[1]), std::stoi(parts[2]), parts[3]};
}

Rendezvous join(StoreWorker& worker, const LaunchEnvironment& env, milliseconds timeout) {
  auto progress = std::make_shared<Progress>();
  auto joiner = std::make_shared<Joiner>(env, timeout, progress);
  auto result = std::make_shared<Rendezvous>();
  auto done = worker.submit([joiner, result] { *result = joiner->run(); });
  // The worker gives up by itself at the deadline and takes up to a second more to tell the others.
  if (done.wait_for(timeout + milliseconds(1500)) != std::future_status::ready) {
    progress->abandoned = true;
    throw CommError(stuck_message(env, progress->stage, timeout));
  }
  try {
    done.get();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw CommError(concat("rank ", env.rank, " lost the store at ", env.master_address, ":", env.master_port,
                           " while joining: ", brief(error)));
  }
  return std::move(*result);
}

}  // namespace pgpt::comm

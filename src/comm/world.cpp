#include "pgpt/comm/world.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend.h"
#include "pgpt/base/error.h"
#include "pgpt/base/log.h"
#include "rendezvous.h"
#include "watchdog.h"

C10_DECLARE_int(caffe2_log_level);

namespace pgpt::comm {
namespace {

using std::chrono::milliseconds;

/// gloo's own limit where the watchdog owns the deadline: never reached.
constexpr milliseconds kNever = std::chrono::hours(24 * 7);

std::string address_of(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address->sa_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text, sizeof text);
  } else if (address->sa_family == AF_INET6) {
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, text, sizeof text);
  }
  return text;
}

bool is_loopback(const std::string& address) {
  return address.empty() || address == "::1" || address.rfind("127.", 0) == 0;
}

/// The address of the interface that leads to `host`; connecting a datagram socket sends nothing.
std::string address_towards(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return "";
  std::string result;
  for (const addrinfo* a = found; a != nullptr && result.empty(); a = a->ai_next) {
    const int fd = ::socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    if (::connect(fd, a->ai_addr, a->ai_addrlen) == 0 &&
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0) {
      result = address_of(reinterpret_cast<const sockaddr*>(&own));
    }
    ::close(fd);
  }
  ::freeaddrinfo(found);
  return result;
}

/// An address of the interface `name`, or of the first one that is up and not the loopback when `name` is empty.
std::string address_of_interface(const std::string& name) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return "";
  std::string result;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* i = list; i != nullptr && result.empty(); i = i->ifa_next) {
      if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != family) continue;
      if (name.empty() ? (i->ifa_flags & IFF_UP) != 0 && (i->ifa_flags & IFF_LOOPBACK) == 0 : name == i->ifa_name) {
        result = address_of(i->ifa_addr);
      }
    }
  }
  ::freeifaddrs(list);
  return result;
}

/// Where this process listens for gloo: the loopback for jobs on one host, so that odd container host names do not
/// matter.
std::string gloo_address(const LaunchEnvironment& env, const std::vector<PeerIdentity>& peers) {
  if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME"); interface != nullptr && *interface != '\0') {
    const std::string address = address_of_interface(interface);
    PGPT_CHECK(ConfigError, !address.empty(), "environment variable GLOO_SOCKET_IFNAME=", interface,
               " names no network interface with an address");
    return address;
  }
  if (env.local_world_size == env.world_size) return "127.0.0.1";
  const auto& self = peers[static_cast<size_t>(env.rank)];
  const bool one_host =
      std::all_of(peers.begin(), peers.end(), [&](const PeerIdentity& p) { return p.host == self.host; });
  const std::string towards = address_towards(env.master_address, env.master_port);
  if (!is_loopback(towards)) return towards;
  if (one_host) return "127.0.0.1";
  const std::string other = address_of_interface("");
  PGPT_CHECK(CommError, !other.empty(), "no network interface leads to the other nodes; set GLOO_SOCKET_IFNAME");
  return other;
}

GroupPtr make_record(int id, const std::string& name, const std::vector<int>& ranks, int self, int world_size) {
  auto record = std::make_shared<GroupRecord>();
  record->id = id;
  record->name = name;
  record->ranks = ranks;
  record->rank = -1;
  for (size_t i = 0; i < ranks.size(); ++i) {
    PGPT_ASSERT(ranks[i] >= 0 && ranks[i] < world_size, "group ", name, " names rank ", ranks[i], " of ", world_size);
    PGPT_ASSERT(std::count(ranks.begin(), ranks.end(), ranks[i]) == 1, "group ", name, " names rank ", ranks[i],
                " twice");
    if (ranks[i] == self) record->rank = static_cast<int>(i);
  }
  PGPT_ASSERT(record->rank >= 0, "group ", name, " does not hold the calling rank ", self);
  return record;
}

void check_transport(const GroupOptions& options, BackendKind backend) {
  PGPT_CHECK(ConfigError, options.transport != Transport::kCopyEngine || backend == BackendKind::kNccl,
             "--gtp-transport copy-engine needs --distributed-backend nccl, found gloo; use --gtp-transport nccl");
}

std::string share_through(c10d::Store& store, int rank, const std::string& key, const std::string& text) {
  if (rank == 0) store.set("shared/" + key, std::vector<std::uint8_t>(text.begin(), text.end()));
  const std::vector<std::uint8_t> first = store.get("shared/" + key);
  return {first.begin(), first.end()};
}

/// Groups of one call with different members never meet: their first ranks differ.
std::string group_prefix(const GroupRecord& record) { return concat("group/", record.id, "/", record.ranks.front()); }

/// Libtorch's socket code logs every retry; errors come back as exceptions anyway.
void quiet_libtorch() {
  if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) FLAGS_caffe2_log_level = 3;
}

class ProcessWorld final : public World {
 public:
  ProcessWorld(const LaunchEnvironment& env, const WorldOptions& options) : env_(env), options_(options) {
    log::set_rank(env.rank, env.world_size);
    quiet_libtorch();
    Watchdog::Setup setup{env.rank, env.world_size, options.timeout, nullptr, {}};
    if (env.world_size > 1) {
      setup.worker = std::make_shared<StoreWorker>();
      rendezvous_ = join(*setup.worker, env, options.rendezvous_timeout);
      setup.rendezvous = rendezvous_;
      rendezvous_.worker_store = nullptr;
    }
    watchdog_ = std::make_unique<Watchdog>(std::move(setup));
    if (env.world_size == 1) return;
    try {
      check_peers();
      if (options.backend == BackendKind::kNccl) {
        silence_torch_nccl_watchdog();
      } else {
        device_.emplace(gloo_address(env, rendezvous_.peers));
      }
    } catch (const Error& error) {
      watchdog_->announce(error.what());
      abandon();
      throw;
    } catch (const std::exception& error) {
      watchdog_->announce(brief(error));
      abandon();
      throw CommError(brief(error));
    }
  }

  ~ProcessWorld() override {
    if (!closed_) abandon();
  }

  [[nodiscard]] int rank() const override { return env_.rank; }
  [[nodiscard]] int size() const override { return env_.world_size; }

  std::unique_ptr<Communicator> create_group(const std::string& name, const std::vector<int>& ranks,
                                             const GroupOptions& options) override {
    PGPT_ASSERT(!closed_, "create_group after shutdown");
    auto record = make_record(next_group_++, name, ranks, env_.rank, env_.world_size);
    if (ranks.size() == 1) return make_single_communicator(std::move(record));
    check_transport(options, options_.backend);
    rendezvous_.main_store->setTimeout(kNever);
    GroupSetup setup{
        record,          c10::make_intrusive<c10d::PrefixStore>(group_prefix(*record), rendezvous_.main_store),
        watchdog_.get(), kNever,
        kNever,          options.high_priority};
    if (options_.backend == BackendKind::kNccl) {
      groups_.push_back(open_nccl_group(setup));
      if (options.transport != Transport::kCollective) {
        return make_copy_engine_communicator(setup, groups_.back(), options.transport == Transport::kAutomatic);
      }
      return make_nccl_communicator(groups_.back(), options.high_priority);
    }
    groups_.push_back(open_gloo_group(setup, *device_));
    return options_.tensors_on_gpu ? make_staged_communicator(groups_.back()) : make_gloo_communicator(groups_.back());
  }

  std::string share(const std::string& key, const std::string& text) override {
    if (env_.world_size == 1) return text;
    const Watchdog::Section section(watchdog_.get(), nullptr, "start of the job", 0);
    rendezvous_.main_store->setTimeout(kNever);
    return share_through(*rendezvous_.main_store, env_.rank, key, text);
  }

  void set_timeout(milliseconds timeout) override { watchdog_->set_timeout(timeout); }
  void set_activity(const std::string& activity) override { watchdog_->set_activity(activity); }
  void set_slow(milliseconds allowance) override { watchdog_->set_slow(allowance); }
  void announce_failure(const std::string& reason) noexcept override { watchdog_->announce(reason); }
  void end_on_signals() override { watchdog_->end_on_signals(); }

  void shutdown() override {
    if (closed_) return;
    if (env_.world_size > 1) {
      try {
        leave_together();
      } catch (const Error&) {
        throw;
      } catch (const std::exception& error) {
        GroupRecord all;
        all.name = "world";
        for (int r = 0; r < env_.world_size; ++r) all.ranks.push_back(r);
        throw CommError(watchdog_->explain(all, "shutdown", 1, brief(error)).text);
      }
    }
    closed_ = true;
    watchdog_.reset();
    rendezvous_ = {};
  }

 private:
  void check_peers() const {
    if (options_.backend != BackendKind::kNccl) return;
    const auto& self = rendezvous_.peers[static_cast<size_t>(env_.rank)];
    for (int r = 0; r < env_.world_size; ++r) {
      const auto& peer = rendezvous_.peers[static_cast<size_t>(r)];
      PGPT_CHECK(ConfigError, r == env_.rank || peer.host != self.host || peer.local_rank != self.local_rank, "ranks ",
                 std::min(r, env_.rank), " and ", std::max(r, env_.rank), " on ", self.host,
                 " both have LOCAL_RANK=", self.local_rank,
                 ": with --distributed-backend nccl each needs a GPU of its own");
    }
  }

  void leave_together() {
    auto& store = *rendezvous_.main_store;
    {
      const Watchdog::Section section(watchdog_.get(), nullptr, "shutdown", 0);
      if (options_.backend == BackendKind::kNccl || options_.tensors_on_gpu) synchronize_device();
      store.add(kLeavingKey, 1);
      while (store.add(kLeavingKey, 0) < env_.world_size) std::this_thread::sleep_for(milliseconds(5));
      watchdog_->begin_closing();
      for (const auto& group : groups_) {
        if (group->resource) group->resource->close();
        group->backend->shutdown();
        group->backend.reset();
      }
      groups_.clear();
      device_.reset();
      store.add("gone", 1);
    }
    if (!rendezvous_.hosts_store) return;
    // The store ends with this process; a rank that died between the two counts must not hold it up.
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (store.add("gone", 0) < env_.world_size && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(milliseconds(2));
    }
  }

  /// Not an orderly end: other ranks may be stuck in these groups and closing could wait for them, so nothing is
  /// closed.
  void abandon() noexcept {
    for (auto& group : groups_) (void)group->backend.release();
    groups_.clear();
    if (device_) (void)new GlooDevice(*device_);
    device_.reset();
  }

  LaunchEnvironment env_;
  WorldOptions options_;
  Rendezvous rendezvous_;
  std::unique_ptr<Watchdog> watchdog_;
  std::optional<GlooDevice> device_;
  std::vector<BackendGroupPtr> groups_;
  int next_group_ = 0;
  bool closed_ = false;
};

/// One of several ranks inside one process.
class ThreadWorld final : public World {
 public:
  ThreadWorld(int rank, int size, c10::intrusive_ptr<c10d::Store> store, GlooDevice device, milliseconds timeout)
      : rank_(rank), size_(size), store_(std::move(store)), device_(std::move(device)), timeout_(timeout) {}

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }

  std::unique_ptr<Communicator> create_group(const std::string& name, const std::vector<int>& ranks,
                                             const GroupOptions& options) override {
    auto record = make_record(next_group_++, name, ranks, rank_, size_);
    if (ranks.size() == 1) return make_single_communicator(std::move(record));
    check_transport(options, BackendKind::kGloo);
    GroupSetup setup{record,   c10::make_intrusive<c10d::PrefixStore>(group_prefix(*record), store_),
                     nullptr,  timeout_,
                     timeout_, false};
    groups_.push_back(open_gloo_group(setup, device_));
    return make_gloo_communicator(groups_.back());
  }

  std::string share(const std::string& key, const std::string& text) override {
    return share_through(*store_, rank_, key, text);
  }

  void set_timeout(milliseconds timeout) override {
    timeout_ = timeout;
    for (const auto& group : groups_) group->timeout = timeout;
  }
  void set_activity(const std::string& /*activity*/) override {}
  void set_slow(milliseconds /*allowance*/) override {}
  /// Other threads fail once this world is destroyed, which closes its connections, or at their timeout.
  void announce_failure(const std::string& /*reason*/) noexcept override {}
  void end_on_signals() override {}

  void shutdown() override {
    store_->add("leaving", 1);
    const auto until = std::chrono::steady_clock::now() + timeout_;
    while (store_->add("leaving", 0) < size_) {
      PGPT_CHECK(CommError, std::chrono::steady_clock::now() < until, "rank ", rank_, " waited ",
                 seconds_text(timeout_), " for the other threads to shut down");
      std::this_thread::sleep_for(milliseconds(1));
    }
    for (const auto& group : groups_) group->backend.reset();
    groups_.clear();
  }

 private:
  int rank_;
  int size_;
  c10::intrusive_ptr<c10d::Store> store_;
  GlooDevice device_;
  milliseconds timeout_;
  std::vector<BackendGroupPtr> groups_;
  int next_group_ = 0;
};

}  // namespace

void check_device_assignment(const LaunchEnvironment& env, BackendKind backend, int gpus) {
  if (backend != BackendKind::kNccl) return;
#ifndef PGPT_WITH_CUDA
  throw ConfigError(
      "--distributed-backend nccl: this build has no CUDA (PGPT_CUDA=OFF); use --distributed-backend gloo or build "
      "with CUDA");
#endif
  PGPT_CHECK(ConfigError, gpus > 0, "--distributed-backend nccl: no GPU is visible; use --distributed-backend gloo");
  const int needed = std::max(env.local_world_size, env.local_rank + 1);
  PGPT_CHECK(ConfigError, needed <= gpus, "--distributed-backend nccl: ", needed, " ranks on this node but ", gpus,
             gpus == 1 ? " GPU is" : " GPUs are",
             " visible, and each rank needs its own; start fewer ranks or use --distributed-backend gloo");
}

namespace {

/// torch keeps a process-wide record of recent collectives. It is not safe for ranks that are threads, and our watchdog
/// names the operation.
void silence_flight_recorder() {
  for (const char* name : {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}) ::setenv(name, "0", 1);
}

}  // namespace

std::unique_ptr<World> World::connect(const LaunchEnvironment& env, const WorldOptions& options) {
  silence_flight_recorder();
  // A peer that is gone must be an error with a name, not a signal that ends this process without a word.
  std::signal(SIGPIPE, SIG_IGN);
  return std::make_unique<ProcessWorld>(env, options);
}

std::vector<std::unique_ptr<World>> World::connect_threads(int size, milliseconds timeout) {
  silence_flight_recorder();
  PGPT_ASSERT(size >= 1, "a world of ", size, " ranks");
  quiet_libtorch();
  auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(timeout);
  const GlooDevice device("127.0.0.1");
  std::vector<std::unique_ptr<World>> worlds;
  for (int rank = 0; rank < size; ++rank)
    worlds.push_back(std::make_unique<ThreadWorld>(rank, size, store, device, timeout));
  return worlds;
}

}  // namespace pgpt::comm

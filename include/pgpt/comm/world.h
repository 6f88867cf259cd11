#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pgpt/comm/communicator.h"
#include "pgpt/comm/launch.h"

namespace pgpt::comm {

enum class BackendKind { kNccl, kGloo };
/// How a group moves shared tensors: through its backend's collectives, by copies straight out of the peers' memory, or
/// by copies where they can work and collectives elsewhere.
enum class Transport { kCollective, kCopyEngine, kAutomatic };

/// What one group is to be.
struct GroupOptions {
  bool high_priority = false;  ///< of the stream that an NCCL group runs on
  Transport transport = Transport::kCollective;
};

/// How the processes of one job find each other and how long they wait.
struct WorldOptions {
  BackendKind backend = BackendKind::kGloo;
  bool tensors_on_gpu = false;  ///< with kGloo: CUDA tensors are staged through host memory
  std::chrono::milliseconds rendezvous_timeout{60'000};
  std::chrono::milliseconds timeout{600'000};  ///< deadline of one collective until `set_timeout`
};

/// Number of CUDA devices that this process sees; 0 in a build without CUDA.
[[nodiscard]] int visible_gpus();

/// Throws ConfigError, pointing to `--distributed-backend gloo`, when NCCL is asked for and this node has more ranks
/// than visible GPUs.
void check_device_assignment(const LaunchEnvironment& env, BackendKind backend, int gpus);

/// One process's membership in the job: the store, every communicator, and the watchdog that owns all deadlines.
///
/// The watchdog ends the process by itself, with one line on stderr and exit code 3, when a collective passes its
/// deadline, another rank fails or dies, or the store is lost. After an exception from any call here (or anywhere in
/// the program while other ranks live): call `announce_failure`, flush, and leave with `_exit` - never destroy a world
/// that was not shut down and return from main.
class World {
 public:
  /// Joins the job (blocking, all ranks). Throws CommError naming address, port and the missing ranks when it fails in
  /// time.
  static std::unique_ptr<World> connect(const LaunchEnvironment& env, const WorldOptions& options);
  /// `size` worlds inside one process, for tests that run ranks as threads; gloo over an in-memory store, no watchdog:
  /// a collective that a rank does not join fails after `timeout`. Each world is used by one thread.
  static std::vector<std::unique_ptr<World>> connect_threads(
      int size, std::chrono::milliseconds timeout = std::chrono::seconds(60));
  virtual ~World() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  /// Creates the group holding the calling rank. Every rank of the world calls it in the same order, each with the
  /// member list of its own group (lists of different ranks are equal or disjoint). Groups of one rank open no
  /// connection. Each NCCL group has a stream of its own. The world keeps the connection until `shutdown`;
  /// communicators are useless afterwards.
  ///
  /// Transport::kCopyEngine needs NCCL and all members on one node, each on a GPU of its own that can read the others'
  /// memory: else every member throws ConfigError, which says what was found. With Transport::kAutomatic its
  /// first rank prints that instead, once for all groups.
  virtual std::unique_ptr<Communicator> create_group(const std::string& name, const std::vector<int>& ranks,
                                                     const GroupOptions& options = {}) = 0;
  /// From now on collectives use this deadline (`--distributed-timeout-seconds-after-init`).
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  /// Tells the watchdog what this rank is doing, for the message that other ranks print, e.g. "training step 12".
  virtual void set_activity(const std::string& activity) = 0;
  /// This rank may now be away from collectives for long (index build, checkpoint save): as long as its heartbeat goes
  /// on, other ranks wait for it this much beyond their deadline. Zero ends it.
  virtual void set_slow(std::chrono::milliseconds allowance) = 0;
  /// Publishes to every rank that this one fails, and why, so that all stop at once; best effort, never throws, at most
  /// 2 s.
  virtual void announce_failure(const std::string& reason) noexcept = 0;
  /// From now on the first SIGINT or SIGTERM ends all ranks: one line each, exit code 128 + signal (130 for Ctrl-C). A
  /// second one, at least 0.3 s later, ends this process at once.
  virtual void end_on_signals() = 0;
  /// Orderly end: waits for outstanding work and for all ranks, then closes all groups in creation order, then the
  /// store.
  virtual void shutdown() = 0;
  /// Rank 0's text, on every rank. Every rank calls it with the same key, once. It needs no group.
  virtual std::string share(const std::string& key, const std::string& text) = 0;
};

}  // namespace pgpt::comm

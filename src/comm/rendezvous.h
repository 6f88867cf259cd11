#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "pgpt/comm/launch.h"
#include "store_worker.h"

namespace pgpt::comm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// What a rank tells about its process.
struct PeerIdentity {
  std::string host;
  int pid = 0;
  uint64_t start_time = 0;  ///< clock ticks since boot, tells a reused process id apart
  int local_rank = 0;
};

/// The joined job: two connections to its store and everybody's identity.
struct Rendezvous {
  StorePtr owner;         ///< holds the server on the rank that hosts it; destroyed last
  StorePtr worker_store;  ///< used by the store worker only
  StorePtr main_store;    ///< used by the main thread only
  std::vector<PeerIdentity> peers;
  std::string address;      ///< "host:port", for messages
  std::string store_owner;  ///< "rank 0, which hosts the store at ..." or "the store of torchrun's agent at ..."
  bool hosts_store = false;
};

// Keys in the store.
inline constexpr const char* kFailureKey = "failure";
inline constexpr const char* kFailureAcksKey = "failure_acks";
inline constexpr const char* kLeavingKey = "leaving";

/// Why the job ends, as published in the store; the first writer wins.
struct Failure {
  enum class Kind { kFailed, kLost, kSignal };
  Kind kind = Kind::kFailed;
  int rank = 0;       ///< the rank that published it
  int exit_code = 3;  ///< what the other ranks return
  std::string text;
};

/// Publishes unless somebody was first; returns what stands in the store afterwards.
Failure publish_failure(c10d::Store& store, const Failure& failure);
/// Reads the published failure, if any.
std::optional<Failure> read_failure(c10d::Store& store);

/// Joins the job through `worker`. Throws CommError, or ConfigError for settings that contradict between ranks, within
/// `timeout` plus one second; the worker may then still hang in a store call.
Rendezvous join(StoreWorker& worker, const LaunchEnvironment& env, std::chrono::milliseconds timeout);

/// The first line of a libtorch error, without its back trace.
std::string brief(const std::exception& error);

/// This process, for its peers.
PeerIdentity own_identity(int local_rank);
/// Start time of a running process; nothing when it does not exist or is a zombie.
std::optional<uint64_t> process_start_time(int pid);

/// "5 s" or "0.5 s".
std::string seconds_text(std::chrono::milliseconds time);

}  // namespace pgpt::comm

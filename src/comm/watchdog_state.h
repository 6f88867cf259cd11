#pragma once

// What the watchdog's two threads share, and how it is put into words; included by watchdog.cpp only.

#include <signal.h>

#include <map>
#include <sstream>

#include "watchdog.h"

namespace pgpt::comm {

inline constexpr char kSeparator = '\x1f';

inline std::string one_line(std::string text) {
  for (char& c : text) {
    if (c == '\n' || c == '\r' || c == kSeparator) c = ' ';
  }
  return text;
}

inline std::string name_operation(const Operation& operation) {
  if (!operation.group) return operation.name;
  if (operation.sequence == 0) return concat(operation.name, " of group '", operation.group->name, "'");
  return concat(operation.name, " #", operation.sequence, " of group '", operation.group->name, "'");
}

inline std::string name_ranks(const std::vector<int>& ranks) {
  std::ostringstream out;
  out << (ranks.size() == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < ranks.size() && i < 8; ++i) out << (i == 0 ? "" : ", ") << ranks[i];
  if (ranks.size() > 8) out << " and " << ranks.size() - 8 << " more";
  return out.str();
}

inline const char* signal_name(int number) {
  return number == SIGINT ? "SIGINT (Ctrl-C)" : number == SIGTERM ? "SIGTERM" : "a signal";
}

/// A rank's published state.
struct Watchdog::Status {
  uint64_t beat = 0;
  std::string activity;
  std::string doing;  ///< operation in progress, may be empty
  std::chrono::milliseconds slow_allowance{0};
  std::map<int, uint64_t> sequences;  ///< by group id

  static Status parse(const std::string& text) {
    Status status;
    std::stringstream in(text);
    std::string field;
    const auto next = [&] {
      std::getline(in, field, kSeparator);
      return field;
    };
    status.beat = std::stoull(next());
    status.activity = next();
    status.doing = next();
    status.slow_allowance = std::chrono::milliseconds(std::stoll(next()));
    while (std::getline(in, field, kSeparator)) {
      const size_t equals = field.find('=');
      if (equals != std::string::npos) status.sequences[std::stoi(field)] = std::stoull(field.substr(equals + 1));
    }
    return status;
  }
};

/// All ranks' states at one moment, filled in by the store worker.
struct Watchdog::Snapshot {
  std::atomic<bool> ready{false};
  std::vector<std::optional<Status>> ranks;
};

/// Everything that both threads touch; outlives the watchdog when the store worker is abandoned.
struct Watchdog::State {
  std::mutex mutex;
  bool stopping = false;
  std::chrono::milliseconds timeout{0};
  std::chrono::milliseconds slow_allowance{0};
  std::string activity = "starting";
  std::list<Operation> operations;
  std::map<int, GroupPtr> groups;
  uint64_t next_key = 1;
  std::optional<Failure> failure;  ///< as read from the store
  std::string store_error;
  std::vector<int> local_peers;  ///< ranks whose processes this host can see; used by the worker only
  uint64_t beat = 0;             ///< used by the worker only

  std::atomic<bool> closing{false};
  /// Milliseconds that the monitor was running: a stopped process does not age.
  std::atomic<int64_t> clock_ms{0};

  /// What this rank publishes; see `Status::parse`.
  std::string status() {
    const std::lock_guard lock(mutex);
    std::ostringstream out;
    std::string doing;
    if (!operations.empty()) {
      const auto& first = operations.front();
      doing =
          concat(name_operation(first), " for ", seconds_text(std::chrono::milliseconds(clock_ms - first.started_ms)));
    }
    out << beat << kSeparator << one_line(activity) << kSeparator << one_line(doing) << kSeparator
        << slow_allowance.count() << kSeparator;
    for (const auto& [id, group] : groups) out << id << '=' << group->sequence.load() << kSeparator;
    return out.str();
  }
};

}  // namespace pgpt::comm

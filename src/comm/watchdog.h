#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "rendezvous.h"
#include "store_worker.h"

namespace pgpt::comm {

/// What the watchdog knows of one group; shared with its communicator.
struct GroupRecord {
  int id = 0;
  std::string name;
  std::vector<int> ranks;             ///< global ranks in group order
  int rank = 0;                       ///< of this process, in the group
  std::atomic<uint64_t> sequence{0};  ///< operations launched so far
};
using GroupPtr = std::shared_ptr<GroupRecord>;

/// One operation that is under way.
struct Operation {
  uint64_t key = 0;
  GroupPtr group;  ///< null outside any group
  const char* name = "";
  uint64_t sequence = 0;
  int64_t started_ms = 0;  ///< on the watchdog's clock
  int64_t look_again_ms = 0;
  std::function<bool()> done;  ///< set for device work
};

/// One per process: ends the process, with one line that names the culprit, when an operation passes its deadline, when
/// another rank fails or dies, when the store is lost, or on a signal. Says nothing while all is well.
///
/// Two threads: the store worker publishes this rank's heartbeat and looks for failures and dead local processes (it
/// may hang in the store and is then abandoned); the monitor thread makes no store call, so it always acts.
class Watchdog {
 public:
  struct Setup {
    int rank = 0;
    int world_size = 1;
    std::chrono::milliseconds timeout{600'000};
    std::shared_ptr<StoreWorker> worker;  ///< null for a world of one rank
    Rendezvous rendezvous;                ///< empty for a world of one rank
  };
  explicit Watchdog(Setup setup);
  /// Stops both threads without a word.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void set_timeout(std::chrono::milliseconds timeout);
  [[nodiscard]] std::chrono::milliseconds timeout() const;
  void set_activity(const std::string& activity);
  void set_slow(std::chrono::milliseconds allowance);

  /// Marks the calling thread as blocked in an operation from construction to destruction.
  class Section {
   public:
    Section(Watchdog* watchdog, GroupPtr group, const char* operation, uint64_t sequence);
    Section(const Section&) = delete;
    Section& operator=(const Section&) = delete;
    ~Section();

   private:
    Watchdog* watchdog_;
    std::list<Operation>::iterator entry_;
  };

  /// Watches work on a device: `done` is polled by the monitor until it returns true.
  void watch_device_work(GroupPtr group, const char* operation, uint64_t sequence, std::function<bool()> done);

  struct Explanation {
    std::string text;
    bool rank_lost = false;  ///< another rank, or the store, does not answer
  };
  /// After a failed operation: finds out which rank is lost (up to 3 s) and returns the line to throw. If the monitor
  /// reports first, the process ends inside this call.
  Explanation explain(const GroupRecord& group, const char* operation, uint64_t sequence, const std::string& error);

  /// Publishes this rank's failure; afterwards the monitor stays silent. Never blocks for more than 2 s.
  void announce(const std::string& reason) noexcept;

  /// The orderly end has been agreed on: from now on other ranks may leave. Deadlines stay in force.
  void begin_closing();
  /// Ends the process on the first SIGINT or SIGTERM after telling the others; see `World::end_on_signals`.
  void end_on_signals();

 private:
  friend class Section;
  struct Status;
  struct Snapshot;
  struct State;
  enum class Reporter { kNone, kMonitor, kMain };

  void start_heartbeat();
  void monitor();
  void tick();
  void check_signal();
  void check_deadlines();
  void check_device_work();
  /// Takes the right to report; false when another thread has it.
  bool claim(Reporter who);
  [[noreturn]] void end(int code, const std::string& message);
  bool give_up(const Operation& operation, std::chrono::milliseconds timeout);
  bool still_running(uint64_t key);
  std::shared_ptr<Snapshot> request_snapshot();
  bool wait_for(const std::shared_ptr<Snapshot>& snapshot, std::chrono::milliseconds limit);
  std::string position();
  void publish(Failure failure, std::chrono::milliseconds limit);
  void linger_for_acks(std::chrono::milliseconds limit);

  const int rank_;
  const int world_size_;
  std::shared_ptr<StoreWorker> worker_;
  Rendezvous rendezvous_;
  std::shared_ptr<State> state_;
  std::condition_variable stop_changed_;
  std::atomic<Reporter> reporter_{Reporter::kNone};
  std::atomic<bool> heeds_signals_{false};
  std::chrono::steady_clock::time_point last_tick_;
  std::shared_ptr<Snapshot> early_;
  uint64_t early_key_ = 0;
  std::thread monitor_;
};

}  // namespace pgpt::comm

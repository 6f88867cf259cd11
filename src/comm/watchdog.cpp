#include "watchdog.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "pgpt/base/error.h"
#include "pgpt/base/log.h"
#include "signals.h"
#include "watchdog_state.h"

namespace pgpt::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTick{25};
constexpr int64_t kLongestTickMs = 250;  // a longer gap means that this process was stopped or starved
constexpr milliseconds kBeat{200};
constexpr milliseconds kLead{1500};  // first look at the heartbeats, this long before the deadline
constexpr milliseconds kAnswer{1500};
constexpr milliseconds kAckLimit{1000};

std::string beat_key(int rank) { return "beat/" + std::to_string(rank); }

}  // namespace

Watchdog::Watchdog(Setup setup)
    : rank_(setup.rank),
      world_size_(setup.world_size),
      worker_(std::move(setup.worker)),
      rendezvous_(std::move(setup.rendezvous)),
      state_(std::make_shared<State>()),
      last_tick_(std::chrono::steady_clock::now()) {
  state_->timeout = setup.timeout;
  if (worker_) start_heartbeat();
  monitor_ = std::thread([this] { monitor(); });
}

void Watchdog::start_heartbeat() {
  const auto& all = rendezvous_.peers;
  const auto& self = all[static_cast<size_t>(rank_)];
  for (int r = 0; r < world_size_; ++r) {
    const auto& peer = all[static_cast<size_t>(r)];
    if (r != rank_ && peer.host == self.host && process_start_time(peer.pid) == peer.start_time)
      state_->local_peers.push_back(r);
  }
  // The task may outlive this object inside an abandoned worker: it owns all that it uses.
  worker_->every(kBeat,
                 [state = state_, store = rendezvous_.worker_store, rank = rank_, size = world_size_, peers = all] {
                   try {
                     ++state->beat;
                     store->set(beat_key(rank), state->status());
                     {
                       const std::lock_guard lock(state->mutex);
                       if (state->failure) return;
                     }
                     auto failure = read_failure(*store);
                     for (const int r : state->local_peers) {
                       if (failure || state->closing) break;
                       const auto& peer = peers[static_cast<size_t>(r)];
                       if (process_start_time(peer.pid) == peer.start_time) continue;
                       // It may have failed with a word, or left in good order since the last look.
                       failure = read_failure(*store);
                       if (failure || store->add(kLeavingKey, 0) >= size) break;
                       failure = publish_failure(*store, {Failure::Kind::kLost, rank, 3,
                                                          concat("rank ", r, " (process ", peer.pid, " on ", peer.host,
                                                                 ") has ended without a word: killed or crashed")});
                     }
                     if (!failure) return;
                     store->add(kFailureAcksKey, 1);
                     const std::lock_guard lock(state->mutex);
                     state->failure = failure;
                   } catch (const std::exception& error) {
                     const std::lock_guard lock(state->mutex);
                     state->store_error = brief(error);
                     throw;
                   }
                 });
}

Watchdog::~Watchdog() {
  state_->closing = true;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  stop_changed_.notify_all();
  monitor_.join();
  if (worker_) worker_->stop(milliseconds(500));
  if (heeds_signals_) restore_signal_handlers();
}

void Watchdog::set_timeout(milliseconds timeout) {
  const std::lock_guard lock(state_->mutex);
  state_->timeout = timeout;
}

milliseconds Watchdog::timeout() const {
  const std::lock_guard lock(state_->mutex);
  return state_->timeout;
}

void Watchdog::set_activity(const std::string& activity) {
  const std::lock_guard lock(state_->mutex);
  state_->activity = activity;
}

void Watchdog::set_slow(milliseconds allowance) {
  const std::lock_guard lock(state_->mutex);
  state_->slow_allowance = allowance;
}

Watchdog::Section::Section(Watchdog* watchdog, GroupPtr group, const char* operation, uint64_t sequence)
    : watchdog_(watchdog) {
  if (watchdog_ == nullptr) return;
  const std::lock_guard lock(watchdog_->state_->mutex);
  if (group) watchdog_->state_->groups.try_emplace(group->id, group);
  const int64_t now = watchdog_->state_->clock_ms;
  entry_ = watchdog_->state_->operations.insert(
      watchdog_->state_->operations.end(),
      {watchdog_->state_->next_key++, std::move(group), operation, sequence, now, 0, {}});
}

Watchdog::Section::~Section() {
  if (watchdog_ == nullptr) return;
  const std::lock_guard lock(watchdog_->state_->mutex);
  watchdog_->state_->operations.erase(entry_);
}

void Watchdog::watch_device_work(GroupPtr group, const char* operation, uint64_t sequence, std::function<bool()> done) {
  const std::lock_guard lock(state_->mutex);
  state_->groups.try_emplace(group->id, group);
  state_->operations.push_back(
      {state_->next_key++, std::move(group), operation, sequence, state_->clock_ms, 0, std::move(done)});
}

void Watchdog::begin_closing() { state_->closing = true; }

void Watchdog::end_on_signals() {
  if (!heeds_signals_.exchange(true)) install_signal_handlers();
}

/// Where this rank is, for the end of a message about another one.
std::string Watchdog::position() {
  const std::lock_guard lock(state_->mutex);
  if (state_->operations.empty()) return concat(" (this rank was in ", state_->activity, ")");
  return concat(" (this rank was in ", name_operation(state_->operations.front()), ", ", state_->activity, ")");
}

void Watchdog::monitor() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  std::unique_lock lock(state_->mutex);
  while (!stop_changed_.wait_for(lock, kTick, [this] { return state_->stopping; })) {
    lock.unlock();
    tick();
    lock.lock();
  }
}

void Watchdog::tick() {
  const auto now = std::chrono::steady_clock::now();
  const auto gap = std::chrono::duration_cast<milliseconds>(now - last_tick_).count();
  last_tick_ = now;
  state_->clock_ms += std::min<int64_t>(gap, kLongestTickMs);

  std::optional<Failure> failure;
  std::string store_error;
  {
    const std::lock_guard lock(state_->mutex);
    failure = state_->failure;
    store_error = state_->store_error;
  }
  if (failure && !state_->closing) {
    const std::string who = failure->kind == Failure::Kind::kFailed
                                ? concat("rank ", failure->rank, " failed: ", failure->text)
                                : failure->text;
    const std::string where = failure->kind == Failure::Kind::kSignal ? "" : position();
    if (claim(Reporter::kMonitor)) end(failure->exit_code, who + where);
  }
  if (!store_error.empty() && !state_->closing && claim(Reporter::kMonitor)) {
    std::string ended = rendezvous_.store_owner + " has ended";
    if (rendezvous_.hosts_store) ended = "the store on this rank failed: " + store_error;
    end(3, ended + position());
  }
  if (heeds_signals_) check_signal();
  check_device_work();
  check_deadlines();
}

void Watchdog::check_signal() {
  const int number = noted_signal();
  if (number == 0) return;
  // A launcher passes SIGTERM on when another rank has failed: that rank's reason is the better message.
  for (int i = 0; i < 12 && worker_; ++i) {
    {
      const std::lock_guard lock(state_->mutex);
      if (state_->failure && state_->failure->kind != Failure::Kind::kSignal) return;
    }
    std::this_thread::sleep_for(kTick);
  }
  if (!claim(Reporter::kMonitor)) return;
  publish(
      {Failure::Kind::kSignal, rank_, 128 + number, concat("stopped: rank ", rank_, " received ", signal_name(number))},
      milliseconds(500));
  end(128 + number, concat("stopped by ", signal_name(number)));
}

void Watchdog::check_device_work() {
  std::vector<Operation> polls;
  {
    const std::lock_guard lock(state_->mutex);
    for (const auto& operation : state_->operations) {
      if (operation.done) polls.push_back(operation);
    }
  }
  std::vector<uint64_t> finished;
  std::set<int> busy;  // a group's work ends in order: the first that is not done stands for the rest
  for (const auto& operation : polls) {
    if (busy.count(operation.group->id) != 0) continue;
    bool over = true;
    try {
      over = operation.done();
    } catch (const std::exception&) {
      // A device error: the main thread meets it too and reports it.
    }
    if (over) {
      finished.push_back(operation.key);
    } else {
      busy.insert(operation.group->id);
    }
  }
  if (finished.empty()) return;
  std::list<Operation> dropped;
  const std::lock_guard lock(state_->mutex);
  for (auto it = state_->operations.begin(); it != state_->operations.end();) {
    const auto next = std::next(it);
    if (std::find(finished.begin(), finished.end(), it->key) != finished.end())
      dropped.splice(dropped.end(), state_->operations, it);
    it = next;
  }
}

void Watchdog::check_deadlines() {
  std::optional<Operation> oldest;
  milliseconds limit{0};
  {
    const std::lock_guard lock(state_->mutex);
    limit = state_->timeout;
    for (const auto& operation : state_->operations) {
      if (!oldest || operation.started_ms < oldest->started_ms) oldest = operation;
    }
  }
  if (!oldest || reporter_ != Reporter::kNone) return;
  const int64_t now = state_->clock_ms;
  const milliseconds elapsed(now - oldest->started_ms);
  const milliseconds lead = std::min(kLead, limit / 2);
  if (elapsed < limit - lead) return;
  if (early_key_ != oldest->key) {
    early_ = request_snapshot();
    early_key_ = oldest->key;
    return;
  }
  if (elapsed < limit || now < oldest->look_again_ms) return;
  if (!give_up(*oldest, limit)) {
    early_ = request_snapshot();  // the heartbeats are compared again at the next look
    const std::lock_guard lock(state_->mutex);
    for (auto& operation : state_->operations) {
      if (operation.key == oldest->key) operation.look_again_ms = state_->clock_ms + 1000;
    }
  }
}

bool Watchdog::still_running(uint64_t key) {
  const std::lock_guard lock(state_->mutex);
  return std::any_of(state_->operations.begin(), state_->operations.end(),
                     [key](const Operation& o) { return o.key == key; });
}

std::shared_ptr<Watchdog::Snapshot> Watchdog::request_snapshot() {
  auto snapshot = std::make_shared<Snapshot>();
  if (!worker_) return snapshot;
  worker_->submit([snapshot, store = rendezvous_.worker_store, size = world_size_] {
    std::vector<std::string> keys;
    std::vector<int> present;
    for (int r = 0; r < size; ++r) {
      if (store->check({beat_key(r)})) {
        keys.push_back(beat_key(r));
        present.push_back(r);
      }
    }
    snapshot->ranks.resize(static_cast<size_t>(size));
    const auto values = store->multiGet(keys);
    for (size_t i = 0; i < present.size(); ++i) {
      snapshot->ranks[static_cast<size_t>(present[i])] = Status::parse(std::string(values[i].begin(), values[i].end()));
    }
    snapshot->ready = true;
  });
  return snapshot;
}

bool Watchdog::wait_for(const std::shared_ptr<Snapshot>& snapshot, milliseconds limit) {
  const auto until = std::chrono::steady_clock::now() + limit;
  while (!snapshot->ready && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(milliseconds(10));
  return snapshot->ready;
}

/// Past the deadline: ends the process, or returns false if the operation may go on (it finished, or waits for a rank
/// that announced slow work and is alive).
bool Watchdog::give_up(const Operation& operation, milliseconds limit) {
  const std::string what = concat(name_operation(operation), " did not finish within ", seconds_text(limit));
  std::string reason;
  if (worker_) {
    const auto late = request_snapshot();
    const bool answered = wait_for(late, kAnswer);
    if (!still_running(operation.key)) return false;
    if (!answered) {
      reason = concat(rendezvous_.store_owner, " does not answer: ", what);
    } else {
      std::vector<int> silent_members;
      std::vector<int> silent_others;
      std::vector<int> behind;
      milliseconds allowance{0};
      for (int r = 0; r < world_size_; ++r) {
        if (r == rank_) continue;
        const auto& now = late->ranks[static_cast<size_t>(r)];
        const bool member = !operation.group || std::find(operation.group->ranks.begin(), operation.group->ranks.end(),
                                                          r) != operation.group->ranks.end();
        bool silent = !now.has_value();
        if (now && early_ && early_->ready) {
          const auto& before = early_->ranks[static_cast<size_t>(r)];
          silent = before && before->beat == now->beat;
        }
        if (silent) (member ? silent_members : silent_others).push_back(r);
        if (!member || silent || !operation.group) continue;
        const auto sequence = now->sequences.find(operation.group->id);
        if ((sequence == now->sequences.end() ? 0 : sequence->second) < operation.sequence ||
            (operation.sequence == 0 && sequence == now->sequences.end())) {
          behind.push_back(r);
          allowance = std::max(allowance, now->slow_allowance);
        }
      }
      const auto activity_of = [&](int r) {
        const auto& status = late->ranks[static_cast<size_t>(r)];
        if (!status) return std::string("its start");
        return status->activity + (status->doing.empty() ? "" : ", " + status->doing);
      };
      if (!silent_members.empty() || (behind.empty() && !silent_others.empty())) {
        const auto& silent = silent_members.empty() ? silent_others : silent_members;
        reason = concat(name_ranks(silent), silent.size() == 1 ? " does" : " do",
                        " not answer (stopped or lost; last seen in ", activity_of(silent.front()), "): ", what);
      } else if (!behind.empty()) {
        if (milliseconds(state_->clock_ms - operation.started_ms) < limit + allowance) return false;
        reason = concat(name_ranks(behind), behind.size() == 1 ? " has" : " have", " not joined: ", what, "; rank ",
                        behind.front(), " is in ", activity_of(behind.front()));
      } else {
        reason = concat(what, " although every rank of the group is alive and has started it");
      }
    }
  } else {
    reason = what;
  }
  if (!still_running(operation.key) || !claim(Reporter::kMonitor)) return false;
  std::string activity;
  {
    const std::lock_guard lock(state_->mutex);
    activity = state_->activity;
  }
  reason += concat(" (this rank: ", activity, ")");
  if (!state_->closing)
    publish({Failure::Kind::kLost, rank_, 3, concat("rank ", rank_, " gave up: ", reason)}, milliseconds(500));
  end(3, reason);
}

Watchdog::Explanation Watchdog::explain(const GroupRecord& group, const char* operation, uint64_t sequence,
                                        const std::string& error) {
  const std::string what = concat(operation, " #", sequence, " of group '", group.name, "' failed: ", one_line(error));
  if (!worker_) return {what, false};
  // The store worker meanwhile sees a published failure or a dead process; the monitor then ends this process.
  const auto before = request_snapshot();
  std::this_thread::sleep_for(milliseconds(1500));
  const auto after = request_snapshot();
  const bool answered = wait_for(after, kAnswer);
  while (!claim(Reporter::kMain)) ::pause();
  if (!answered || !before->ready) return {concat(rendezvous_.store_owner, " does not answer; ", what), true};
  std::vector<int> silent;
  for (const int r : group.ranks) {
    const auto& first = before->ranks[static_cast<size_t>(r)];
    const auto& second = after->ranks[static_cast<size_t>(r)];
    if (r != rank_ && (!second || (first && first->beat == second->beat))) silent.push_back(r);
  }
  if (silent.empty()) return {what, false};
  return {concat(name_ranks(silent), silent.size() == 1 ? " does" : " do",
                 " not answer (killed, stopped or cut off): ", what),
          true};
}

void Watchdog::publish(Failure failure, milliseconds limit) {
  if (!worker_) return;
  failure.text = one_line(failure.text);
  const auto done = worker_->submit([store = rendezvous_.worker_store, failure, state = state_] {
    const auto standing = publish_failure(*store, failure);
    store->add(kFailureAcksKey, 1);
    const std::lock_guard lock(state->mutex);
    state->failure = standing;
  });
  (void)done.wait_for(limit);
}

/// The store ends with the process that hosts it: lets the others read the reason first.
void Watchdog::linger_for_acks(milliseconds limit) {
  if (!worker_ || !rendezvous_.hosts_store) return;
  const auto until = std::chrono::steady_clock::now() + limit;
  while (std::chrono::steady_clock::now() < until) {
    auto count = std::make_shared<std::atomic<int64_t>>(0);
    const auto done =
        worker_->submit([store = rendezvous_.worker_store, count] { *count = store->add(kFailureAcksKey, 0); });
    (void)done.wait_for(milliseconds(200));
    if (*count >= world_size_) return;
    std::this_thread::sleep_for(milliseconds(20));
  }
}

void Watchdog::announce(const std::string& reason) noexcept {
  try {
    if (!claim(Reporter::kMain)) {
      std::this_thread::sleep_for(milliseconds(2000));  // the monitor is ending the process
      return;
    }
    publish({Failure::Kind::kFailed, rank_, 3, reason}, milliseconds(500));
    linger_for_acks(kAckLimit);
  } catch (...) {
    // Best effort: the others find out by heartbeat.
  }
}

bool Watchdog::claim(Reporter who) {
  Reporter holder = Reporter::kNone;
  return reporter_.compare_exchange_strong(holder, who) || (holder == who && who == Reporter::kMain);
}

void Watchdog::end(int code, const std::string& message) {
  log::emergency(one_line(message));
  linger_for_acks(kAckLimit);
  ::_exit(code);
}

}  // namespace pgpt::comm

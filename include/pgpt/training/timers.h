#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace pgpt::training {

/// Section timers of one process (--timing-log-level). Not thread-safe.
class Timers {
 public:
  /// Timers above `level` do nothing. `synchronize` is called before each reading, so that device work is included;
  /// `seconds` is the clock, for tests.
  explicit Timers(std::int64_t level, std::function<void()> synchronize = {}, std::function<double()> seconds = {});

  /// Starts a section that belongs to `level` (0, 1 or 2). Throws std::logic_error when it is running.
  void start(const std::string& name, std::int64_t level);
  /// Ends it; nothing happens for a section above the level. Throws std::logic_error when it is not running.
  void stop(const std::string& name);

  /// Milliseconds of each section, in the order of `names`; 0 for one that did not run. Running sections go on
  /// counting. This is what ranks exchange before `timer_lines`.
  [[nodiscard]] std::vector<double> elapsed_ms(const std::vector<std::string>& names) const;
  /// Forgets the times of these sections; running ones start again from now.
  void reset(const std::vector<std::string>& names);

  /// Sections of the training line at this level, in printed order.
  [[nodiscard]] static std::vector<std::string> training_names(std::int64_t level);

 private:
  struct Section {
    bool running = false;
    double started = 0;  // seconds
    double total = 0;    // seconds
  };
  double now() const;

  std::int64_t level_;
  std::function<void()> synchronize_;
  std::function<double()> seconds_;
  std::map<std::string, Section> sections_;
};

/// Runs a section for the lifetime of the object.
class ScopedTimer {
 public:
  ScopedTimer(Timers& timers, std::string name, std::int64_t level) : timers_(timers), name_(std::move(name)) {
    timers_.start(name_, level);
  }
  ~ScopedTimer() { timers_.stop(name_); }
  ScopedTimer(const ScopedTimer&) = delete;
  ScopedTimer& operator=(const ScopedTimer&) = delete;

 private:
  Timers& timers_;
  std::string name_;
};

/// How a block of timers is printed (--timing-log-option).
enum class TimerOption { kMinMax, kMax, kAll };
/// "minmax", "max" or "all"; throws ConfigError for another word.
[[nodiscard]] TimerOption parse_timer_option(const std::string& option);

/// A block of timers (spec/training.md 10.4), empty when none ran anywhere. `per_rank_ms[rank][i]` belongs to
/// `names[i]`, 0 = did not run there; values are divided by `normalizer`.
[[nodiscard]] std::vector<std::string> timer_lines(TimerOption option, const std::vector<std::string>& names,
                                                   const std::vector<std::vector<double>>& per_rank_ms,
                                                   double normalizer = 1);

}  // namespace pgpt::training

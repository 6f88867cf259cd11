#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "pgpt/config/config.h"

namespace pgpt::optim {

/// Learning rate after `samples` consumed samples for a parameter group with these bounds, in double and in the
/// reference's order of operations (spec/training.md 7). Samples count successful steps only.
[[nodiscard]] double learning_rate_at(const config::OptimizerConfig& config, double max_lr, double min_lr,
                                      std::int64_t samples);

/// Weight decay after `samples` consumed samples; the caller multiplies it by the group's factor (0 or 1).
[[nodiscard]] double weight_decay_at(const config::OptimizerConfig& config, std::int64_t samples);

/// One stored value: whole numbers as integers, as the reference pickles them.
using ScheduleValue = std::variant<std::int64_t, double, std::string>;
/// The checkpoint entry `opt_param_scheduler`: (key, value) in the reference's order.
using ScheduleState = std::vector<std::pair<std::string, ScheduleValue>>;

/// Both schedules with their sample counter. Not thread-safe.
class ParamScheduler {
 public:
  /// Throws ConfigError when the lengths or bounds contradict each other (spec/training.md 7).
  explicit ParamScheduler(config::OptimizerConfig config);

  /// Advances by the samples of one successful step. A skipped step does not call this.
  void step(std::int64_t increment);
  /// Samples counted so far.
  [[nodiscard]] std::int64_t num_steps() const { return num_steps_; }

  /// What the next optimizer step applies to groups with the default bounds; a log line prints this after `step`.
  [[nodiscard]] double learning_rate() const { return learning_rate(config_.lr, config_.min_lr); }
  /// The same for a group with its own bounds (--decoupled-lr, --decoupled-min-lr).
  [[nodiscard]] double learning_rate(double max_lr, double min_lr) const;
  /// Weight decay of the next optimizer step, before the group's factor.
  [[nodiscard]] double weight_decay() const;

  /// What a checkpoint stores.
  [[nodiscard]] ScheduleState state() const;
  /// Restores the counter, and per value: --override-opt-param-scheduler keeps the command line's,
  /// --use-checkpoint-opt-param-scheduler takes the stored one, and without either both must be equal. Old key names
  /// are understood. Throws ConfigError naming value and options, DataError when a key is missing or has the wrong
  /// type.
  void load(const ScheduleState& state);

  /// The values in force (after `load`, those of the checkpoint where it won).
  [[nodiscard]] const config::OptimizerConfig& config() const { return config_; }

 private:
  config::OptimizerConfig config_;
  std::int64_t num_steps_ = 0;
};

}  // namespace pgpt::optim

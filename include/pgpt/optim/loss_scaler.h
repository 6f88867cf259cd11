#pragma once

#include <cstdint>

#include "pgpt/config/config.h"

namespace pgpt::optim {

/// Loss scale of fp16 training (spec/training.md 4.8); constant 1 for bf16 and fp32 unless --loss-scale is given.
class LossScaler {
 public:
  explicit LossScaler(const config::TrainingConfig& training);

  /// The factor the loss is multiplied by now.
  [[nodiscard]] double scale() const { return scale_; }
  /// True when gradients must be tested for Inf and NaN, and a step with any is skipped.
  [[nodiscard]] bool enabled() const { return enabled_; }
  /// Takes in whether this step's gradients overflowed.
  void update(bool overflow);

  /// Counters for checkpoints.
  struct State {
    double scale = 1.0;
    std::int64_t good_steps = 0;
    std::int64_t hysteresis = 0;
  };
  [[nodiscard]] State state() const { return {scale_, good_steps_, hysteresis_}; }
  void set_state(const State& state);

 private:
  bool enabled_ = false;
  bool dynamic_ = false;
  double scale_ = 1.0;
  double minimum_ = 1.0;
  std::int64_t window_ = 1000;
  std::int64_t initial_hysteresis_ = 2;
  std::int64_t hysteresis_ = 2;
  std::int64_t good_steps_ = 0;
};

}  // namespace pgpt::optim

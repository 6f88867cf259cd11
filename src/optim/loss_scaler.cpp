#include "pgpt/optim/loss_scaler.h"

#include <algorithm>

namespace pgpt::optim {

LossScaler::LossScaler(const config::TrainingConfig& training)
    : enabled_(training.scales_loss()),
      dynamic_(training.params_dtype == config::Dtype::kFloat16 && !training.loss_scale.has_value()),
      minimum_(training.min_loss_scale),
      window_(static_cast<std::int64_t>(std::min(training.loss_scale_window, 1e18))),  // inf: never
      initial_hysteresis_(training.hysteresis),
      hysteresis_(training.hysteresis) {
  if (training.loss_scale) scale_ = *training.loss_scale;
  if (dynamic_) scale_ = training.initial_loss_scale;
}

void LossScaler::update(bool overflow) {
  if (!dynamic_) return;
  if (overflow) {
    good_steps_ = 0;
    if (--hysteresis_ <= 0) scale_ = std::max(scale_ * 0.5, minimum_);
    return;
  }
  if (++good_steps_ == window_) {
    good_steps_ = 0;
    hysteresis_ = initial_hysteresis_;
    scale_ *= 2.0;
  }
}

void LossScaler::set_state(const State& state) {
  if (!dynamic_) return;
  scale_ = state.scale;
  good_steps_ = state.good_steps;
  hysteresis_ = state.hysteresis;
}

}  // namespace pgpt::optim

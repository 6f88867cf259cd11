#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pgpt/comm/communicator.h"
#include "pgpt/config/config.h"
#include "pgpt/optim/loss_scaler.h"
#include "pgpt/parameter/parameter_store.h"

namespace pgpt::optim {

/// Values that change from step to step.
struct StepInputs {
  double learning_rate = 0;            ///< of the default group
  double decoupled_learning_rate = 0;  ///< of word embedding and output layer with --decoupled-lr
  double weight_decay = 0;             ///< before each parameter's multiplier
};

/// Optimizer over the flat buffers: fp32 masters, Adam or SGD, global norm, clipping (spec/training.md 4).
///
/// One step: gradients_overflow (with a loss scaler), prepare, update. Only the first waits for the device; results of
/// an update stay in device tensors until the next one.
class Optimizer {
 public:
  /// `model_group` spans the ranks whose gradients make up one model (T x GTP x P); the store must be initialised,
  /// since masters start from its (rounded) weights.
  Optimizer(parameter::ParameterStore& store, const config::OptimizerConfig& optimizer,
            const config::TrainingConfig& training, bool count_zeros, comm::Communicator& model_group,
            const kernels::Policy& policy);

  /// Whether gradients of any rank overflowed, so that this step must not update; tells the loss scaler and, if not,
  /// unscales them. Always false, without a host wait, when the scaler is not enabled.
  [[nodiscard]] bool gradients_overflow();
  /// Counts one more step and sends its values to the device.
  void prepare(const StepInputs& inputs);
  /// Measures, clips and applies the main gradients; weights receive the rounded masters. Device work only. With a
  /// `guard` (fp64 scalar) a norm or guard that is not finite leaves everything unchanged, in this and all later
  /// updates.
  void update(const at::Tensor& guard);

  /// Global gradient norm before clipping, fp32 scalar on the device.
  [[nodiscard]] const at::Tensor& gradient_norm() const { return norm_; }
  /// Zeros among the gradients, int64 scalar on the device; undefined without --log-num-zeros-in-grad.
  [[nodiscard]] const at::Tensor& num_zeros() const { return num_zeros_; }
  /// Not 0 once an update was refused: fp32 scalar on the device.
  [[nodiscard]] at::Tensor refused() const;
  /// L2 norm of the fp32 master weights over the whole model (spec/training.md 13), fp64 scalar on the device.
  /// Collective over the model group.
  [[nodiscard]] at::Tensor params_norm();
  /// After a refused update: the first parameter whose gradient was NaN or Inf here, or nothing (host wait).
  [[nodiscard]] std::optional<std::string> first_non_finite() const;
  /// Makes the masters equal to the weights again (after loading weights alone).
  void reset_masters();

  [[nodiscard]] const LossScaler& loss_scaler() const { return scaler_; }
  [[nodiscard]] LossScaler& loss_scaler() { return scaler_; }
  [[nodiscard]] std::int64_t step_count() const { return steps_; }
  void set_step_count(std::int64_t steps) { steps_ = steps; }

  /// Flat fp32 state, laid out like the store: (name, tensor) of the master (absent when training in fp32) and the
  /// moments. Names are the reference's: fp32_param, exp_avg, exp_avg_sq, momentum_buffer.
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> state() const;

 private:
  [[nodiscard]] at::Tensor squared_norm(const at::Tensor& flat);  // over the whole model

  parameter::ParameterStore& store_;
  config::OptimizerConfig config_;
  comm::Communicator& model_group_;
  kernels::Policy policy_;
  bool count_zeros_;
  LossScaler scaler_;
  kernels::SegmentTable segments_;
  kernels::StepScalars scalars_;
  at::Tensor unscaled_;  // of 16-bit gradients under a loss scaler: fp32, from gradients_overflow until update
  at::Tensor norm_, num_zeros_;
  at::Tensor non_finite_;  // uint8, one a segment: set by the update that was refused
  at::Tensor master_;      // the weights themselves in fp32 training
  at::Tensor exp_avg_;     // momentum buffer for SGD
  at::Tensor exp_avg_sq_;  // Adam only
  std::int64_t steps_ = 0;
};

}  // namespace pgpt::optim

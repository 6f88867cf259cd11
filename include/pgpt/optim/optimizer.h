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
  double decoupled_learning_rate = 0;  ///< of embedding and output layer with --decoupled-lr
  double weight_decay = 0;             ///< before each parameter's multiplier
  bool refuse_non_finite = false;      ///< leave everything unchanged when the norm is NaN or Inf
};

/// What one step found and did.
struct StepOutcome {
  bool updated = true;                    ///< false: gradients overflowed (or were refused) and nothing changed
  bool non_finite = false;                ///< refused: the norm is NaN or Inf
  std::optional<double> gradient_norm;    ///< before clipping, fp32; none on a skipped step
  std::optional<std::int64_t> num_zeros;  ///< with --log-num-zeros-in-grad
};

/// Optimizer over the flat buffers: fp32 masters, Adam or SGD, global norm, clipping (spec/training.md 4).
class Optimizer {
 public:
  /// `model_group` spans the ranks whose gradients make up one model (T x GTP x P); the store must be initialised,
  /// since masters start from its (rounded) weights.
  Optimizer(parameter::ParameterStore& store, const config::OptimizerConfig& optimizer,
            const config::TrainingConfig& training, bool count_zeros, comm::Communicator& model_group,
            const kernels::Policy& policy);

  /// Unscales, tests, measures, clips and applies the main gradients; weights receive the rounded masters.
  [[nodiscard]] StepOutcome step(const StepInputs& inputs);
  /// L2 norm of the fp32 master weights over the whole model (spec/training.md 13). Collective over the model group.
  [[nodiscard]] double params_norm();
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
  [[nodiscard]] double global_norm(const at::Tensor& flat);

  parameter::ParameterStore& store_;
  config::OptimizerConfig config_;
  comm::Communicator& model_group_;
  kernels::Policy policy_;
  bool count_zeros_;
  LossScaler scaler_;
  kernels::SegmentTable segments_;
  kernels::StepScalars scalars_;
  at::Tensor master_;      // the weights themselves in fp32 training
  at::Tensor exp_avg_;     // momentum buffer for SGD
  at::Tensor exp_avg_sq_;  // Adam only
  std::int64_t steps_ = 0;
};

}  // namespace pgpt::optim

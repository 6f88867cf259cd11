#include "pgpt/optim/optimizer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "pgpt/base/error.h"

namespace pgpt::optim {

using kernels::StepScalars;

namespace {

constexpr std::int32_t kDefaultGroup = 0;
constexpr std::int32_t kDecoupledGroup = 1;
constexpr std::int64_t kNumGroups = 2;

kernels::SegmentTable make_segments(const parameter::ParameterStore& store, const config::OptimizerConfig& config) {
  std::vector<kernels::Segment> segments;
  for (const parameter::Parameter& parameter : store.parameters()) {
    kernels::Segment segment;
    segment.begin = parameter.offset;
    segment.end = parameter.offset + parameter.num_elements();
    segment.group = config.decoupled_lr && parameter.spec.decoupled_lr ? kDecoupledGroup : kDefaultGroup;
    // Gain and bias alike, though other biases never decay (spec/training.md 4.4).
    const bool head_norm = parameter.spec.name.find("q_layernorm.") != std::string::npos ||
                           parameter.spec.name.find("k_layernorm.") != std::string::npos;
    segment.weight_decay_multiplier = head_norm && config.apply_weight_decay_to_qk_layernorm
                                          ? 1.0F
                                          : static_cast<float>(parameter.spec.weight_decay_multiplier);
    segment.norm_weight = parameter.gtp_duplicate ? 0.0F : 1.0F;
    segments.push_back(segment);
  }
  std::sort(segments.begin(), segments.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  return kernels::make_segment_table(std::move(segments), store.options().device);
}

}  // namespace

Optimizer::Optimizer(parameter::ParameterStore& store, const config::OptimizerConfig& optimizer,
                     const config::TrainingConfig& training, bool count_zeros, comm::Communicator& model_group,
                     const kernels::Policy& policy)
    : store_(store),
      config_(optimizer),
      model_group_(model_group),
      policy_(policy),
      count_zeros_(count_zeros),
      scaler_(training),
      segments_(make_segments(store, optimizer)) {
  const at::TensorOptions fp32 = store.weights().options().dtype(at::kFloat);
  scalars_.values = at::zeros({StepScalars::kCount + kNumGroups}, fp32);
  norm_ = at::zeros({}, fp32);
  if (count_zeros_) num_zeros_ = at::zeros({}, fp32.dtype(at::kLong));
  non_finite_ = at::zeros({static_cast<std::int64_t>(segments_.host.size())}, fp32.dtype(at::kByte));
  master_ = store.weights().scalar_type() == at::kFloat ? store.weights() : store.weights().to(at::kFloat);
  exp_avg_ = at::zeros({store.num_elements()}, fp32);
  if (config_.kind == config::OptimizerKind::kAdam) exp_avg_sq_ = at::zeros({store.num_elements()}, fp32);
}

void Optimizer::reset_masters() {
  if (!master_.is_same(store_.weights())) master_.copy_(store_.weights());
}

at::Tensor Optimizer::squared_norm(const at::Tensor& flat) {
  at::Tensor sum = kernels::squared_norm(flat, segments_, policy_);
  model_group_.all_reduce(sum, comm::ReduceOp::kSum).wait();
  return sum;
}

at::Tensor Optimizer::params_norm() { return squared_norm(master_).sqrt_(); }

at::Tensor Optimizer::refused() const { return scalars_.values.select(0, StepScalars::kSkip); }

std::optional<std::string> Optimizer::first_non_finite() const {
  const at::Tensor flags = non_finite_.cpu();
  for (const parameter::Parameter& parameter : store_.parameters()) {
    for (std::size_t i = 0; i < segments_.host.size(); ++i) {
      const bool bad = flags.const_data_ptr<std::uint8_t>()[i] != 0;
      if (bad && segments_.host[i].begin == parameter.offset) return parameter.spec.name;
    }
  }
  return std::nullopt;
}

bool Optimizer::gradients_overflow() {
  if (!scaler_.enabled()) return false;
  at::Tensor& gradients = store_.gradients();
  at::Tensor overflow = kernels::has_non_finite(gradients);
  model_group_.all_reduce(overflow, comm::ReduceOp::kMax).wait();
  const bool overflowed = overflow.item<float>() != 0.0F;
  const double scale = scaler_.scale();
  scaler_.update(overflowed);
  if (overflowed || scale == 1.0) return overflowed;
  if (gradients.scalar_type() == at::kFloat) {
    gradients.mul_(1.0 / scale);
  } else {
    // In their own type they would underflow, which the scale is there to prevent.
    unscaled_ = gradients.to(at::kFloat).mul_(1.0 / scale);
  }
  return false;
}

void Optimizer::prepare(const StepInputs& inputs) {
  ++steps_;
  const auto t = static_cast<int>(steps_);
  const bool on_gpu = scalars_.values.is_cuda();
  at::Tensor values =
      at::zeros({StepScalars::kCount + kNumGroups}, at::TensorOptions().dtype(at::kFloat).pinned_memory(on_gpu));
  float* v = values.data_ptr<float>();
  // float32 betas, whose power and difference to one are taken in double and rounded once, as the reference's kernels
  // have them (spec/training.md 4.2). A power rounded to float32 would leave 1 - 0.999^2 off by 1e-5 of its size.
  const auto correction = [t](double beta) { return static_cast<float>(1.0 - std::pow(static_cast<float>(beta), t)); };
  v[StepScalars::kBiasCorrection1] = correction(config_.adam_beta1);
  v[StepScalars::kBiasCorrection2] = correction(config_.adam_beta2);
  v[StepScalars::kWeightDecay] = static_cast<float>(inputs.weight_decay);
  v[StepScalars::kFirstMomentum] = steps_ == 1 ? 1.0F : 0.0F;
  v[StepScalars::kCount + kDefaultGroup] = static_cast<float>(inputs.learning_rate);
  v[StepScalars::kCount + kDecoupledGroup] = static_cast<float>(inputs.decoupled_learning_rate);
  // The device owns the first two: clip coefficient and skip flag.
  constexpr std::int64_t kFirst = StepScalars::kBiasCorrection1;
  static_assert(StepScalars::kGradientScale < kFirst && StepScalars::kSkip < kFirst);
  const std::int64_t count = values.numel() - kFirst;
  scalars_.values.narrow(0, kFirst, count).copy_(values.narrow(0, kFirst, count), /*non_blocking=*/true);
}

void Optimizer::update(const at::Tensor& guard) {
  const at::Tensor unscaled = std::exchange(unscaled_, at::Tensor());
  const at::Tensor& gradients = unscaled.defined() ? unscaled : store_.gradients();
  kernels::finish_norm(squared_norm(gradients), config_.clip_grad, guard, norm_, scalars_);
  if (guard.defined()) kernels::mark_non_finite(gradients, segments_, scalars_, non_finite_);
  if (count_zeros_) {
    at::Tensor zeros = kernels::count_zeros(gradients, segments_);
    model_group_.all_reduce(zeros, comm::ReduceOp::kSum).wait();
    num_zeros_.copy_(zeros);
  }
  if (config_.kind == config::OptimizerKind::kAdam) {
    const kernels::AdamOptions options{static_cast<float>(config_.adam_beta1), static_cast<float>(config_.adam_beta2),
                                       static_cast<float>(config_.adam_eps)};
    kernels::adam_step(store_.weights(), master_, exp_avg_, exp_avg_sq_, gradients, segments_, options, scalars_,
                       policy_);
  } else {
    kernels::sgd_step(store_.weights(), master_, exp_avg_, gradients, segments_, config_.sgd_momentum, scalars_,
                      policy_);
  }
}

std::vector<std::pair<std::string, at::Tensor>> Optimizer::state() const {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  if (!master_.is_same(store_.weights())) tensors.emplace_back("fp32_param", master_);
  if (config_.kind == config::OptimizerKind::kAdam) {
    tensors.emplace_back("exp_avg", exp_avg_);
    tensors.emplace_back("exp_avg_sq", exp_avg_sq_);
  } else {
    tensors.emplace_back("momentum_buffer", exp_avg_);
  }
  return tensors;
}

}  // namespace pgpt::optim

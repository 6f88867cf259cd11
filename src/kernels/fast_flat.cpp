// Flat buffers on CUDA: checks, output tensors, launches.

#ifdef PGPT_WITH_CUDA

#include <cstddef>

#include "fast.h"
#include "fast_checks.h"

namespace pgpt::kernels::fast {
namespace {

// The device table is the host table's bytes.
static_assert(sizeof(cuda::SegmentRecord) == sizeof(Segment) &&
              offsetof(cuda::SegmentRecord, end) == offsetof(Segment, end) &&
              offsetof(cuda::SegmentRecord, group) == offsetof(Segment, group) &&
              offsetof(cuda::SegmentRecord, weight_decay_multiplier) == offsetof(Segment, weight_decay_multiplier) &&
              offsetof(cuda::SegmentRecord, norm_weight) == offsetof(Segment, norm_weight));

static_assert(cuda::kJustStopped == StepScalars::kJustStopped && cuda::kStoppedBefore == StepScalars::kStoppedBefore);

constexpr cuda::ScalarPlaces kPlaces{StepScalars::kGradientScale,
                                     StepScalars::kSkip,
                                     StepScalars::kBiasCorrection1,
                                     StepScalars::kBiasCorrection2,
                                     StepScalars::kWeightDecay,
                                     StepScalars::kFirstMomentum,
                                     StepScalars::kCount};

// The kernels search a table sorted by begin, without overlaps.
std::optional<cuda::FlatArguments> flat_arguments(const at::Tensor& flat, const SegmentTable& segments) {
  if (!segments.device.defined() || !segments.device.is_cuda()) return std::nullopt;
  std::int64_t end = 0;
  for (const Segment& segment : segments.host) {
    if (segment.begin < end || segment.end < segment.begin || segment.end > flat.numel()) return std::nullopt;
    end = segment.end;
  }
  return cuda::FlatArguments{flat.numel(), static_cast<const cuda::SegmentRecord*>(segments.device.const_data_ptr()),
                             static_cast<std::int64_t>(segments.host.size())};
}

bool scalar_on_gpu(const at::Tensor& t, at::ScalarType type) {
  return t.is_cuda() && t.numel() == 1 && t.scalar_type() == type;
}

std::optional<cuda::StepArguments> step_arguments(const at::Tensor& weights, const at::Tensor& master,
                                                  const at::Tensor& gradient, const StepScalars& scalars,
                                                  const Policy& policy) {
  if (!policy.fast || !on_gpu(weights) || !on_gpu(master) || !on_gpu(gradient) || !scalars.values.is_cuda())
    return std::nullopt;
  if (!plain(weights) || !plain(master) || !plain(gradient) || master.scalar_type() != at::kFloat) return std::nullopt;
  if (gradient.scalar_type() == at::kHalf || weights.numel() != master.numel() || gradient.numel() != master.numel())
    return std::nullopt;
  cuda::StepArguments step{};
  step.weight_type = *type_of(weights);
  step.gradient_type = *type_of(gradient);
  step.weights = weights.const_data_ptr() == master.const_data_ptr() ? nullptr : weights.mutable_data_ptr();
  step.master = master.mutable_data_ptr<float>();
  step.gradient = gradient.const_data_ptr();
  step.scalars = scalars.values.const_data_ptr<float>();
  step.places = kPlaces;
  return step;
}

bool is_state(const at::Tensor& t, const at::Tensor& master) {
  return t.is_cuda() && t.scalar_type() == at::kFloat && plain(t) && t.numel() == master.numel();
}

}  // namespace

std::optional<at::Tensor> squared_norm(const at::Tensor& flat, const SegmentTable& segments, const Policy& policy) {
  if (!policy.fast || !on_gpu(flat) || !plain(flat)) return std::nullopt;
  const auto arguments = flat_arguments(flat, segments);
  if (!arguments) return std::nullopt;
  const c10::cuda::CUDAGuard guard(flat.device());
  at::Tensor out = at::empty({}, flat.options().dtype(at::kDouble));
  const at::Tensor space = workspace(cuda::flat_reduction_workspace(), flat);
  cuda::squared_norm(*type_of(flat), data(flat), *arguments, out.mutable_data_ptr<double>(), mutable_data(space),
                     stream());
  return out;
}

std::optional<at::Tensor> count_zeros(const at::Tensor& flat, const SegmentTable& segments) {
  if (!on_gpu(flat) || !plain(flat)) return std::nullopt;
  const auto arguments = flat_arguments(flat, segments);
  if (!arguments) return std::nullopt;
  const c10::cuda::CUDAGuard guard(flat.device());
  at::Tensor out = at::empty({}, flat.options().dtype(at::kLong));
  const at::Tensor space = workspace(cuda::flat_reduction_workspace(), flat);
  cuda::count_zeros(*type_of(flat), data(flat), *arguments, out.mutable_data_ptr<std::int64_t>(), mutable_data(space),
                    stream());
  return out;
}

std::optional<at::Tensor> has_non_finite(const at::Tensor& flat) {
  if (!on_gpu(flat) || !plain(flat)) return std::nullopt;
  const c10::cuda::CUDAGuard guard(flat.device());
  at::Tensor out = at::empty({}, flat.options().dtype(at::kFloat));
  cuda::has_non_finite(*type_of(flat), data(flat), flat.numel(), out.mutable_data_ptr<float>(), stream());
  return out;
}

bool finish_norm(const at::Tensor& squared, double clip, const at::Tensor& guard, const at::Tensor& norm,
                 const StepScalars& scalars) {
  if (!scalar_on_gpu(squared, at::kDouble) || !scalar_on_gpu(norm, at::kFloat) || !scalars.values.is_cuda())
    return false;
  if (guard.defined() && !scalar_on_gpu(guard, at::kDouble)) return false;
  const c10::cuda::CUDAGuard device(squared.device());
  cuda::finish_norm(squared.const_data_ptr<double>(), static_cast<const double*>(data(guard)), clip,
                    norm.mutable_data_ptr<float>(), scalars.values.mutable_data_ptr<float>(), kPlaces, stream());
  return true;
}

bool mark_non_finite(const at::Tensor& flat, const SegmentTable& segments, const StepScalars& scalars,
                     const at::Tensor& flags) {
  if (!on_gpu(flat) || !plain(flat) || !scalars.values.is_cuda()) return false;
  const auto arguments = flat_arguments(flat, segments);
  if (!arguments) return false;
  const c10::cuda::CUDAGuard device(flat.device());
  cuda::mark_non_finite(*type_of(flat), data(flat), *arguments,
                        scalars.values.mutable_data_ptr<float>() + StepScalars::kSkip,
                        flags.mutable_data_ptr<std::uint8_t>(), stream());
  return true;
}

bool adam_step(const at::Tensor& weights, const at::Tensor& master, const at::Tensor& exp_avg,
               const at::Tensor& exp_avg_sq, const at::Tensor& gradient, const SegmentTable& segments,
               const AdamOptions& options, const StepScalars& scalars, const Policy& policy) {
  const auto step = step_arguments(weights, master, gradient, scalars, policy);
  if (!step || !is_state(exp_avg, master) || !is_state(exp_avg_sq, master)) return false;
  const auto arguments = flat_arguments(master, segments);
  if (!arguments) return false;
  const c10::cuda::CUDAGuard guard(master.device());
  cuda::adam_step(*arguments, *step, exp_avg.mutable_data_ptr<float>(), exp_avg_sq.mutable_data_ptr<float>(),
                  options.beta1, options.beta2, options.epsilon, stream());
  return true;
}

bool sgd_step(const at::Tensor& weights, const at::Tensor& master, const at::Tensor& momentum_buffer,
              const at::Tensor& gradient, const SegmentTable& segments, double momentum, const StepScalars& scalars,
              const Policy& policy) {
  const auto step = step_arguments(weights, master, gradient, scalars, policy);
  if (!step || !is_state(momentum_buffer, master)) return false;
  const auto arguments = flat_arguments(master, segments);
  if (!arguments) return false;
  const c10::cuda::CUDAGuard guard(master.device());
  cuda::sgd_step(*arguments, *step, momentum_buffer.mutable_data_ptr<float>(), static_cast<float>(momentum), stream());
  return true;
}

}  // namespace pgpt::kernels::fast

#endif  // PGPT_WITH_CUDA

// The end of a gradient norm: clip coefficient and skip flag, kept on the device; and which gradients were bad.

#include "fast.h"
#include "tensor_math.h"

namespace pgpt::kernels {

void finish_norm(const at::Tensor& squared, double clip, const at::Tensor& guard, at::Tensor& norm,
                 StepScalars& scalars) {
  if constexpr (fast::kBuilt) {
    if (fast::finish_norm(squared, clip, guard, norm, scalars)) return;
  }
  const at::Tensor length = squared.reshape({}).sqrt().to(at::kFloat);
  at::Tensor coefficient = at::ones({}, length.options());
  if (clip > 0) {
    const at::Tensor wanted = at::full({}, static_cast<float>(clip), length.options()) / (length + 1e-6F);
    coefficient = at::where(wanted > 1, coefficient, wanted);
  }
  norm.copy_(length);
  scalars.values.select(0, StepScalars::kGradientScale).copy_(coefficient);
  if (!guard.defined()) return;
  at::Tensor skip = scalars.values.select(0, StepScalars::kSkip);
  const at::Tensor good = at::isfinite(length).logical_and(at::isfinite(guard.reshape({})));
  skip.copy_(at::where(skip.eq(0).logical_and(good.logical_not()), StepScalars::kJustStopped, skip));
}

void mark_non_finite(const at::Tensor& flat, const SegmentTable& segments, StepScalars& scalars, at::Tensor& flags) {
  if constexpr (fast::kBuilt) {
    if (fast::mark_non_finite(flat, segments, scalars, flags)) return;
  }
  at::Tensor skip = scalars.values.select(0, StepScalars::kSkip);
  if (skip.item<float>() != StepScalars::kJustStopped) return;
  for (std::size_t i = 0; i < segments.host.size(); ++i) {
    const Segment& segment = segments.host[i];
    const at::Tensor part = flat.narrow(0, segment.begin, segment.end - segment.begin);
    flags.select(0, static_cast<std::int64_t>(i)).copy_(at::isfinite(part).all().logical_not());
  }
  skip.fill_(StepScalars::kStoppedBefore);
}

}  // namespace pgpt::kernels

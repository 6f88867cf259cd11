// The end of a gradient norm: clip coefficient and skip flag, kept on the device.

#include "fast.h"
#include "tensor_math.h"

namespace pgpt::kernels {

void finish_norm(const at::Tensor& squared, const at::Tensor& loss_scale, const at::Tensor& non_finite, double clip,
                 at::Tensor& norm, StepScalars& scalars) {
  if constexpr (fast::kBuilt) {
    if (fast::finish_norm(squared, loss_scale, non_finite, clip, norm, scalars)) return;
  }
  at::Tensor inverse_scale = at::ones({}, squared.options().dtype(at::kDouble));
  if (loss_scale.defined()) inverse_scale = loss_scale.reshape({}).to(at::kDouble).reciprocal();
  const at::Tensor length = (squared.reshape({}).to(at::kDouble).sqrt() * inverse_scale).to(at::kFloat);
  at::Tensor coefficient = at::ones({}, length.options());
  if (clip > 0) {
    const at::Tensor wanted = at::full({}, static_cast<float>(clip), length.options()) / (length + 1e-6F);
    coefficient = at::where(wanted > 1, coefficient, wanted);
  }
  norm.fill_(length);
  scalars.values.select(0, StepScalars::kGradientScale).copy_(coefficient * inverse_scale.to(at::kFloat));
  at::Tensor skip = scalars.values.select(0, StepScalars::kSkip);
  if (non_finite.defined())
    skip.copy_(non_finite.reshape({}) != 0);
  else
    skip.zero_();
}

}  // namespace pgpt::kernels

// LayerNorm and RMSNorm: statistics and sums in fp32, one rounding of each result.

#include "fast.h"
#include "tensor_math.h"

namespace pgpt::kernels {
namespace {

using detail::compute_type;
using detail::widen;

// The multiplier of the normalised row in the compute type of x.
at::Tensor gain(const at::Tensor& weight, const NormOptions& options, at::ScalarType type) {
  const at::Tensor wide = weight.to(type);
  return options.zero_centered ? wide + 1 : wide;
}

}  // namespace

at::Tensor norm_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                        const NormOptions& options, NormStatistics& statistics, const Policy& policy) {
  if constexpr (fast::kBuilt) {
    if (auto y = fast::norm_forward(x, {}, weight, bias, options, nullptr, statistics, policy)) return *y;
  }
  const at::Tensor wide = widen(x);
  const at::Tensor g = gain(weight, options, wide.scalar_type());
  if (options.rms) {
    PGPT_ASSERT(!bias.defined(), "RMSNorm has no bias");
    statistics.mean.reset();
    statistics.rstd = at::mean(at::square(wide), {1}).add_(options.epsilon).rsqrt_();
    return (wide * statistics.rstd.unsqueeze(1)).mul_(g).to(weight.scalar_type());
  }
  const at::Tensor b = bias.defined() ? bias.to(wide.scalar_type()) : at::Tensor();
  auto [y, mean, rstd] = at::native_layer_norm(wide, {x.size(1)}, g, b, options.epsilon);
  statistics.mean = mean.reshape({x.size(0)});
  statistics.rstd = rstd.reshape({x.size(0)});
  return y.to(weight.scalar_type());
}

at::Tensor add_norm_forward(const at::Tensor& residual, const at::Tensor& delta, const at::Tensor& weight,
                            const at::Tensor& bias, const NormOptions& options, at::Tensor& sum,
                            NormStatistics& statistics, const Policy& policy) {
  if constexpr (fast::kBuilt) {
    if (auto y = fast::norm_forward(residual, delta, weight, bias, options, &sum, statistics, policy)) return *y;
  }
  sum = at::add(residual, delta).to(residual.scalar_type());
  return norm_forward(sum, weight, bias, options, statistics, policy);
}

NormGradients norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            const NormOptions& options, const NormStatistics& statistics,
                            const at::Tensor& skip_gradient, const Policy& policy) {
  if constexpr (fast::kBuilt) {
    if (auto gradients = fast::norm_backward(dy, x, weight, bias, options, statistics, skip_gradient, policy))
      return *gradients;
  }
  const at::Tensor wide = widen(x);
  const at::ScalarType type = wide.scalar_type();
  const at::Tensor g = gain(weight, options, type);
  const at::Tensor wide_dy = dy.to(type);
  at::Tensor dx, dweight, dbias;
  if (options.rms) {
    const at::Tensor rstd = statistics.rstd.unsqueeze(1);
    const at::Tensor y = wide * rstd;
    dweight = at::sum(wide_dy * y, {0});
    dx = wide_dy * g;
    const at::Tensor projection = at::mean(dx * y, {1}, true);
    dx = dx.sub_(y * projection).mul_(rstd);
  } else {
    const at::Tensor b = bias.defined() ? bias.to(type) : at::Tensor();
    std::tie(dx, dweight, dbias) =
        at::native_layer_norm_backward(wide_dy, wide, {x.size(1)}, statistics.mean.unsqueeze(1),
                                       statistics.rstd.unsqueeze(1), g, b, {true, true, bias.defined()});
  }
  NormGradients result;
  result.input = dx.to(x.scalar_type());
  if (skip_gradient.defined()) result.input = at::add(skip_gradient, result.input).to(x.scalar_type());
  result.weight = dweight.to(weight.scalar_type());
  if (bias.defined()) result.bias = dbias.to(bias.scalar_type());
  return result;
}

}  // namespace pgpt::kernels

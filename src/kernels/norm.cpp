// LayerNorm and RMSNorm: statistics and sums in fp32, one rounding of each result.

#include <ATen/Dispatch.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "fast.h"
#include "parallel.h"
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

// RMSNorm of fp32 and fp64 rows on the CPU, one pass over memory a direction; ATen would make one for each operation.
bool rms_in_one_pass(const at::Tensor& x, const at::Tensor& weight, const NormOptions& options, const Policy& policy) {
  return policy.fast && options.rms && x.is_cpu() && !detail::is_16bit(x) && x.scalar_type() == weight.scalar_type();
}

constexpr std::int64_t kLanes = 16;    // running sums of a row, in vector registers
constexpr std::int64_t kSumRows = 64;  // rows summed before they join the total, against rounding
constexpr std::int64_t kRowGrain = 8;

// Sum over i of term(i); the order depends on the length alone.
template <class T, class Term>
T sum_of_row(std::int64_t length, const Term& term) {
  T lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (; i < length; ++i) lanes[i % kLanes] += term(i);
  return std::accumulate(lanes, lanes + kLanes, T{0});
}

template <class T>
void rms_forward_rows(const T* x, const T* gain, T* y, T* rstd, std::int64_t rows, std::int64_t width, T epsilon) {
  detail::parallel_for(0, rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const T* from = x + row * width;
      T* to = y + row * width;
      const T squares = sum_of_row<T>(width, [&](std::int64_t i) { return from[i] * from[i]; });
      const T scale = 1 / std::sqrt(squares / static_cast<T>(width) + epsilon);
      rstd[row] = scale;
      for (std::int64_t i = 0; i < width; ++i) to[i] = from[i] * scale * gain[i];
    }
  });
}

// `skip` may be null.
template <class T>
void rms_backward_rows(const T* dy, const T* x, const T* gain, const T* rstd, const T* skip, T* dx, std::int64_t rows,
                       std::int64_t width) {
  detail::parallel_for(0, rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const T *g = dy + row * width, *from = x + row * width;
      T* to = dx + row * width;
      const T scale = rstd[row];
      const T sum = sum_of_row<T>(width, [&](std::int64_t i) { return g[i] * gain[i] * (from[i] * scale); });
      const T projection = sum / static_cast<T>(width);
      for (std::int64_t i = 0; i < width; ++i) to[i] = (g[i] * gain[i] - from[i] * scale * projection) * scale;
      if (skip == nullptr) continue;
      for (std::int64_t i = 0; i < width; ++i) to[i] += skip[row * width + i];
    }
  });
}

// Threads own columns, so the bits do not depend on their number.
template <class T>
void rms_weight_gradient(const T* dy, const T* x, const T* rstd, T* dweight, std::int64_t rows, std::int64_t width) {
  constexpr std::int64_t kColumns = 64;
  detail::parallel_for(0, (width + kColumns - 1) / kColumns, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t first = block * kColumns, count = std::min(kColumns, width - first);
      T total[kColumns] = {};
      for (std::int64_t row = 0; row < rows;) {
        T part[kColumns] = {};
        for (const std::int64_t stop = std::min(rows, row + kSumRows); row < stop; ++row) {
          const T *g = dy + row * width + first, *from = x + row * width + first;
          for (std::int64_t i = 0; i < count; ++i) part[i] += g[i] * (from[i] * rstd[row]);
        }
        for (std::int64_t i = 0; i < count; ++i) total[i] += part[i];
      }
      std::copy(total, total + count, dweight + first);
    }
  });
}

at::Tensor rms_forward(const at::Tensor& x, const at::Tensor& weight, const NormOptions& options, at::Tensor& rstd) {
  const at::Tensor rows = x.contiguous(), g = gain(weight, options, x.scalar_type()).contiguous();
  const at::Tensor y = at::empty_like(rows);
  rstd = at::empty({x.size(0)}, x.options());
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "rms_forward", [&] {
    rms_forward_rows(rows.const_data_ptr<scalar_t>(), g.const_data_ptr<scalar_t>(), y.mutable_data_ptr<scalar_t>(),
                     rstd.mutable_data_ptr<scalar_t>(), x.size(0), x.size(1), static_cast<scalar_t>(options.epsilon));
  });
  return y;
}

NormGradients rms_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                           const NormOptions& options, const at::Tensor& rstd, const at::Tensor& skip_gradient) {
  const at::ScalarType type = x.scalar_type();
  const at::Tensor gradient = dy.to(type).contiguous(), rows = x.contiguous();
  const at::Tensor g = gain(weight, options, type).contiguous();
  const at::Tensor skip = skip_gradient.defined() ? skip_gradient.to(type).contiguous() : at::Tensor();
  NormGradients result;
  result.input = at::empty_like(rows);
  result.weight = at::empty({x.size(1)}, weight.options());
  AT_DISPATCH_FLOATING_TYPES(type, "rms_backward", [&] {
    const auto* from = gradient.const_data_ptr<scalar_t>();
    const auto *values = rows.const_data_ptr<scalar_t>(), *scales = rstd.const_data_ptr<scalar_t>();
    rms_backward_rows(from, values, g.const_data_ptr<scalar_t>(), scales,
                      skip.defined() ? skip.const_data_ptr<scalar_t>() : nullptr,
                      result.input.mutable_data_ptr<scalar_t>(), x.size(0), x.size(1));
    rms_weight_gradient(from, values, scales, result.weight.mutable_data_ptr<scalar_t>(), x.size(0), x.size(1));
  });
  return result;
}

}  // namespace

at::Tensor norm_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                        const NormOptions& options, NormStatistics& statistics, const Policy& policy) {
  if constexpr (fast::kBuilt) {
    if (auto y = fast::norm_forward(x, {}, weight, bias, options, nullptr, statistics, policy)) return *y;
  }
  PGPT_ASSERT(!options.rms || !bias.defined(), "RMSNorm has no bias");
  if (rms_in_one_pass(x, weight, options, policy)) {
    statistics.mean.reset();
    return rms_forward(x, weight, options, statistics.rstd);
  }
  const at::Tensor wide = widen(x);
  const at::Tensor g = gain(weight, options, wide.scalar_type());
  if (options.rms) {
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

namespace {

NormGradients composite_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                                 const at::Tensor& bias, const NormOptions& options, const NormStatistics& statistics,
                                 const at::Tensor& skip_gradient, const Policy& policy) {
  if (rms_in_one_pass(x, weight, options, policy)) {
    return rms_backward(dy, x, weight, options, statistics.rstd, skip_gradient);
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

}  // namespace

NormGradients norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            const NormOptions& options, const NormStatistics& statistics,
                            const at::Tensor& skip_gradient, const Policy& policy, at::Tensor* column_sums) {
  if (column_sums != nullptr) column_sums->reset();
  std::optional<NormGradients> gradients;
  if constexpr (fast::kBuilt) {
    gradients = fast::norm_backward(dy, x, weight, bias, options, statistics, skip_gradient, policy, column_sums);
  }
  if (!gradients) {
    gradients = composite_backward(dy, x, weight, bias, options, statistics, skip_gradient, policy);
  }
  if (column_sums != nullptr && !column_sums->defined()) *column_sums = column_sum(gradients->input);
  return *gradients;
}

}  // namespace pgpt::kernels

// Activations of the feed-forward block and their gradients, with the reference's constants.

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numbers>

#include "fast.h"
#include "parallel.h"
#include "tensor_math.h"

namespace pgpt::kernels {
namespace {

using detail::rounded;

// tanh GELU: sqrt(2/pi), the cubic coefficient, and 3 * sqrt(2/pi) * the coefficient as the reference writes it.
constexpr double kGeluScale = 0.79788456;
constexpr double kGeluCubic = 0.044715;
constexpr double kGeluDerivative = 0.1070322243;
constexpr double kQuickGelu = 1.702;

bool is_gated(ActivationKind kind) { return kind == ActivationKind::kSwiglu || kind == ActivationKind::kQuickGeglu; }

// x + bias in the compute type, rounded to x's type first without fused rounding.
at::Tensor input_of(const at::Tensor& x, const at::Tensor& bias, const ActivationOptions& options) {
  const at::Tensor wide = detail::widen(x);
  if (!bias.defined()) return wide;
  const at::Tensor sum = wide + bias;
  return options.fused_rounding ? sum : rounded(sum, x.scalar_type());
}

at::Tensor gelu_tanh_argument(const at::Tensor& u) { return at::tanh(kGeluScale * u * (1 + kGeluCubic * u * u)); }

struct Halves {
  at::Tensor gate, linear;  // clamped
};

Halves halves_of(const at::Tensor& u, const ActivationOptions& options) {
  const std::int64_t width = u.size(1) / 2;
  Halves halves{u.narrow(1, 0, width), u.narrow(1, width, width)};
  if (options.clamp > 0) {
    halves.gate = at::clamp_max(halves.gate, options.clamp);
    halves.linear = at::clamp(halves.linear, -options.clamp, options.clamp);
  }
  return halves;
}

double gate_slope(ActivationKind kind) { return kind == ActivationKind::kQuickGeglu ? kQuickGelu : 1.0; }

// Type to which intermediate results are rounded: none beyond the compute type with fused rounding.
at::ScalarType intermediate_type(const at::Tensor& x, const ActivationOptions& options) {
  return options.fused_rounding ? detail::compute_type(x) : x.scalar_type();
}

at::Tensor gated_forward(const at::Tensor& x, const at::Tensor& bias, const ActivationOptions& options) {
  const at::ScalarType step = intermediate_type(x, options);
  const Halves halves = halves_of(input_of(x, bias, options), options);
  const double slope = gate_slope(options.kind);
  const at::Tensor gate = rounded(halves.gate * at::sigmoid(slope * halves.gate), step);
  const at::Tensor linear = options.glu_offset != 0 ? rounded(halves.linear + options.glu_offset, step) : halves.linear;
  return (gate * linear).to(x.scalar_type());
}

at::Tensor gated_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& bias,
                          const ActivationOptions& options) {
  const at::ScalarType step = intermediate_type(x, options);
  const at::Tensor u = input_of(x, bias, options);
  const Halves halves = halves_of(u, options);
  const double slope = gate_slope(options.kind);
  const at::Tensor g = detail::widen(dy);
  const at::Tensor sigmoid = at::sigmoid(slope * halves.gate);
  const at::Tensor linear = options.glu_offset != 0 ? rounded(halves.linear + options.glu_offset, step) : halves.linear;
  const at::Tensor derivative = sigmoid * (1 + slope * halves.gate * (1 - sigmoid));
  at::Tensor d_gate = rounded(g * linear, step).mul_(derivative);
  at::Tensor d_linear = g * rounded(halves.gate * sigmoid, step);
  if (options.clamp > 0) {
    const std::int64_t width = u.size(1) / 2;
    d_gate = d_gate.masked_fill_(u.narrow(1, 0, width) > options.clamp, 0.0);
    d_linear = d_linear.masked_fill_(at::abs(u.narrow(1, width, width)) > options.clamp, 0.0);
  }
  return at::cat({d_gate.to(x.scalar_type()), d_linear.to(x.scalar_type())}, 1);
}

at::Tensor forward_rows(const at::Tensor& x, const at::Tensor& bias, const ActivationOptions& options) {
  if (is_gated(options.kind)) return gated_forward(x, bias, options);
  const at::Tensor u = input_of(x, bias, options);
  switch (options.kind) {
    case ActivationKind::kGeluTanh:
      return (0.5 * u).mul_(1 + gelu_tanh_argument(u)).to(x.scalar_type());
    case ActivationKind::kSquaredRelu:
      return at::square(at::relu(u)).to(x.scalar_type());
    default:
      return (0.5 * u).mul_(1 + at::erf(u * (1 / std::numbers::sqrt2))).to(x.scalar_type());
  }
}

at::Tensor backward_rows(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& bias,
                         const ActivationOptions& options) {
  if (is_gated(options.kind)) return gated_backward(dy, x, bias, options);
  const at::Tensor u = input_of(x, bias, options);
  const at::Tensor g = detail::widen(dy);
  switch (options.kind) {
    case ActivationKind::kGeluTanh: {
      const at::Tensor t = gelu_tanh_argument(u);
      const at::Tensor derivative =
          (0.5 * u).mul_((1 - t * t).mul_(kGeluScale + kGeluDerivative * u * u)).add_(0.5 * (1 + t));
      return (derivative * g).to(x.scalar_type());
    }
    case ActivationKind::kSquaredRelu:
      return (2 * at::relu(u)).mul_(g).to(x.scalar_type());
    default: {
      // Density of the normal distribution: 1 / sqrt(2 pi) = 1 / (sqrt2 sqrt(pi)).
      const double density = std::numbers::inv_sqrtpi / std::numbers::sqrt2;
      const at::Tensor cdf = (1 + at::erf(u * (1 / std::numbers::sqrt2))).mul_(0.5);
      return (cdf + u * at::exp(-0.5 * u * u).mul_(density)).mul_(g).to(x.scalar_type());
    }
  }
}

// Whether libtorch has a fused operation for this function. Taken for fp32 on the CPU: its constants are the exact
// ones, which differ from the reference's by less than fp32 resolves.
bool libtorch_fuses(const at::Tensor& x, const ActivationOptions& options, const Policy& policy) {
  const bool known = options.kind == ActivationKind::kGeluTanh || options.kind == ActivationKind::kGeluErf ||
                     options.kind == ActivationKind::kSwiglu;
  return known && policy.fast && x.is_cpu() && x.scalar_type() == at::kFloat && options.clamp == 0 &&
         options.glu_offset == 0;
}

const char* gelu_form(ActivationKind kind) { return kind == ActivationKind::kGeluTanh ? "tanh" : "none"; }

at::Tensor libtorch_forward(const at::Tensor& x, const at::Tensor& bias, const ActivationOptions& options) {
  const at::Tensor u = input_of(x, bias, options);
  if (!is_gated(options.kind)) return at::gelu(u, gelu_form(options.kind));
  const Halves halves = halves_of(u, options);
  return at::silu(halves.gate).mul_(halves.linear);
}

at::Tensor libtorch_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& bias,
                             const ActivationOptions& options) {
  const at::Tensor u = input_of(x, bias, options);
  if (!is_gated(options.kind)) return at::gelu_backward(dy, u, gelu_form(options.kind));
  const Halves halves = halves_of(u, options);
  const at::Tensor gradient = at::empty_like(u);
  Halves parts = halves_of(gradient, options);
  at::silu_backward_out(parts.gate, at::mul(dy, halves.linear), halves.gate);
  at::silu_out(parts.linear, halves.gate);
  parts.linear.mul_(dy);
  return gradient;
}

// The result of function(first row, rows) for all rows of x. On CPU in blocks whose temporaries stay in the cache,
// shared among the threads.
template <class Function>
at::Tensor in_row_blocks(const at::Tensor& x, std::int64_t width, const Function& function) {
  const std::int64_t tokens = x.size(0);
  const std::int64_t rows = std::max<std::int64_t>(1, (std::int64_t{1} << 16) / std::max<std::int64_t>(1, x.size(1)));
  if (x.is_cuda() || tokens <= rows) return function(0, tokens);
  const at::Tensor out = at::empty({tokens, width}, x.options());
  detail::parallel_for(0, (tokens + rows - 1) / rows, 1, [&](std::int64_t begin, std::int64_t end) {
    const at::NoGradGuard no_grad;  // a thread's own setting
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = i * rows, count = std::min(rows, tokens - first);
      out.narrow(0, first, count).copy_(function(first, count));
    }
  });
  return out;
}

}  // namespace

at::Tensor activation_forward(const at::Tensor& x, const at::Tensor& bias, const ActivationOptions& options,
                              const Policy& policy) {
  if constexpr (fast::kBuilt) {
    if (auto y = fast::activation_forward(x, bias, options, policy)) return *y;
  }
  const auto& rows_function = libtorch_fuses(x, options, policy) ? libtorch_forward : forward_rows;
  return in_row_blocks(
      x, is_gated(options.kind) ? x.size(1) / 2 : x.size(1),
      [&](std::int64_t first, std::int64_t count) { return rows_function(x.narrow(0, first, count), bias, options); });
}

at::Tensor activation_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& bias,
                               const ActivationOptions& options, const Policy& policy, at::Tensor* column_sums) {
  if (column_sums != nullptr) column_sums->reset();
  std::optional<at::Tensor> dx;
  if constexpr (fast::kBuilt) dx = fast::activation_backward(dy, x, bias, options, policy, column_sums);
  if (!dx) {
    const auto& rows_function = libtorch_fuses(x, options, policy) ? libtorch_backward : backward_rows;
    dx = in_row_blocks(x, x.size(1), [&](std::int64_t first, std::int64_t count) {
      return rows_function(dy.narrow(0, first, count), x.narrow(0, first, count), bias, options);
    });
  }
  if (column_sums != nullptr && !column_sums->defined()) *column_sums = column_sum(*dx);
  return *dx;
}

}  // namespace pgpt::kernels

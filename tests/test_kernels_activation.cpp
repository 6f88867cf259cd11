// Activations: values and gradients against autograd, the reference's constants, rounding points, gates, clamp and
// offset.

#include <cmath>

#include "pgpt/kernels/kernels.h"
#include "support/tensor_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

constexpr ActivationKind kKinds[] = {ActivationKind::kGeluTanh, ActivationKind::kGeluErf, ActivationKind::kSwiglu,
                                     ActivationKind::kSquaredRelu, ActivationKind::kQuickGeglu};

at::Tensor reference(const at::Tensor& x, const at::Tensor& bias, const ActivationOptions& options) {
  const at::Tensor u = bias.defined() ? x + bias : x;
  const std::int64_t half = u.size(1) / 2;
  switch (options.kind) {
    case ActivationKind::kGeluTanh:
      return 0.5 * u * (1 + at::tanh(0.79788456 * (u + 0.044715 * u * u * u)));
    case ActivationKind::kGeluErf:
      return 0.5 * u * (1 + at::erf(u / std::sqrt(2.0)));
    case ActivationKind::kSquaredRelu:
      return at::clamp_min(u, 0) * at::clamp_min(u, 0);
    default: {
      at::Tensor gate = u.narrow(1, 0, half), linear = u.narrow(1, half, half);
      if (options.clamp > 0) {
        gate = at::clamp_max(gate, options.clamp);
        linear = at::clamp(linear, -options.clamp, options.clamp);
      }
      const double slope = options.kind == ActivationKind::kSwiglu ? 1.0 : 1.702;
      return gate / (1 + at::exp(-slope * gate)) * (linear + options.glu_offset);
    }
  }
}

}  // namespace

TEST_CASE("activations and their gradients agree with autograd in fp64", "[cpu]") {
  const Policy policy;
  for (const ActivationKind kind : kKinds) {
    for (const bool with_bias : {false, true}) {
      for (const bool extras : {false, true}) {
        ActivationOptions options;
        options.kind = kind;
        if (extras) {
          options.glu_offset = 1.0;
          options.clamp = 0.8;
        }
        const bool gated = kind == ActivationKind::kSwiglu || kind == ActivationKind::kQuickGeglu;
        const at::Tensor x = leaf(random_normal({5, 14}, 1) * 3),
                         bias = with_bias ? leaf(random_normal({14}, 2)) : at::Tensor();
        const at::Tensor dy = random_normal({5, gated ? 7 : 14}, 3);
        const at::Tensor expected = reference(x, bias, options);
        expected.backward(dy);
        const c10::NoGradGuard guard;
        // Some twenty operations on values below 13^2 * 5.
        const double exact = 20 * 13 * 13 * 5 * kRoundoff64;
        require_within(activation_forward(x, bias, options, policy), expected, exact);
        // The reference's constant 0.1070322243 differs from 3 * 0.79788456 * 0.044715 by 4e-11, times |u|^3 sech^2 <
        // 13^3 and |dy| < 5.
        const double constant = std::abs(0.1070322243 - 3 * 0.79788456 * 0.044715);
        const double bound = kind == ActivationKind::kGeluTanh ? exact + constant * 13 * 13 * 13 * 5 : exact;
        const at::Tensor dx = activation_backward(dy, x, bias, options, policy);
        require_within(dx, x.grad(), bound);
        if (with_bias) require_within(column_sum(dx), bias.grad(), 5 * bound);
      }
    }
  }
}

TEST_CASE("the tanh gelu gradient has the reference's constant", "[cpu]") {
  const double u = 1.5, t = std::tanh(0.79788456 * u * (1 + 0.044715 * u * u));
  const double expected = 0.5 * u * ((1 - t * t) * (0.79788456 + 0.1070322243 * u * u)) + 0.5 * (1 + t);
  ActivationOptions options;
  options.kind = ActivationKind::kGeluTanh;
  const at::Tensor dx =
      activation_backward(at::ones({1, 1}, at::kDouble), at::full({1, 1}, u, at::kDouble), {}, options, {});
  CHECK(std::abs(dx.item<double>() - expected) <= 8 * kRoundoff64 * 2);
}

TEST_CASE("bf16 activations round once, or bias sum and gate first", "[cpu]") {
  const Policy policy;
  const std::int64_t tokens = 64, width = 128;
  const at::Tensor x = random_normal({tokens, width}, 1).to(at::kBFloat16),
                   bias = random_normal({width}, 2).to(at::kBFloat16);
  for (const ActivationKind kind : kKinds) {
    INFO("kind " << static_cast<int>(kind));
    ActivationOptions options;
    options.kind = kind;
    const bool gated = kind == ActivationKind::kSwiglu || kind == ActivationKind::kQuickGeglu;
    const at::Tensor dy = random_normal({tokens, gated ? width / 2 : width}, 3).to(at::kBFloat16);
    const at::Tensor sum = x.to(at::kDouble) + bias.to(at::kDouble), rounded_sum = to_bf16_values(sum);
    // fp32 errors of some 16 roundoffs move a result over a rounding boundary with probability 16 * 2^-24 / 2^-8 <
    // 1/4000; cancellation in 1 + tanh and 1 + erf of negative arguments loses up to 8 bits more for the few elements
    // far out: 1 in 100 is a safe limit.
    const std::int64_t allowed = tokens * width / 100;
    at::Tensor results[2];
    for (const bool fused : {true, false}) {
      options.fused_rounding = fused;
      const at::Tensor u = fused ? sum : rounded_sum;
      at::Tensor expected;
      if (!gated || fused) {
        expected = to_bf16_values(reference(u, {}, options));
      } else {
        const at::Tensor gate = u.narrow(1, 0, width / 2), linear = u.narrow(1, width / 2, width / 2);
        const double slope = kind == ActivationKind::kSwiglu ? 1.0 : 1.702;
        expected = to_bf16_values(to_bf16_values(gate / (1 + at::exp(-slope * gate))) * linear);
      }
      results[fused ? 1 : 0] = activation_forward(x, bias, options, policy);
      CHECK(mismatches(results[fused ? 1 : 0].to(at::kDouble), expected) <= allowed);
      // The gradient: one rounding of the fp64 gradient at u; unfused gates have two more roundings on the way.
      const at::Tensor point = leaf(u);
      reference(point, {}, options).backward(dy.to(at::kDouble));
      const c10::NoGradGuard guard;
      const at::Tensor dx = activation_backward(dy, x, bias, options, policy);
      REQUIRE(dx.scalar_type() == at::kBFloat16);
      const double roundings = gated && !fused ? 2 : 1;
      // fp32 values near 1 enter sums whose result may be small: 32 roundoffs of values below 5 * 5.
      require_within(dx, point.grad(), point.grad().abs() * (roundings * 1.01 * kRoundoffBf16) + 32 * 25 * kRoundoff32);
    }
    CHECK(mismatches(results[0], results[1]) > 4 * allowed);
  }
}

TEST_CASE("fp32 activations stay within fp32 rounding of fp64", "[cpu]") {
  // 70 rows of 2000 are three blocks on CPU.
  const at::Tensor x = (random_normal({70, 2000}, 1) * 2).to(at::kFloat),
                   bias = random_normal({2000}, 2).to(at::kFloat);
  for (const ActivationKind kind : kKinds) {
    for (const bool with_bias : {false, true}) {
      INFO("kind " << static_cast<int>(kind) << " bias " << with_bias);
      ActivationOptions options;
      options.kind = kind;
      const bool gated = kind == ActivationKind::kSwiglu || kind == ActivationKind::kQuickGeglu;
      const at::Tensor b = with_bias ? bias : at::Tensor(),
                       dy = random_normal({70, gated ? 1000 : 2000}, 3).to(at::kFloat);
      const at::Tensor wide = leaf(x.to(at::kDouble));
      const at::Tensor expected = reference(wide, with_bias ? bias.to(at::kDouble) : b, options);
      expected.backward(dy.to(at::kDouble));
      const c10::NoGradGuard guard;
      // At most 32 roundings of values no larger than (1 + |u|)^2 in the result and (1 + |u|)^3 times |dy| < 6 in the
      // gradient (u^2 * u * sech^2 of the tanh form); the gated kinds multiply by the other half. |u| < 16.
      const at::Tensor u = 1 + (with_bias ? x + bias : x).to(at::kDouble).abs();
      const at::Tensor other = gated ? u.roll(1000, 1) : u;
      const at::Tensor size = gated ? (u * other).narrow(1, 0, 1000) : u * u;
      require_within(activation_forward(x, b, options, {}), expected, size * (32 * kRoundoff32));
      require_within(activation_backward(dy, x, b, options, {}), wide.grad(), u * u * other * (6 * 32 * kRoundoff32));
    }
  }
}

TEST_CASE("activations do not depend on the blocks of rows they are computed in", "[cpu]") {
  // 300 rows of 2000 are ten blocks on CPU.
  const at::Tensor x = random_normal({300, 2000}, 1).to(at::kBFloat16),
                   bias = random_normal({2000}, 2).to(at::kBFloat16);
  for (const ActivationKind kind : kKinds) {
    ActivationOptions options;
    options.kind = kind;
    const at::Tensor y = activation_forward(x, bias, options, {});
    const at::Tensor dx = activation_backward(y, x, bias, options, {});
    for (const std::int64_t first : {0, 130, 150}) {
      require_equal(y.narrow(0, first, 10), activation_forward(x.narrow(0, first, 10), bias, options, {}));
      require_equal(dx.narrow(0, first, 10),
                    activation_backward(y.narrow(0, first, 10), x.narrow(0, first, 10), bias, options, {}));
    }
  }
}

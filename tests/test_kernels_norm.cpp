// LayerNorm and RMSNorm against autograd and against fp64 arithmetic with their rounding points.

#include <algorithm>
#include <utility>
#include <vector>

#include "pgpt/kernels/kernels.h"
#include "support/tensor_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

at::Tensor reference(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                     const NormOptions& options) {
  const at::Tensor gain = options.zero_centered ? weight + 1 : weight;
  if (options.rms) return x * (x * x).mean({1}, true).add(options.epsilon).rsqrt() * gain;
  const at::Tensor centered = x - x.mean({1}, true);
  const at::Tensor y = centered * (centered * centered).mean({1}, true).add(options.epsilon).rsqrt() * gain;
  return bias.defined() ? y + bias : y;
}

std::vector<NormOptions> all_options() {
  std::vector<NormOptions> result;
  for (const bool rms : {false, true}) {
    for (const bool zero_centered : {false, true}) result.push_back({1e-5, rms, zero_centered});
  }
  return result;
}

struct Case {
  NormOptions options;
  std::int64_t tokens, width;
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const NormOptions& options : all_options()) {
    for (const auto& [tokens, width] : {std::pair<std::int64_t, std::int64_t>{1, 37}, {11, 37}, {150, 131}}) {
      cases.push_back({options, tokens, width});
    }
  }
  return cases;
}

}  // namespace

TEST_CASE("norms and their gradients agree with autograd in fp64", "[cpu]") {
  // With `fast` RMSNorm runs in loops of this project, in blocks of 64 columns and 64 rows.
  for (const bool fast : {true, false}) {
    const Policy policy{.fast = fast};
    for (const auto& [options, tokens, width] : all_cases()) {
      const at::Tensor residual = leaf(random_normal({tokens, width}, 1)),
                       delta = leaf(random_normal({tokens, width}, 2));
      const at::Tensor weight = leaf(random_normal({width}, 3));
      const at::Tensor bias = options.rms ? at::Tensor() : leaf(random_normal({width}, 4));
      const at::Tensor dy = random_normal({tokens, width}, 5), skip = random_normal({tokens, width}, 6);
      const at::Tensor x = residual + delta;
      const at::Tensor expected = reference(x, weight, bias, options);
      // The residual stream goes on to the next layer, whose gradient is `skip`.
      ((expected * dy).sum() + (x * skip).sum()).backward();
      const c10::NoGradGuard guard;
      at::Tensor sum;
      NormStatistics statistics;
      const at::Tensor y = add_norm_forward(residual, delta, weight, bias, options, sum, statistics, policy);
      // Three chained sums over a row (or over the tokens) of products of at most four values below 5.
      const double bound = gradient_bound(3, static_cast<double>(std::max(width, tokens)), 5 * 5 * 5 * 5);
      require_within(sum, x, 0.0);
      require_within(y, expected, bound);
      REQUIRE(statistics.rstd.sizes().vec() == std::vector<std::int64_t>{tokens});
      REQUIRE(statistics.mean.defined() == !options.rms);
      const NormGradients gradients = norm_backward(dy, sum, weight, bias, options, statistics, skip, policy);
      require_within(gradients.input, residual.grad(), bound);
      require_within(gradients.weight, weight.grad(), bound);
      REQUIRE(gradients.bias.defined() == bias.defined());
      if (bias.defined()) require_within(gradients.bias, bias.grad(), bound);
      const at::Tensor without = norm_backward(dy, sum, weight, bias, options, statistics, {}, policy).input;
      require_within(without + skip, residual.grad(), bound);
    }
  }
}

TEST_CASE("an fp32 RMSNorm stays within fp32 rounding of fp64", "[cpu]") {
  const std::int64_t tokens = 70, width = 300;
  NormOptions options;
  options.rms = true;
  const at::Tensor x = random_normal({tokens, width}, 1).to(at::kFloat),
                   weight = random_normal({width}, 2).to(at::kFloat),
                   dy = random_normal({tokens, width}, 3).to(at::kFloat);
  const at::Tensor wide_x = leaf(x.to(at::kDouble)), wide_weight = leaf(weight.to(at::kDouble));
  const at::Tensor expected = reference(wide_x, wide_weight, {}, options);
  expected.backward(dy.to(at::kDouble));
  const c10::NoGradGuard guard;
  NormStatistics statistics;
  const at::Tensor y = norm_forward(x, weight, {}, options, statistics, {});
  const NormGradients gradients = norm_backward(dy, x, weight, {}, options, statistics, {}, {});
  // rstd comes from a sum of `width` positive terms: (width + 8) roundoffs relative, halved by the root; then products.
  const double row = (static_cast<double>(width) / 2 + 12) * kRoundoff32;
  require_within(y, expected, expected.abs() * row + 1e-30);
  // dx is rstd * (dy g - y' c) with c a mean of `width` products; absolute values bound both terms.
  const at::Tensor normalised = (x.to(at::kDouble) * statistics.rstd.to(at::kDouble).unsqueeze(1)).abs();
  const at::Tensor branch = (dy.to(at::kDouble) * weight.to(at::kDouble)).abs();
  const at::Tensor magnitude =
      (branch + normalised * (branch * normalised).mean({1}, true)) * statistics.rstd.to(at::kDouble).unsqueeze(1);
  require_within(gradients.input, wide_x.grad(), magnitude * (4 * row));
  const at::Tensor sums = (dy.to(at::kDouble).abs() * normalised).sum({0});
  require_within(gradients.weight, wide_weight.grad(), sums * (row + (tokens + 4) * kRoundoff32));
}

TEST_CASE("bf16 norms round once and keep fp32 statistics", "[cpu]") {
  const Policy policy;
  const std::int64_t tokens = 33, width = 256;
  for (const NormOptions& options : all_options()) {
    // A large mean would spoil a variance from sums of squares in fp32.
    const at::Tensor x = (random_normal({tokens, width}, 1) + 30).to(at::kBFloat16);
    const at::Tensor weight = random_normal({width}, 2).to(at::kBFloat16);
    const at::Tensor bias = options.rms ? at::Tensor() : random_normal({width}, 3).to(at::kBFloat16);
    NormStatistics statistics;
    const at::Tensor y = norm_forward(x, weight, bias, options, statistics, policy);
    REQUIRE(y.scalar_type() == at::kBFloat16);
    REQUIRE(statistics.rstd.scalar_type() == at::kFloat);
    const at::Tensor wide = x.to(at::kDouble);
    const at::Tensor expected =
        reference(wide, weight.to(at::kDouble), options.rms ? bias : bias.to(at::kDouble), options);
    // fp32: mean and variance are sums of `width` values of size 35; after centering (values of size 1) the error of
    // the mean remains.
    const double fp32_error = width * kRoundoff32 * 35 * 5;
    require_within(y, expected, expected.abs() * kRoundoffBf16 + fp32_error);
  }
}

TEST_CASE("an fp32 residual stream keeps its precision through a 16-bit norm", "[cpu]") {
  const Policy policy;
  const NormOptions options;
  const at::Tensor residual = random_normal({4, 16}, 1).to(at::kFloat),
                   delta = random_normal({4, 16}, 2).to(at::kBFloat16);
  const at::Tensor weight = random_normal({16}, 3).to(at::kBFloat16), bias = random_normal({16}, 4).to(at::kBFloat16);
  at::Tensor sum;
  NormStatistics statistics;
  const at::Tensor y = add_norm_forward(residual, delta, weight, bias, options, sum, statistics, policy);
  CHECK(y.scalar_type() == at::kBFloat16);
  require_equal(sum, residual + delta.to(at::kFloat));
  const NormGradients gradients = norm_backward(y, sum, weight, bias, options, statistics, sum, policy);
  CHECK(gradients.input.scalar_type() == at::kFloat);
  CHECK(gradients.weight.scalar_type() == at::kBFloat16);
  CHECK(gradients.bias.scalar_type() == at::kBFloat16);
}

TEST_CASE("the branch gradient of a norm is rounded before it meets the skip gradient", "[cpu]") {
  const Policy policy;
  const NormOptions options;
  const at::Tensor x = random_normal({64, 128}, 1).to(at::kBFloat16),
                   dy = random_normal({64, 128}, 2).to(at::kBFloat16);
  const at::Tensor weight = random_normal({128}, 3).to(at::kBFloat16), bias = random_normal({128}, 4).to(at::kBFloat16);
  const at::Tensor skip = random_normal({64, 128}, 5).to(at::kBFloat16);
  NormStatistics statistics;
  (void)norm_forward(x, weight, bias, options, statistics, policy);
  const at::Tensor branch = norm_backward(dy, x, weight, bias, options, statistics, {}, policy).input;
  const at::Tensor both = norm_backward(dy, x, weight, bias, options, statistics, skip, policy).input;
  require_equal(both, (branch.to(at::kDouble) + skip.to(at::kDouble)).to(at::kFloat).to(at::kBFloat16));
}

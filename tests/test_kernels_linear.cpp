// Matrix products: gradients against autograd, accumulation in fp32, rounding points.

#include "pgpt/kernels/kernels.h"
#include "support/tensor_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

at::Tensor row(std::initializer_list<double> values, at::ScalarType type) {
  return at::tensor(std::vector<double>(values), at::kDouble).view({1, -1}).to(type);
}

}  // namespace

TEST_CASE("linear and its gradients agree with autograd in fp64", "[cpu]") {
  for (const std::int64_t tokens : {1, 7, 32}) {
    const std::int64_t inputs = 13, outputs = 9;
    const at::Tensor x = leaf(random_normal({tokens, inputs}, 1)), w = leaf(random_normal({outputs, inputs}, 2));
    const at::Tensor bias = leaf(random_normal({outputs}, 3)), dy = random_normal({tokens, outputs}, 4);
    const at::Tensor expected = at::matmul(x, w.t()) + bias;
    expected.backward(dy);
    const c10::NoGradGuard guard;
    // One contraction whose terms are products of two values below 5.
    const double bound = gradient_bound(2, 32, 25 * 32);
    require_within(kernels::linear(x, w, bias), expected, bound);
    require_within(kernels::linear(x, w, bias, false), expected, bound);
    require_within(linear_input_gradient(dy, w), x.grad(), bound);
    require_within(linear_weight_gradient(dy, x, at::kDouble), w.grad(), bound);
    require_within(column_sum(dy), bias.grad(), bound);
    at::Tensor main = at::ones({outputs, inputs}, at::kDouble);
    add_weight_gradient(main, dy, x);
    require_within(main, w.grad() + 1, bound);
  }
}

TEST_CASE("16-bit products are the exact product rounded once", "[cpu]") {
  struct Type {
    at::ScalarType type;
    double roundoff;
  };
  for (const Type type : {Type{at::kBFloat16, kRoundoffBf16}, Type{at::kHalf, kRoundoffHalf}}) {
    // Sizes below and above oneDNN's threshold for small products.
    for (const std::int64_t size : {5, 64}) {
      const std::int64_t tokens = size + 2, inputs = 3 * size, outputs = size;
      const at::Tensor x = random_normal({tokens, inputs}, 1).to(type.type),
                       w = random_normal({outputs, inputs}, 2).to(type.type);
      const at::Tensor bias = random_normal({outputs}, 3).to(type.type),
                       dy = random_normal({tokens, outputs}, 4).to(type.type);
      const auto wide = [](const at::Tensor& t) { return t.to(at::kDouble); };
      // fp32 sums of n exact products: n roundoffs of the sum of absolute values; then one rounding (small results:
      // subnormals of fp16).
      const auto check = [&](const at::Tensor& actual, const at::Tensor& expected, const at::Tensor& absolute,
                             double terms) {
        REQUIRE(actual.scalar_type() == type.type);
        require_within(actual, expected, expected.abs() * type.roundoff + absolute * (terms * kRoundoff32) + 0x1p-25);
      };
      check(kernels::linear(x, w), wide(x).mm(wide(w).t()), wide(x).abs().mm(wide(w).abs().t()), 3 * size);
      check(kernels::linear(x, w, bias), wide(x).mm(wide(w).t()) + wide(bias),
            wide(x).abs().mm(wide(w).abs().t()) + wide(bias).abs(), 3 * size + 1);
      check(linear_input_gradient(dy, w), wide(dy).mm(wide(w)), wide(dy).abs().mm(wide(w).abs()), size);
      check(linear_weight_gradient(dy, x, type.type), wide(dy).t().mm(wide(x)), wide(dy).t().abs().mm(wide(x).abs()),
            size + 2);
      check(column_sum(dy), wide(dy).sum(0), wide(dy).abs().sum(0), size + 2);
    }
  }
}

TEST_CASE("the bias of a linear joins before or after the rounding, as asked", "[cpu]") {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    // u is half the spacing of numbers just above 1: 1 + u rounds to even, down to 1.
    const double u = type == at::kBFloat16 ? 0x1p-8 : 0x1p-11;
    const at::Tensor x = row({1, u}, type), w = row({1, 1}, type), bias = row({u}, type).view({1});
    CHECK(kernels::linear(x, w, bias, true).item<double>() == 1 + 2 * u);
    CHECK(kernels::linear(x, w, bias, false).item<double>() == 1);
  }
}

TEST_CASE("weight gradients of 16-bit tensors reach fp32 without a rounding to 16 bits", "[cpu]") {
  const at::Tensor dy = random_normal({50, 6}, 1).to(at::kBFloat16), x = random_normal({50, 10}, 2).to(at::kBFloat16);
  const at::Tensor exact = dy.to(at::kDouble).t().mm(x.to(at::kDouble));
  const at::Tensor absolute = dy.to(at::kDouble).abs().t().mm(x.to(at::kDouble).abs());
  const at::Tensor bound = (absolute + 1) * (51 * kRoundoff32);
  at::Tensor main = at::ones({6, 10}, at::kFloat);
  add_weight_gradient(main, dy, x);
  require_within(main, exact + 1, bound);
  const at::Tensor wide = linear_weight_gradient(dy, x, at::kFloat);
  REQUIRE(wide.scalar_type() == at::kFloat);
  require_within(wide, exact, bound);
  // The same through bf16 is outside the bound somewhere, so the check above means something.
  CHECK(max_abs(linear_weight_gradient(dy, x, at::kBFloat16).to(at::kDouble) - exact) > max_abs(bound));
}

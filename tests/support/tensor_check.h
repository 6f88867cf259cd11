#pragma once

// Comparisons of tensors, and what tests need to use libtorch autograd as the reference.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/catch.h"

namespace pgpt::test {

/// Unit roundoffs: the relative error of one rounding.
inline constexpr double kRoundoff64 = 0x1p-53;
inline constexpr double kRoundoff32 = 0x1p-24;
inline constexpr double kRoundoffBf16 = 0x1p-8;
inline constexpr double kRoundoffHalf = 0x1p-11;

/// Standard normal fp64 values from a fixed seed.
inline at::Tensor random_normal(at::IntArrayRef shape, std::uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randn(shape, generator, at::TensorOptions().dtype(at::kDouble));
}

/// A copy of `t` that collects a gradient.
inline at::Tensor leaf(const at::Tensor& t) { return t.detach().clone().set_requires_grad(true); }

/// |actual - expected| <= bound for every element; NaN fails. The first element that fails is named.
inline void require_within(const at::Tensor& actual, const at::Tensor& expected, const at::Tensor& bound) {
  REQUIRE(actual.sizes().vec() == expected.sizes().vec());
  const at::Tensor difference = (actual.to(at::kDouble).cpu() - expected.to(at::kDouble).cpu()).abs();
  const at::Tensor limit = bound.to(at::kDouble).cpu();
  const at::Tensor bad = at::logical_not(difference <= limit).flatten();
  if (bad.any().item<bool>()) {
    const auto at_index = bad.nonzero()[0].item<std::int64_t>();
    INFO("first of " << bad.sum().item<std::int64_t>() << " at flat index " << at_index << " of " << actual.sizes());
    INFO("actual " << actual.flatten()[at_index].item<double>() << ", expected "
                   << expected.flatten()[at_index].item<double>() << ", difference "
                   << difference.flatten()[at_index].item<double>() << ", bound "
                   << limit.expand_as(difference).flatten()[at_index].item<double>());
    FAIL("tensors differ");
  }
  CHECK(true);
}
inline void require_within(const at::Tensor& actual, const at::Tensor& expected, double bound) {
  require_within(actual, expected, at::full({}, bound, at::TensorOptions().dtype(at::kDouble)));
}

/// Equal dtype, shape and bits (as far as == tells: +0 and -0 are equal).
inline void require_equal(const at::Tensor& actual, const at::Tensor& expected) {
  REQUIRE(actual.scalar_type() == expected.scalar_type());
  require_within(actual, expected, 0.0);
}

/// fp64 gradients of the same formula in two orders of evaluation. Each of `stages` chained contractions over at most
/// `terms` terms adds a relative error of `terms` roundoffs to values no larger than `magnitude`.
inline double gradient_bound(double stages, double terms, double magnitude) {
  return stages * terms * kRoundoff64 * magnitude;
}

/// Largest absolute value.
inline double max_abs(const at::Tensor& t) { return t.numel() == 0 ? 0.0 : t.abs().max().item<double>(); }

/// Number of elements that are not equal.
inline std::int64_t mismatches(const at::Tensor& a, const at::Tensor& b) { return (a != b).sum().item<std::int64_t>(); }

/// An fp64 value rounded to bf16, back in fp64. Through fp32, as a correct implementation with fp32 arithmetic does.
inline at::Tensor to_bf16_values(const at::Tensor& t) { return t.to(at::kFloat).to(at::kBFloat16).to(at::kDouble); }

}  // namespace pgpt::test

#pragma once

// Comparisons of CUDA results with exact ones, done on the GPU so that large shapes stay cheap.

#include <limits>

#include "pgpt/kernels/kernels.h"
#include "support/tensor_check.h"

namespace pgpt::test {

/// The project's kernels, and the ATen composite.
inline const kernels::Policy kFast{true, true};
inline const kernels::Policy kComposite{false, false};

inline at::Tensor gpu(const at::Tensor& t) { return t.defined() ? t.to(at::kCUDA) : t; }
/// Standard normal values on the GPU in `type`.
inline at::Tensor gpu_normal(at::IntArrayRef shape, std::uint64_t seed, at::ScalarType type) {
  return gpu(random_normal(shape, seed).to(type));
}
inline at::Tensor wide(const at::Tensor& t) { return t.defined() ? t.to(at::kDouble) : t; }

inline double roundoff(at::ScalarType type) {
  if (type == at::kBFloat16) return kRoundoffBf16;
  return type == at::kHalf ? kRoundoffHalf : kRoundoff32;
}

/// Leaves NaN in the allocator's free memory, so that an element that a kernel does not write is seen.
inline void poison_free_memory() {
  const auto fp32 = at::TensorOptions().dtype(at::kFloat).device(at::kCUDA);
  std::vector<at::Tensor> blocks;
  for (int i = 0; i < 64; ++i) blocks.push_back(at::full({1 << 16}, std::numeric_limits<float>::quiet_NaN(), fp32));
  blocks.push_back(at::full({1 << 26}, std::numeric_limits<float>::quiet_NaN(), fp32));
}

/// |actual - exact| <= roundoff of actual's type * rounded_size + slack: `rounded_size` is the sum of the magnitudes
/// that get rounded to the type, `slack` bounds the fp32 error before. fp16 results below 2^-14 are spaced by 2^-24, so
/// half of that is always allowed.
inline void require_rounded(const at::Tensor& actual, const at::Tensor& exact, const at::Tensor& rounded_size,
                            double slack) {
  const at::Tensor bound = rounded_size.to(at::kDouble).abs() * roundoff(actual.scalar_type()) + (slack + 0x1p-25);
  const at::Tensor good = (actual.to(at::kDouble) - exact).abs() <= bound;
  if (good.all().item<bool>()) {
    CHECK(true);
  } else {
    require_within(actual, exact, bound);
  }
}
inline void require_rounded(const at::Tensor& actual, const at::Tensor& exact, double slack) {
  require_rounded(actual, exact, exact, slack);
}

/// ||actual - exact|| <= bound * ||exact||.
inline void require_relative(const at::Tensor& actual, const at::Tensor& exact, double bound) {
  const double error = (actual.to(at::kDouble) - exact).norm().item<double>(), size = exact.norm().item<double>();
  INFO("relative error " << error / size << ", bound " << bound);
  CHECK(error <= bound * size);
}

/// The composite with the same rounding points differs only where the fp32 values before rounding straddle a boundary.
/// An fp32 error of 100 roundoffs does that to 100 * 2^-24 / 2^-8 = 0.2 % of bf16 values and 1.2 % of fp16 values, more
/// near zero; a missing or additional rounding would change a quarter of them.
inline void require_same_rounding_points(const at::Tensor& actual, const at::Tensor& composite) {
  REQUIRE(actual.scalar_type() == composite.scalar_type());
  if (actual.scalar_type() == at::kFloat) return;
  INFO(mismatches(actual, composite) << " of " << actual.numel() << " differ from the composite");
  CHECK(static_cast<double>(mismatches(actual, composite)) <= 0.04 * static_cast<double>(actual.numel()) + 2);
}

/// Equal bits as far as == tells, compared on the GPU.
inline void require_same(const at::Tensor& a, const at::Tensor& b) {
  REQUIRE(a.scalar_type() == b.scalar_type());
  REQUIRE(a.sizes().vec() == b.sizes().vec());
  INFO(mismatches(a, b) << " of " << a.numel() << " differ, shape " << a.sizes());
  CHECK(at::equal(a, b));
}

}  // namespace pgpt::test

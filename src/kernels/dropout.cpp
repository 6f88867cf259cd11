// Dropout whose mask is a pure function of (seed, offset, element index), and the residual sums around it.

#include <array>

#include "fast.h"
#include "parallel.h"
#include "philox.h"
#include "tensor_math.h"

namespace pgpt::kernels {
namespace detail {
namespace {

template <class T>
void fill_row(T* out, std::int64_t begin, std::int64_t count, const DropoutState& state) {
  const std::uint32_t threshold = dropout_threshold(state.probability);
  const T scale = static_cast<T>(dropout_scale(state.probability));
  const std::uint64_t base =
      state.base.defined() ? static_cast<std::uint64_t>(*state.base.const_data_ptr<std::int64_t>()) : 0;
  const std::uint64_t offset = state.offset + base;
  std::int64_t i = 0;
  while (i < count) {
    const std::int64_t index = begin + i;
    const PhiloxWords words = philox(state.seed, offset, static_cast<std::uint64_t>(index / 4));
    for (std::int64_t lane = index % 4; lane < 4 && i < count; ++lane, ++i) {
      out[i] = words.word[lane] >= threshold ? scale : T{0};
    }
  }
}

template <class T>
void fill_factors(T* out, const DropoutState& state, const MaskBlock& block) {
  // One long row is cut into pieces so that all threads have work.
  constexpr std::int64_t kPiece = 4096;
  const std::int64_t pieces = (block.columns + kPiece - 1) / kPiece;
  detail::parallel_for(0, block.outer * block.rows * pieces, 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t row = item / pieces;
      const std::int64_t column = item % pieces * kPiece;
      const std::int64_t start =
          block.first + row / block.rows * block.outer_stride + row % block.rows * block.row_stride + column;
      fill_row(out + row * block.columns + column, start, std::min(kPiece, block.columns - column), state);
    }
  });
}

// Philox in 64-bit integer ATen operations: products wrap, and their two halves are masked out.
std::array<at::Tensor, 4> philox_words(const DropoutState& state, const at::Tensor& high) {
  constexpr std::int64_t kMask = 0xFFFFFFFF;
  const auto constant = [&](std::uint64_t value) {
    return at::full_like(high, static_cast<std::int64_t>(value & kMask));
  };
  at::Tensor c0 = constant(state.offset), c1 = constant(state.offset >> 32);
  if (state.base.defined()) {
    const at::Tensor sum = state.base + static_cast<std::int64_t>(state.offset);
    c0 = c0.copy_(sum.bitwise_and(kMask));
    c1 = c1.copy_(sum.bitwise_right_shift(32).bitwise_and_(kMask));
  }
  at::Tensor c2 = high.bitwise_and(kMask), c3 = high.bitwise_right_shift(32).bitwise_and_(kMask);
  auto k0 = static_cast<std::uint32_t>(state.seed), k1 = static_cast<std::uint32_t>(state.seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const at::Tensor p0 = c0 * static_cast<std::int64_t>(kPhiloxMultiplier0);
    const at::Tensor p1 = c2 * static_cast<std::int64_t>(kPhiloxMultiplier1);
    c0 = p1.bitwise_right_shift(32).bitwise_and_(kMask).bitwise_xor_(c1).bitwise_xor_(static_cast<std::int64_t>(k0));
    c2 = p0.bitwise_right_shift(32).bitwise_and_(kMask).bitwise_xor_(c3).bitwise_xor_(static_cast<std::int64_t>(k1));
    c1 = p1.bitwise_and(kMask);
    c3 = p0.bitwise_and(kMask);
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
  return {c0, c1, c2, c3};
}

}  // namespace

at::Tensor dropout_factors(const DropoutState& state, const MaskBlock& block, at::ScalarType dtype, at::Device device) {
  const std::vector<std::int64_t> shape{block.outer, block.rows, block.columns};
  if (device.is_cpu()) {
    const at::Tensor factors = at::empty(shape, at::TensorOptions().dtype(dtype));
    if (dtype == at::kDouble) {
      fill_factors(factors.mutable_data_ptr<double>(), state, block);
    } else {
      fill_factors(factors.mutable_data_ptr<float>(), state, block);
    }
    return factors;
  }
  const auto ids = at::TensorOptions().dtype(at::kLong).device(device);
  const at::Tensor index = (at::arange(block.outer, ids) * block.outer_stride + block.first).view({-1, 1, 1}) +
                           (at::arange(block.rows, ids) * block.row_stride).view({-1, 1}) +
                           at::arange(block.columns, ids);
  const std::array<at::Tensor, 4> words = philox_words(state, index.bitwise_right_shift(2));
  const at::Tensor lane = index.bitwise_and(3);
  const at::Tensor word =
      at::where(lane == 0, words[0], at::where(lane == 1, words[1], at::where(lane == 2, words[2], words[3])));
  const at::Tensor kept = word >= static_cast<std::int64_t>(dropout_threshold(state.probability));
  return kept.to(dtype).mul_(static_cast<double>(dropout_scale(state.probability)));
}

}  // namespace detail

namespace {

// Factors for every element of x, in its shape.
at::Tensor factors_like(const at::Tensor& x, const DropoutState& state) {
  detail::MaskBlock block;
  block.columns = x.numel();
  return detail::dropout_factors(state, block, detail::compute_type(x), x.device()).view(x.sizes());
}

}  // namespace

at::Tensor dropout(const at::Tensor& x, const DropoutState& state, const Policy& policy) {
  detail::check_dropout(state.probability);
  if (state.probability == 0) return x;
  if constexpr (fast::kBuilt) {
    if (auto y = fast::dropout(x, state, policy)) return *y;
  }
  return factors_like(x, state).mul_(x).to(x.scalar_type());
}

at::Tensor bias_dropout_add(const at::Tensor& x, const at::Tensor& bias, const at::Tensor& residual,
                            const DropoutState& state, bool fused_rounding, const Policy& policy) {
  detail::check_dropout(state.probability);
  if constexpr (fast::kBuilt) {
    if (auto y = fast::bias_dropout_add(x, bias, residual, state, fused_rounding, policy)) return *y;
  }
  if (!fused_rounding) {
    const at::Tensor sum = bias.defined() ? at::add(x, bias) : x;
    return at::add(residual, dropout(sum, state, policy)).to(residual.scalar_type());
  }
  if (!bias.defined() && state.probability == 0) return at::add(residual, x).to(residual.scalar_type());
  at::Tensor sum = detail::widen_copy(x);
  if (bias.defined()) sum = sum.add_(bias);
  if (state.probability > 0) sum = sum.mul_(factors_like(x, state));
  return sum.add_(residual).to(residual.scalar_type());
}

}  // namespace pgpt::kernels

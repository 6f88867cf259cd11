// Rotary positions and the packed query, key and value layout.

#include <ATen/Dispatch.h>

#include <array>
#include <numbers>
#include <type_traits>

#include "fast.h"
#include "parallel.h"
#include "tensor_math.h"

namespace pgpt::kernels {
namespace {

using detail::compute_type;
using detail::is_16bit;

// Bounds of the llama3 frequency blend, in positions.
constexpr double kOriginalContext = 8192;
constexpr double kLowFrequencyFactor = 1;
constexpr double kHighFrequencyFactor = 4;

at::Tensor scale_frequencies(const at::Tensor& frequency, double factor) {
  const at::Tensor wavelength = 2 * std::numbers::pi / frequency;
  const at::Tensor slow = frequency / factor;
  const at::Tensor blend =
      (kOriginalContext / wavelength - kLowFrequencyFactor) / (kHighFrequencyFactor - kLowFrequencyFactor);
  const at::Tensor mixed = (1 - blend) * slow + blend * frequency;
  const at::Tensor long_waves = wavelength > kOriginalContext / kLowFrequencyFactor;
  const at::Tensor short_waves = wavelength < kOriginalContext / kHighFrequencyFactor;
  return at::where(long_waves, slow, at::where(short_waves, frequency, mixed));
}

// The loop of rotate_on_cpu_: pair i starts at i * step, its second channel is `distance` behind.
template <class T, class Wide>
void rotate_head(T* x, const Wide* cos, const Wide* sin, std::int64_t pairs, std::int64_t step, std::int64_t distance,
                 bool backward) {
  const Wide sign = backward ? Wide{-1} : Wide{1};
  for (std::int64_t i = 0; i < pairs; ++i) {
    const Wide a = static_cast<Wide>(x[i * step]), b = static_cast<Wide>(x[i * step + distance]);
    const Wide sine = sign * sin[i];
    x[i * step] = static_cast<T>(a * cos[i] - b * sine);
    x[i * step + distance] = static_cast<T>(b * cos[i] + a * sine);
  }
}

// rotate_ with one rounding, in a single pass over x [b,s,heads,d] or [b,s,groups,heads,d].
void rotate_on_cpu_(const at::Tensor& x, const RopeTable& table, bool backward, const at::Tensor& positions) {
  const at::Tensor heads = x.dim() == 4 ? x.unsqueeze(2) : x;
  const std::int64_t s = heads.size(1), pairs = table.options.dim / 2;
  const std::int64_t step = table.options.interleaved ? 2 : 1, distance = table.options.interleaved ? 1 : pairs;
  const std::array<std::int64_t, 4> strides{heads.stride(0), heads.stride(1), heads.stride(2), heads.stride(3)};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "rope", [&] {
    using Wide = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    const at::Tensor cos = table.cos.to(compute_type(x)).contiguous(), sin = table.sin.to(compute_type(x)).contiguous();
    const auto* cosines = cos.const_data_ptr<Wide>();
    const auto* sines = sin.const_data_ptr<Wide>();
    auto* data = heads.mutable_data_ptr<scalar_t>();
    const auto* given = positions.defined() ? positions.const_data_ptr<std::int32_t>() : nullptr;
    detail::parallel_for(0, heads.size(0) * s, 16, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t token = begin; token < end; ++token) {
        auto* channels = data + token / s * strides[0] + token % s * strides[1];
        const std::int64_t position = given != nullptr ? given[token] : token % s;
        for (std::int64_t group = 0; group < heads.size(2); ++group) {
          for (std::int64_t head = 0; head < heads.size(3); ++head) {
            rotate_head(channels + group * strides[2] + head * strides[3], cosines + position * pairs,
                        sines + position * pairs, pairs, step, distance, backward);
          }
        }
      }
    });
  });
}

// Rotates the first `dim` channels of x [b,s,...,d] in place, by `positions` [b,s] or the index along s.
void rotate_(const at::Tensor& x, const RopeTable& table, bool backward, const at::Tensor& positions) {
  const RopeOptions& options = table.options;
  const std::int64_t s = x.size(1);
  const std::int64_t half = options.dim / 2;
  PGPT_ASSERT(s <= table.cos.size(0) && options.dim <= x.size(-1), "rope table of ", table.cos.size(0), " positions, ",
              options.dim, " channels for ", s, " positions, ", x.size(-1), " channels");
  PGPT_ASSERT(!positions.defined() || (positions.scalar_type() == at::kInt && positions.is_contiguous() &&
                                       positions.numel() == x.size(0) * s),
              "positions must be int32 [b,s]");
  if (x.is_cpu() && x.stride(-1) == 1 && (options.fused_rounding || !is_16bit(x))) {
    rotate_on_cpu_(x, table, backward, positions);
    return;
  }
  std::vector<std::int64_t> shape(static_cast<std::size_t>(x.dim()), 1);
  if (positions.defined()) shape[0] = x.size(0);
  shape[1] = s;
  shape.back() = half;
  const auto angles = [&](const at::Tensor& rows) {
    return positions.defined() ? rows.index_select(0, positions.view({-1})) : rows.narrow(0, 0, s);
  };
  // 16-bit tensors without fused rounding use the 16-bit cosine and sine, and each ATen call below rounds.
  const at::ScalarType type = options.fused_rounding ? compute_type(x) : x.scalar_type();
  const at::Tensor cos = angles(table.cos).to(type).view(shape);
  at::Tensor sin = angles(table.sin).to(type).view(shape);
  if (backward) sin = -sin;
  const at::Tensor rotated = x.narrow(-1, 0, options.dim);
  const at::Tensor first = options.interleaved ? rotated.slice(-1, 0, options.dim, 2) : rotated.narrow(-1, 0, half);
  const at::Tensor second = options.interleaved ? rotated.slice(-1, 1, options.dim, 2) : rotated.narrow(-1, half, half);
  const at::Tensor a = first.to(type);
  const at::Tensor b = second.to(type);
  const at::Tensor new_first = (a * cos).add_(-(b * sin));
  const at::Tensor new_second = (b * cos).add_(a * sin);
  first.copy_(new_first);
  second.copy_(new_second);
}

// merge_qkv_gradient in ATen operations.
at::Tensor merge(const Qkv& gradient, const RopeTable* rope, const at::Tensor& positions) {
  const std::int64_t b = gradient.q.size(0), s = gradient.q.size(1), num_heads = gradient.q.size(2),
                     head_dim = gradient.q.size(3);
  const std::int64_t num_groups = gradient.k.size(2), heads = num_heads / num_groups;
  const at::Tensor groups = at::empty({b, s, num_groups, heads + 2, head_dim}, gradient.q.options());
  groups.narrow(3, 0, heads).copy_(gradient.q.reshape({b, s, num_groups, heads, head_dim}));
  groups.select(3, heads).copy_(gradient.k);
  groups.select(3, heads + 1).copy_(gradient.v);
  // Queries and keys of a group lie side by side, so one call turns both back.
  if (rope != nullptr) rotate_(groups.narrow(3, 0, heads + 1), *rope, true, positions);
  return groups.view({b, s, num_groups * (heads + 2) * head_dim});
}

}  // namespace

RopeTable make_rope_table(std::int64_t seq_length, const RopeOptions& options, at::Device device) {
  PGPT_ASSERT(options.dim > 0 && options.dim % 2 == 0, "rotated channels ", options.dim, " must be even and positive");
  const auto fp32 = at::TensorOptions().dtype(at::kFloat).device(device);
  at::Tensor frequency =
      at::pow(at::Scalar(options.base), at::arange(0, options.dim, 2, fp32) / options.dim).reciprocal();
  if (options.llama3_scaling) frequency = scale_frequencies(frequency, options.scaling_factor);
  at::Tensor position = at::arange(seq_length, fp32);
  if (options.interpolation_factor > 0) position *= 1.0 / static_cast<double>(options.interpolation_factor);
  const at::Tensor angle = at::outer(position, frequency);
  return {at::cos(angle), at::sin(angle), options};
}

void rope_(at::Tensor& x, const RopeTable& table, bool backward, const Policy& policy, const at::Tensor& positions) {
  if constexpr (fast::kBuilt) {
    if (fast::rope_(x, table, backward, policy, positions)) return;
  }
  rotate_(x, table, backward, positions);
}

Qkv split_qkv(at::Tensor packed, std::int64_t num_heads, std::int64_t num_groups, std::int64_t head_dim,
              const RopeTable* rope, const Policy& policy, const at::Tensor& positions) {
  if constexpr (fast::kBuilt) {
    if (auto parts = fast::split_qkv(packed, num_heads, num_groups, head_dim, rope, policy, positions)) return *parts;
  }
  const std::int64_t b = packed.size(0), s = packed.size(1), heads = num_heads / num_groups;
  const at::Tensor groups = packed.view({b, s, num_groups, heads + 2, head_dim});
  Qkv result;
  // A view when each group has one query head or there is one group; else the heads of two groups have no common
  // stride.
  result.q = groups.narrow(3, 0, heads).reshape({b, s, num_heads, head_dim});
  result.k = groups.select(3, heads);
  result.v = groups.select(3, heads + 1);
  if (rope != nullptr) {
    rotate_(result.q, *rope, false, positions);
    rotate_(result.k, *rope, false, positions);
  }
  return result;
}

at::Tensor merge_qkv_gradient(const Qkv& gradient, const RopeTable* rope, const Policy& policy, at::Tensor* column_sums,
                              const at::Tensor& positions) {
  if (column_sums != nullptr) column_sums->reset();
  std::optional<at::Tensor> packed;
  if constexpr (fast::kBuilt) packed = fast::merge_qkv_gradient(gradient, rope, policy, column_sums, positions);
  if (!packed) packed = merge(gradient, rope, positions);
  if (column_sums != nullptr && !column_sums->defined()) *column_sums = column_sum(packed->flatten(0, 1));
  return *packed;
}

}  // namespace pgpt::kernels

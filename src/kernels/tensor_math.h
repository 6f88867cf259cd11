#pragma once

// Helpers that the composite (ATen) implementations share.

#include <ATen/ATen.h>

#include <cstdint>

#include "pgpt/base/error.h"
#include "pgpt/kernels/kernels.h"

namespace pgpt::kernels::detail {

/// True for bf16 and fp16 tensors.
inline bool is_16bit(const at::Tensor& t) { return t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf; }

/// Type of the arithmetic on `t`: fp64 for fp64, else fp32.
inline at::ScalarType compute_type(const at::Tensor& t) {
  return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// `t` in its compute type; `t` itself when it has that type already, so the result must not be written to.
inline at::Tensor widen(const at::Tensor& t) { return t.to(compute_type(t)); }

/// A fresh copy of `t` in its compute type, free to be overwritten.
inline at::Tensor widen_copy(const at::Tensor& t) { return t.to(t.options().dtype(compute_type(t)), false, true); }

/// `t` (in a compute type) as it looks after rounding to `dtype`, back in its compute type.
inline at::Tensor rounded(const at::Tensor& t, at::ScalarType dtype) {
  return t.scalar_type() == dtype ? t : t.to(dtype).to(t.scalar_type());
}

/// Where the elements of a dropout mask lie in the (virtual) tensor that is dropped: element [o,i,j] of the result has
/// index first + o * outer_stride + i * row_stride + j.
struct MaskBlock {
  std::int64_t outer = 1, rows = 1, columns = 0;
  std::int64_t first = 0, outer_stride = 0, row_stride = 0;
};
/// [outer,rows,columns] of 0 (dropped) or 1/(1-p) (kept) in `dtype` (fp32 or fp64).
at::Tensor dropout_factors(const DropoutState& state, const MaskBlock& block, at::ScalarType dtype, at::Device device);

/// Refuses probabilities outside [0, 1).
inline void check_dropout(double probability) {
  PGPT_CHECK(ConfigError, probability >= 0.0 && probability < 1.0, "dropout probability ", probability,
             " is outside [0, 1): check --hidden-dropout and --attention-dropout");
}

}  // namespace pgpt::kernels::detail

#pragma once

// Matrix products through cuBLASLt with the chosen algorithms of `GemmAlgorithms`. Only linked into CUDA builds: call
// behind `if constexpr (fast::kBuilt)`.

#include <ATen/core/Tensor.h>

#include "pgpt/kernels/gemm_algorithms.h"

namespace pgpt::kernels {

/// A matrix as it is stored, or its transpose.
struct GemmOperand {
  const at::Tensor& stored;
  bool transposed = false;
};

/// d = alpha * op(a) op(b) (+ bias [columns], before the one rounding), or d += alpha * op(a) op(b), on the current
/// stream and with libtorch's cuBLAS workspace. Sums are fp32. False, with nothing done, for tensors that are not of
/// this kind: 16-bit CUDA inputs of one type whose rows may lie apart, d contiguous in that type or fp32, no empty
/// dimension, every row and address a multiple of 16 bytes. Throws DeviceError.
[[nodiscard]] bool gemm(GemmAlgorithms& algorithms, const GemmOperand& a, const GemmOperand& b, const at::Tensor& bias,
                        double alpha, bool accumulate, const at::Tensor& d);

}  // namespace pgpt::kernels

// Dropout with the mask of philox.h, alone or fused with bias and residual.

#include "device.cuh"
#include "philox.h"

namespace pgpt::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// Factors of elements 8 * vector .. 8 * vector + 7.
__device__ void factors(const DropoutArguments& dropout, std::int64_t vector, float (&f)[8]) {
  const std::uint64_t offset =
      dropout.offset + (dropout.base == nullptr ? 0 : static_cast<std::uint64_t>(*dropout.base));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const detail::PhiloxWords words =
        detail::philox(dropout.seed, offset, static_cast<std::uint64_t>(2 * vector + half));
#pragma unroll
    for (int i = 0; i < 4; ++i) f[4 * half + i] = words.word[i] >= dropout.threshold ? dropout.scale : 0.0F;
  }
}

// 8 elements from `vector` on, as floats; zeros behind `count`.
template <class T>
__device__ void load_vector(const T* p, std::int64_t vector, std::int64_t count, float (&x)[8]) {
  if (8 * vector + 8 <= count) {
    unpack(load8(p + 8 * vector), x);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = 8 * vector + i < count ? to_float(p[8 * vector + i]) : 0.0F;
  }
}
template <class T>
__device__ void store_vector(T* p, std::int64_t vector, std::int64_t count, const float (&x)[8]) {
  if (8 * vector + 8 <= count) {
    store8(p + 8 * vector, pack<T>(x));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (8 * vector + i < count) p[8 * vector + i] = from_float<T>(x[i]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(const T* __restrict__ x, std::int64_t count, DropoutArguments dropout, T* __restrict__ y) {
  const std::int64_t vector = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (8 * vector >= count) return;
  float v[8], f[8];
  load_vector(x, vector, count, v);
  factors(dropout, vector, f);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] *= f[i];
  store_vector(y, vector, count, v);
}

template <class X, class T>
__global__ void __launch_bounds__(kThreads)
    bias_dropout_add_kernel(const T* __restrict__ x, const T* __restrict__ bias, const X* __restrict__ residual,
                            std::int64_t count, FastDivider vectors_per_row, DropoutArguments dropout,
                            bool fused_rounding, X* __restrict__ y) {
  const std::int64_t vector = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (8 * vector >= count) return;
  float v[8], r[8];
  load_vector(x, vector, count, v);
  load_vector(residual, vector, count, r);
  if (bias != nullptr) {
    float b[8];
    const auto flat = static_cast<std::uint32_t>(vector);
    unpack(load8(bias + 8 * (flat - vectors_per_row.divide(flat) * vectors_per_row.divisor)), b);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = fused_rounding ? v[i] + b[i] : rounded<T>(v[i] + b[i]);
  }
  if (dropout.active) {
    float f[8];
    factors(dropout, vector, f);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = fused_rounding ? v[i] * f[i] : rounded<T>(v[i] * f[i]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] += r[i];
  store_vector(y, vector, count, v);
}

unsigned blocks_for(std::int64_t count) { return static_cast<unsigned>(ceil_div<std::int64_t>(count, 8 * kThreads)); }

}  // namespace

void dropout(Type type, const void* x, std::int64_t count, const DropoutArguments& dropout, void* y,
             cudaStream_t stream) {
  if (count == 0) return;
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    dropout_kernel<T>
        <<<blocks_for(count), kThreads, 0, stream>>>(static_cast<const T*>(x), count, dropout, static_cast<T*>(y));
  });
  check_launch("dropout");
}

void bias_dropout_add(Type type, Type residual_type, const void* x, const void* bias, const void* residual,
                      std::int64_t count, std::int64_t width, const DropoutArguments& dropout, bool fused_rounding,
                      void* y, cudaStream_t stream) {
  if (count == 0) return;
  with_stream_type(residual_type, type, [&](auto x_tag, auto tag) {
    using X = decltype(x_tag);
    using T = decltype(tag);
    bias_dropout_add_kernel<X, T><<<blocks_for(count), kThreads, 0, stream>>>(
        static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<const X*>(residual), count,
        FastDivider(static_cast<std::uint32_t>(std::max<std::int64_t>(1, width / 8))), dropout, fused_rounding,
        static_cast<X*>(y));
  });
  check_launch("bias_dropout_add");
}

}  // namespace pgpt::kernels::cuda

#pragma once

// Device helpers shared by the kernels: 8-element vectors, conversions, reductions, launch checks.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "cuda_launch.h"
#include "pgpt/base/error.h"

namespace pgpt::kernels::cuda {

using bf16 = __nv_bfloat16;
using fp16 = __half;

// ---- elements ----

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
__device__ inline float to_float(fp16 x) { return __half2float(x); }

template <class T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline fp16 from_float<fp16>(float x) {
  return __float2half_rn(x);
}
/// x rounded to T and back.
template <class T>
__device__ inline float rounded(float x) {
  return to_float(from_float<T>(x));
}

// ---- vectors of 8 elements: one 16-byte access for 16-bit types, two for fp32 ----

template <class T>
struct Raw8 {
  uint4 words[sizeof(T) / 2];
};
template <class T>
__device__ inline Raw8<T> load8(const T* p) {
  Raw8<T> raw;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) raw.words[i] = reinterpret_cast<const uint4*>(p)[i];
  return raw;
}
template <class T>
__device__ inline void store8(T* p, const Raw8<T>& raw) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) reinterpret_cast<uint4*>(p)[i] = raw.words[i];
}
__device__ inline float2 unpack2(std::uint32_t word, bf16) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000U)};
}
__device__ inline float2 unpack2(std::uint32_t word, fp16) {
  const __half2_raw raw{static_cast<unsigned short>(word & 0xffffU), static_cast<unsigned short>(word >> 16)};
  return __half22float2(__half2(raw));
}
__device__ inline std::uint32_t pack2(float a, float b, bf16) {
  const __nv_bfloat162_raw raw = __floats2bfloat162_rn(a, b);
  return static_cast<std::uint32_t>(raw.x) | (static_cast<std::uint32_t>(raw.y) << 16);
}
__device__ inline std::uint32_t pack2(float a, float b, fp16) {
  const __half2_raw raw = __floats2half2_rn(a, b);
  return static_cast<std::uint32_t>(raw.x) | (static_cast<std::uint32_t>(raw.y) << 16);
}
template <class T>
__device__ inline void unpack(const Raw8<T>& raw, float (&x)[8]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x[4 * i] = __uint_as_float(raw.words[i].x);
      x[4 * i + 1] = __uint_as_float(raw.words[i].y);
      x[4 * i + 2] = __uint_as_float(raw.words[i].z);
      x[4 * i + 3] = __uint_as_float(raw.words[i].w);
    }
  } else {
    const std::uint32_t words[4] = {raw.words[0].x, raw.words[0].y, raw.words[0].z, raw.words[0].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack2(words[i], T{});
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
}
template <class T>
__device__ inline Raw8<T> pack(const float (&x)[8]) {
  Raw8<T> raw;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      raw.words[i] = {__float_as_uint(x[4 * i]), __float_as_uint(x[4 * i + 1]), __float_as_uint(x[4 * i + 2]),
                      __float_as_uint(x[4 * i + 3])};
    }
  } else {
    raw.words[0] = {pack2(x[0], x[1], T{}), pack2(x[2], x[3], T{}), pack2(x[4], x[5], T{}), pack2(x[6], x[7], T{})};
  }
  return raw;
}
template <class T>
__device__ inline Raw8<T> zero8() {
  Raw8<T> raw;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) raw.words[i] = {0, 0, 0, 0};
  return raw;
}

// ---- reductions: every lane gets the same bits, whatever the timing ----

template <int Lanes>
__device__ inline float lanes_sum(float x) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffU, x, offset);
  return x;
}
template <class T>
__device__ inline T warp_sum(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffU, x, offset);
  return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, offset));
  return x;
}
/// Sums over the block of N values a thread. `buffer` holds 2 * N * 32 values; `phase` alternates so that one barrier a
/// call is enough.
template <int N, class T>
__device__ inline void block_sum(T (&x)[N], T* buffer, int& phase) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
  T* const half = buffer + phase * N * 32;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x[i] = warp_sum(x[i]);
    if (lane == 0) half[i * 32 + warp] = x[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = warp_sum(lane < warps ? half[i * 32 + lane] : T(0));
  phase ^= 1;
}

// ---- index arithmetic ----

/// Division of numbers below 2^31 by a constant below 2^31, as a multiplication.
struct FastDivider {
  std::uint32_t divisor = 1, multiplier = 1, shift = 0;
  FastDivider() = default;
  explicit FastDivider(std::uint32_t d) : divisor(d) {
    while ((std::uint64_t{1} << shift) < d) ++shift;
    multiplier = static_cast<std::uint32_t>(((std::uint64_t{1} << 32) * ((std::uint64_t{1} << shift) - d)) / d + 1);
  }
  __device__ std::uint32_t divide(std::uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

// ---- host side ----

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // clears the error, so that handlers can still call CUDA
  throw DeviceError(concat("CUDA kernel ", what, " failed: ", cudaGetErrorString(status)));
}
inline void check_launch(const char* what) { check_cuda(cudaGetLastError(), what); }

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device), "device query");
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "device query");
  return value;
}
inline int sm_count() { return device_attribute(cudaDevAttrMultiProcessorCount); }

template <class T>
constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

/// Calls f(T{}) with the C++ type of `type`.
template <class F>
void with_type(Type type, F&& f) {
  switch (type) {
    case Type::kFloat32:
      return f(float{});
    case Type::kBfloat16:
      return f(bf16{});
    case Type::kFloat16:
      return f(fp16{});
  }
  throw std::logic_error("internal error: unknown element type");
}
/// Calls f(X{}, T{}) for a stream of type X beside values of type T; X is T or fp32.
template <class F>
void with_stream_type(Type stream_type, Type type, F&& f) {
  if (stream_type == type) return with_type(type, [&](auto t) { f(t, t); });
  if (stream_type != Type::kFloat32)
    throw std::logic_error("internal error: the residual stream must be fp32 or the layer's type");
  with_type(type, [&](auto t) { f(float{}, t); });
}

}  // namespace pgpt::kernels::cuda

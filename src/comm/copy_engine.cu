// The sum of a reduce-scatter whose parts have been copied here.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "copy_engine_launch.h"
#include "pgpt/base/error.h"

namespace pgpt::comm {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;  // memory-bound: more would only take room from the GEMMs beside it

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

template <class T>
__device__ inline T rounded(float x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return x;
  }
}

/// `Width` elements that are read and written as one access of 16 bytes, or two.
template <class T, int Width>
struct alignas(Width == 1 ? alignof(T) : 16) Pack {
  T values[Width];
};

template <class T>
struct Parts {
  const T* own;
  const T* received;
  std::int64_t stride;  // elements
  int ranks, own_rank;
  float scale;
};

// Neither `own` nor the accumulator is __restrict__: they may be the same memory.
template <class T, class A, int Width>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(Parts<T> parts, A* accumulator, std::int64_t packs, bool overwrite) {
  using In = Pack<T, Width>;
  using Out = Pack<A, Width>;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < packs; i += step) {
    float total[Width];
    for (int r = 0; r < parts.ranks; ++r) {
      const T* part =
          r == parts.own_rank ? parts.own : parts.received + (r - (r > parts.own_rank ? 1 : 0)) * parts.stride;
      const In in = reinterpret_cast<const In*>(part)[i];
#pragma unroll
      for (int k = 0; k < Width; ++k) {
        const float value = __fmul_rn(to_float(in.values[k]), parts.scale);
        total[k] = r == 0 ? value : __fadd_rn(total[k], value);
      }
    }
    Out out;
    if (!overwrite) out = reinterpret_cast<const Out*>(accumulator)[i];
#pragma unroll
    for (int k = 0; k < Width; ++k) {
      const float sum = to_float(rounded<T>(total[k]));
      out.values[k] = overwrite ? rounded<A>(sum) : rounded<A>(__fadd_rn(to_float(out.values[k]), sum));
    }
    reinterpret_cast<Out*>(accumulator)[i] = out;
  }
}

bool aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

int multiprocessors() {
  int device = 0, count = 1;
  (void)cudaGetDevice(&device);
  (void)cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

template <class T, class A, int Width>
void launch(const Parts<T>& parts, A* accumulator, std::int64_t packs, bool overwrite, cudaStream_t stream) {
  if (packs == 0) return;
  const std::int64_t most = static_cast<std::int64_t>(multiprocessors()) * kBlocksPerMultiprocessor;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>((packs + kThreads - 1) / kThreads, most));
  sum_kernel<T, A, Width><<<blocks, kThreads, 0, stream>>>(parts, accumulator, packs, overwrite);
  const cudaError_t status = cudaGetLastError();
  PGPT_CHECK(DeviceError, status == cudaSuccess, "CUDA: ", cudaGetErrorString(status), " launching sum_parts");
}

template <class T, class A>
void run(const PartSum& sum, cudaStream_t stream) {
  constexpr int kWidth = 16 / sizeof(T);
  Parts<T> parts{static_cast<const T*>(sum.own),
                 static_cast<const T*>(sum.received),
                 static_cast<std::int64_t>(sum.stride / sizeof(T)),
                 sum.ranks,
                 sum.own_rank,
                 sum.scale};
  auto* accumulator = static_cast<A*>(sum.accumulator);
  const bool wide = aligned(sum.own) && aligned(sum.received) && aligned(accumulator) && sum.stride % 16 == 0;
  const std::int64_t packs = wide ? sum.count / kWidth : 0;
  launch<T, A, kWidth>(parts, accumulator, packs, sum.overwrite, stream);
  const std::int64_t done = packs * kWidth;
  parts.own += done;
  parts.received += done;
  launch<T, A, 1>(parts, accumulator + done, sum.count - done, sum.overwrite, stream);
}

template <class T>
void with_accumulator(const PartSum& sum, cudaStream_t stream) {
  if (sum.accumulator_fp32) {
    run<T, float>(sum, stream);
  } else {
    run<T, T>(sum, stream);
  }
}

}  // namespace

void sum_parts(const PartSum& sum, cudaStream_t stream) {
  switch (sum.type) {
    case PartType::kFloat32:
      return run<float, float>(sum, stream);
    case PartType::kBfloat16:
      return with_accumulator<__nv_bfloat16>(sum, stream);
    case PartType::kFloat16:
      return with_accumulator<__half>(sum, stream);
  }
}

}  // namespace pgpt::comm

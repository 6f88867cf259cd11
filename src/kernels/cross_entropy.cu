// Cross entropy of one row a block: an online maximum and sum in the first pass; the second pass writes the gradient
// over the logits.
//
// As much of the row as fits stays in shared memory between the passes, so logits up to about 110,000 (16-bit) are read
// once from memory; the rest of a longer row is read again, mostly from L2.

#include <cfloat>

#include "device.cuh"

namespace pgpt::kernels::cuda {
namespace {

constexpr int kUnroll = 4;  // 16-byte loads in flight a thread

// Running maximum and sum of exponentials relative to it.
struct Softmax {
  float maximum, sum;
};

__device__ Softmax merge(Softmax a, Softmax b) {
  const float maximum = fmaxf(a.maximum, b.maximum);
  // Nothing seen yet: both maxima are the start value and both sums zero.
  return {maximum, a.sum * __expf(a.maximum - maximum) + b.sum * __expf(b.maximum - maximum)};
}

template <int N>
__device__ void include(Softmax& s, const float (&x)[N]) {
  float maximum = s.maximum;
#pragma unroll
  for (int i = 0; i < N; ++i) maximum = fmaxf(maximum, x[i]);
  if (maximum > s.maximum) {
    s.sum *= __expf(s.maximum - maximum);
    s.maximum = maximum;
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum += __expf(x[i] - maximum);
  s.sum += sum;
}

template <class T, int Threads>
__global__ void __launch_bounds__(Threads)
    cross_entropy_kernel(T* logits, const std::int64_t* __restrict__ labels, std::int64_t vocabulary,
                         int cached_vectors, const float* __restrict__ scale, float* __restrict__ loss) {
  extern __shared__ uint4 cache_words[];
  __shared__ Softmax warps[32];
  __shared__ Softmax all;
  auto* const cache = reinterpret_cast<Raw8<T>*>(cache_words);
  const std::int64_t row = blockIdx.x;
  T* const p = logits + row * vocabulary;
  const std::int64_t label = labels[row];
  const bool known = label >= 0 && label < vocabulary;
  const float target = known ? to_float(p[label]) : 0.0F;

  // The row's first elements up to a 16-byte boundary and its last few are handled one by one.
  const auto misaligned = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p) % 16 / sizeof(T));
  const std::int64_t to_boundary = misaligned == 0 ? 0 : static_cast<std::int64_t>(16 / sizeof(T)) - misaligned;
  const std::int64_t head = to_boundary < vocabulary ? to_boundary : vocabulary;
  const int vectors = static_cast<int>((vocabulary - head) / 8);
  const std::int64_t tail = head + std::int64_t{8} * vectors;
  T* const body = p + head;

  Softmax s{-FLT_MAX, 0.0F};
  const auto each_single = [&](auto&& f) {
    const std::int64_t singles = head + vocabulary - tail;
    if (threadIdx.x < singles)
      f(threadIdx.x < head ? static_cast<std::int64_t>(threadIdx.x) : tail + threadIdx.x - head);
  };
  each_single([&](std::int64_t i) {
    const float x[1] = {to_float(p[i])};
    include(s, x);
  });
  for (int first = threadIdx.x; first < vectors; first += kUnroll * Threads) {
    Raw8<T> raw[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int v = first + i * Threads;
      if (v < vectors) raw[i] = load8(body + std::int64_t{8} * v);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int v = first + i * Threads;
      if (v < vectors) {
        if (v < cached_vectors) cache[v] = raw[i];
        float x[8];
        unpack(raw[i], x);
        include(s, x);
      }
    }
  }

#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Softmax other{__shfl_xor_sync(0xffffffffU, s.maximum, offset), __shfl_xor_sync(0xffffffffU, s.sum, offset)};
    s = merge(s, other);
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = s;
  __syncthreads();
  if (threadIdx.x < 32) {
    s = threadIdx.x < Threads / 32 ? warps[threadIdx.x] : Softmax{-FLT_MAX, 0.0F};
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const Softmax other{__shfl_xor_sync(0xffffffffU, s.maximum, offset), __shfl_xor_sync(0xffffffffU, s.sum, offset)};
      s = merge(s, other);
    }
    if (threadIdx.x == 0) {
      all = s;
      loss[row] = known ? logf(s.sum) - (target - s.maximum) : nanf("");
    }
  }
  if (scale == nullptr) return;
  __syncthreads();

  // Every thread writes only elements that it read itself; the target was read above, before the barrier.
  const float maximum = all.maximum, factor = scale[row], inverse_sum = 1.0F / all.sum;
  each_single([&](std::int64_t i) {
    p[i] = from_float<T>((__expf(to_float(p[i]) - maximum) * inverse_sum - (i == label ? 1.0F : 0.0F)) * factor);
  });
  const std::int64_t target_in_body = label - head;
  for (int first = threadIdx.x; first < vectors; first += kUnroll * Threads) {
    Raw8<T> raw[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int v = first + i * Threads;
      if (v < vectors) raw[i] = v < cached_vectors ? cache[v] : load8(body + std::int64_t{8} * v);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int v = first + i * Threads;
      if (v < vectors) {
        const std::int64_t start = std::int64_t{8} * v;
        float x[8];
        unpack(raw[i], x);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = __expf(x[j] - maximum) * inverse_sum;
        if (target_in_body >= start && target_in_body < start + 8) {
#pragma unroll
          for (int j = 0; j < 8; ++j) x[j] -= start + j == target_in_body ? 1.0F : 0.0F;
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] *= factor;
        store8(body + start, pack<T>(x));
      }
    }
  }
}

}  // namespace

void cross_entropy(Type type, void* logits, const std::int64_t* labels, std::int64_t rows, std::int64_t vocabulary,
                   const float* scale, float* loss, cudaStream_t stream) {
  if (rows == 0) return;
  // 1 KiB a block is the system's, and the static arrays take less than another.
  const int block_limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 1024;
  const int sm_limit = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    const auto launch = [&](auto kernel, int threads, int limit) {
      const std::int64_t row_vectors = vocabulary / 8;
      const std::int64_t cached =
          scale == nullptr ? 0 : std::min<std::int64_t>(row_vectors, limit / static_cast<int>(sizeof(Raw8<T>)));
      const int bytes = static_cast<int>(cached) * static_cast<int>(sizeof(Raw8<T>));
      check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, block_limit),
                 "cross_entropy");
      kernel<<<static_cast<unsigned>(rows), threads, bytes, stream>>>(static_cast<T*>(logits), labels, vocabulary,
                                                                      static_cast<int>(cached), scale, loss);
    };
    // Two or more blocks an SM hide each other's phases; a row that would not fit twice gets the whole SM.
    const int half = std::min(block_limit, sm_limit / 2 - 2048);
    if (static_cast<std::int64_t>(sizeof(T)) * vocabulary <= half)
      launch(cross_entropy_kernel<T, 512>, 512, half);
    else
      launch(cross_entropy_kernel<T, 1024>, 1024, block_limit);
  });
  check_launch("cross_entropy");
}

}  // namespace pgpt::kernels::cuda

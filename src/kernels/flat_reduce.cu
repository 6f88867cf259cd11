// Sums over the segments of a flat buffer, in two stages with a grid that does not depend on the GPU; and the step's
// clip coefficient.

#include <cmath>

#include "segments.cuh"

namespace pgpt::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 1056;  // 8 for each SM of an H200; fixed, so that every GPU adds in the same order
constexpr int kGroups = 2;     // of 8 elements a thread and pass
constexpr std::int64_t kPassElements = std::int64_t{8} * kThreads * kGroups;

struct Squares {
  using Total = double;
  __device__ static void add(double& total, float x) {
    total = fma(static_cast<double>(x), static_cast<double>(x), total);
  }
};
struct Zeros {
  using Total = long long;
  __device__ static void add(long long& total, float x) { total += x == 0.0F ? 1 : 0; }
};

template <class T, class What>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const T* __restrict__ x, FlatArguments flat, typename What::Total* __restrict__ parts) {
  using Total = typename What::Total;
  __shared__ Total buffer[2 * 32];
  const auto num_segments = static_cast<int>(flat.num_segments);
  Total totals[4] = {0, 0, 0, 0};
  for (std::int64_t begin = blockIdx.x * kPassElements; begin < flat.count; begin += kBlocks * kPassElements) {
    Raw8<T> raw[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const std::int64_t at = begin + 8 * (threadIdx.x + i * kThreads);
      if (at + 8 <= flat.count) raw[i] = load8(x + at);
    }
    int segment = first_segment_past(flat, begin);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const std::int64_t at = begin + 8 * (threadIdx.x + i * kThreads);
      if (at >= flat.count) continue;
      while (segment < num_segments && flat.segments[segment].end <= at) ++segment;
      if (segment == num_segments) continue;
      const SegmentRecord record = flat.segments[segment];
      if (at + 8 <= flat.count && record.begin <= at && at + 8 <= record.end) {
        if (record.norm_weight == 0.0F) continue;
        float v[8];
        unpack(raw[i], v);
#pragma unroll
        for (int j = 0; j < 8; ++j) What::add(totals[j % 4], v[j]);
      } else {
        int own = segment;
        for (std::int64_t e = at; e < at + 8 && e < flat.count; ++e) {
          while (own < num_segments && flat.segments[own].end <= e) ++own;
          if (own == num_segments) break;
          if (flat.segments[own].begin <= e && flat.segments[own].norm_weight != 0.0F)
            What::add(totals[0], to_float(x[e]));
        }
      }
    }
  }
  Total total[1] = {(totals[0] + totals[1]) + (totals[2] + totals[3])};
  int phase = 0;
  block_sum(total, buffer, phase);
  if (threadIdx.x == 0) parts[blockIdx.x] = total[0];
}

template <class Total, class Out>
__global__ void __launch_bounds__(kThreads) finish_kernel(const Total* __restrict__ parts, Out* __restrict__ out) {
  __shared__ Total buffer[2 * 32];
  Total total[1] = {0};
  for (int i = threadIdx.x; i < kBlocks; i += kThreads) total[0] += parts[i];
  int phase = 0;
  block_sum(total, buffer, phase);
  if (threadIdx.x == 0) *out = total[0];
}

template <class What, class Out>
void reduce(Type type, const void* x, const FlatArguments& flat, Out* out, void* workspace, const char* name,
            cudaStream_t stream) {
  auto* const parts = static_cast<typename What::Total*>(workspace);
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    reduce_kernel<T, What><<<kBlocks, kThreads, 0, stream>>>(static_cast<const T*>(x), flat, parts);
  });
  check_launch(name);
  finish_kernel<<<1, kThreads, 0, stream>>>(parts, out);
  check_launch(name);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    non_finite_kernel(const T* __restrict__ x, std::int64_t count, float* __restrict__ out) {
  bool found = false;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t vector = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; 8 * vector < count;
       vector += step) {
    if (8 * vector + 8 <= count) {
      float v[8];
      unpack(load8(x + 8 * vector), v);
#pragma unroll
      for (int i = 0; i < 8; ++i) found = found || !isfinite(v[i]);
    } else {
      for (std::int64_t e = 8 * vector; e < count; ++e) found = found || !isfinite(to_float(x[e]));
    }
  }
  if (found) *out = 1.0F;  // every writer stores the same value
}

__global__ void finish_norm_kernel(const double* squared, const double* guard, double clip, float* norm, float* scalars,
                                   ScalarPlaces places) {
  const auto length = static_cast<float>(sqrt(*squared));
  float coefficient = 1.0F;
  if (clip > 0) {
    const float wanted = __fdiv_rn(static_cast<float>(clip), __fadd_rn(length, 1e-6F));
    coefficient = wanted > 1.0F ? 1.0F : wanted;  // NaN stays
  }
  *norm = length;
  scalars[places.gradient_scale] = coefficient;
  if (guard != nullptr && scalars[places.skip] == 0.0F && !(isfinite(length) && isfinite(*guard)))
    scalars[places.skip] = kJustStopped;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    mark_non_finite_kernel(const T* __restrict__ x, FlatArguments flat, const float* __restrict__ skip,
                           std::uint8_t* __restrict__ flags) {
  if (*skip != kJustStopped) return;
  for (std::int64_t segment = blockIdx.x; segment < flat.num_segments; segment += gridDim.x) {
    for (std::int64_t i = flat.segments[segment].begin + threadIdx.x; i < flat.segments[segment].end; i += kThreads) {
      if (!isfinite(to_float(x[i]))) flags[segment] = 1;  // every writer stores the same value
    }
  }
}

__global__ void finish_marks_kernel(float* skip) {
  if (*skip == kJustStopped) *skip = kStoppedBefore;
}

}  // namespace

std::size_t flat_reduction_workspace() { return sizeof(double) * kBlocks; }

void squared_norm(Type type, const void* x, const FlatArguments& flat, double* out, void* workspace,
                  cudaStream_t stream) {
  reduce<Squares>(type, x, flat, out, workspace, "squared_norm", stream);
}

void count_zeros(Type type, const void* x, const FlatArguments& flat, std::int64_t* out, void* workspace,
                 cudaStream_t stream) {
  reduce<Zeros>(type, x, flat, out, workspace, "count_zeros", stream);
}

void has_non_finite(Type type, const void* x, std::int64_t count, float* out, cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(out, 0, sizeof(float), stream), "has_non_finite");
  if (count == 0) return;
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    const std::int64_t blocks = std::min<std::int64_t>(kBlocks, ceil_div<std::int64_t>(count, 8 * kThreads));
    non_finite_kernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(static_cast<const T*>(x), count, out);
  });
  check_launch("has_non_finite");
}

void finish_norm(const double* squared, const double* guard, double clip, float* norm, float* scalars,
                 const ScalarPlaces& places, cudaStream_t stream) {
  finish_norm_kernel<<<1, 1, 0, stream>>>(squared, guard, clip, norm, scalars, places);
  check_launch("finish_norm");
}

void mark_non_finite(Type type, const void* x, const FlatArguments& flat, float* skip, std::uint8_t* flags,
                     cudaStream_t stream) {
  if (flat.num_segments > 0) {
    with_type(type, [&](auto tag) {
      using T = decltype(tag);
      const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(kBlocks, flat.num_segments));
      mark_non_finite_kernel<T><<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(x), flat, skip, flags);
    });
  }
  finish_marks_kernel<<<1, 1, 0, stream>>>(skip);
  check_launch("mark_non_finite");
}

}  // namespace pgpt::kernels::cuda

#pragma once

// Second stage of column sums: adds the blocks' partial rows in a fixed order.

#include "device.cuh"

namespace pgpt::kernels::cuda {

inline constexpr int kPartColumns = 32, kPartLanes = 16;

/// first[c] = sum over the `count` rows of parts [count, columns]; second[c] the same of the following `count` rows.
template <class T>
__global__ void __launch_bounds__(kPartColumns* kPartLanes)
    add_parts_kernel(const float* __restrict__ parts, int count, std::int64_t columns, T* __restrict__ first,
                     T* __restrict__ second) {
  __shared__ float sums[kPartLanes][kPartColumns + 1];
  const int lane = threadIdx.x / kPartColumns;
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * kPartColumns + threadIdx.x % kPartColumns;
  parts += static_cast<std::int64_t>(blockIdx.y) * count * columns;
  float total = 0;
  if (c < columns) {
#pragma unroll 8
    for (int row = lane; row < count; row += kPartLanes) total += parts[row * columns + c];
  }
  sums[lane][threadIdx.x % kPartColumns] = total;
  __syncthreads();
  if (lane == 0 && c < columns) {
    total = 0;
#pragma unroll
    for (int i = 0; i < kPartLanes; ++i) total += sums[i][threadIdx.x];
    (blockIdx.y == 0 ? first : second)[c] = from_float<T>(total);
  }
}

/// Launches add_parts_kernel; `second` null: one section.
template <class T>
void add_parts(const float* parts, int count, std::int64_t columns, T* first, T* second, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div<std::int64_t>(columns, kPartColumns)), second == nullptr ? 1 : 2);
  add_parts_kernel<T><<<grid, kPartColumns * kPartLanes, 0, stream>>>(parts, count, columns, first, second);
  check_launch("add_parts");
}

}  // namespace pgpt::kernels::cuda

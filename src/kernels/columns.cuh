#pragma once

// Column sums in two stages, always in the same order: blocks write partial rows, a second kernel adds them.

#include "device.cuh"

namespace pgpt::kernels::cuda {

// ---- first stage: a block owns a strip of columns for one chunk of rows, dealt to its warps ----

inline constexpr int kStripWarps = 8, kStripThreads = 32 * kStripWarps;
inline constexpr int kMaxParts = 512;  // row chunks; bounds the workspace

/// Row chunks for strips of which `resident` blocks run at once: two whole waves of blocks, at least 32 rows each.
inline int row_parts(std::int64_t rows, std::int64_t strips, std::int64_t resident) {
  return static_cast<int>(std::max<std::int64_t>(
      1, std::min({2 * resident / strips, ceil_div<std::int64_t>(rows, 32), std::int64_t{kMaxParts}})));
}

/// Blocks of `kernel` that the GPU holds at once.
template <class Kernel>
std::int64_t resident_blocks(Kernel kernel, int threads) {
  int per_sm = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, 0), "occupancy query");
  return std::int64_t{std::max(per_sm, 1)} * sm_count();
}

/// Adds the warps' totals of a strip (Width a lane) and writes part[column_of(i)] for place i = lane * Width + j; a
/// negative column is left out. All threads of a block of kStripThreads call it.
template <int Width, class ColumnOf>
__device__ void store_strip(const float (&total)[Width], float* part, const ColumnOf& column_of) {
  __shared__ float sums[kStripWarps][32 * Width + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();  // an earlier call may still be reading
#pragma unroll
  for (int i = 0; i < Width; ++i) sums[warp][lane * Width + i] = total[i];
  __syncthreads();
  for (int place = threadIdx.x; place < 32 * Width; place += kStripThreads) {
    const std::int64_t column = column_of(place);
    if (column < 0) continue;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kStripWarps; ++i) sum += sums[i][place];
    part[column] = sum;
  }
}

// ---- second stage ----

inline constexpr int kPartColumns = 32, kPartLanes = 16;

/// Where the sums of up to three sections of parts go; null: that section is left out.
template <class T>
struct SectionSums {
  T* out[3];
};

/// sections.out[i][c] = sum over rows [i * count, (i + 1) * count) of parts [sections * count, columns].
template <class T>
__global__ void __launch_bounds__(kPartColumns* kPartLanes)
    add_parts_kernel(const float* __restrict__ parts, int count, std::int64_t columns, SectionSums<T> sections) {
  __shared__ float sums[kPartLanes][kPartColumns + 1];
  T* const out = blockIdx.y == 0 ? sections.out[0] : (blockIdx.y == 1 ? sections.out[1] : sections.out[2]);
  if (out == nullptr) return;
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
    out[c] = from_float<T>(total);
  }
}

/// Launches add_parts_kernel.
template <class T>
void add_parts(const float* parts, int count, std::int64_t columns, SectionSums<T> sections, cudaStream_t stream) {
  unsigned used = 3;
  while (used > 1 && sections.out[used - 1] == nullptr) --used;
  const dim3 grid(static_cast<unsigned>(ceil_div<std::int64_t>(columns, kPartColumns)), used);
  add_parts_kernel<T><<<grid, kPartColumns * kPartLanes, 0, stream>>>(parts, count, columns, sections);
  check_launch("add_parts");
}

}  // namespace pgpt::kernels::cuda

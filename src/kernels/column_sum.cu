// Column sums (bias gradients) in two stages, in a fixed order.

#include "columns.cuh"
#include "device.cuh"

namespace pgpt::kernels::cuda {
namespace {

// Row chunks: enough blocks to fill the GPU, at least 32 rows each.
int parts_for(std::int64_t rows, std::int64_t columns) {
  const std::int64_t strips = ceil_div<std::int64_t>(columns, 256);
  const std::int64_t wanted = ceil_div<std::int64_t>(sm_count() * 8, strips);
  return static_cast<int>(
      std::max<std::int64_t>(1, std::min({wanted, ceil_div<std::int64_t>(rows, 32), std::int64_t{kMaxParts}})));
}

// Block (strip, part): columns of 32 lanes * Width, rows of one chunk dealt to the warps.
template <class T, int Width>
__global__ void __launch_bounds__(kStripThreads)
    partial_sums_kernel(const T* __restrict__ x, std::int64_t rows, std::int64_t columns, std::int64_t rows_per_part,
                        float* __restrict__ parts) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * 32 * Width,
                     column = first_column + lane * Width;
  const std::int64_t begin = blockIdx.y * rows_per_part,
                     end = begin + rows_per_part < rows ? begin + rows_per_part : rows;
  float total[Width];
#pragma unroll
  for (int i = 0; i < Width; ++i) total[i] = 0;
  if (column < columns) {
#pragma unroll 4
    for (std::int64_t row = begin + warp; row < end; row += kStripWarps) {
      if constexpr (Width == 8) {
        float v[8];
        unpack(load8(x + row * columns + column), v);
#pragma unroll
        for (int i = 0; i < 8; ++i) total[i] += v[i];
      } else {
        total[0] += to_float(x[row * columns + column]);
      }
    }
  }
  store_strip(total, parts + blockIdx.y * columns, [&](int place) {
    const std::int64_t c = first_column + place;
    return c < columns ? c : std::int64_t{-1};
  });
}

}  // namespace

std::size_t column_sum_workspace(std::int64_t rows, std::int64_t columns) {
  return sizeof(float) * static_cast<std::size_t>(parts_for(rows, columns)) * static_cast<std::size_t>(columns);
}

void column_sum(Type type, const void* x, std::int64_t rows, std::int64_t columns, void* out, void* workspace,
                cudaStream_t stream) {
  if (columns == 0) return;
  const int parts = parts_for(rows, columns);
  const std::int64_t rows_per_part = ceil_div<std::int64_t>(rows, parts);
  auto* const partial = static_cast<float*>(workspace);
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    const auto launch = [&](auto kernel, int width) {
      const dim3 grid(static_cast<unsigned>(ceil_div<std::int64_t>(columns, 32 * width)), static_cast<unsigned>(parts));
      kernel<<<grid, kStripThreads, 0, stream>>>(static_cast<const T*>(x), rows, columns, rows_per_part, partial);
    };
    if (columns % 8 == 0 && reinterpret_cast<std::uintptr_t>(x) % 16 == 0)
      launch(partial_sums_kernel<T, 8>, 8);
    else
      launch(partial_sums_kernel<T, 1>, 1);
    check_launch("column_sum");
    add_parts<T>(partial, parts, columns, {{static_cast<T*>(out), nullptr, nullptr}}, stream);
  });
}

}  // namespace pgpt::kernels::cuda

#pragma once

// Finding the segment of a flat buffer's element.

#include "device.cuh"

namespace pgpt::kernels::cuda {

/// Index of the first segment whose end lies beyond `element` (num_segments when none does), found by a whole warp.
__device__ inline int first_segment_past(const FlatArguments& flat, std::int64_t element) {
  const int lane = threadIdx.x % 32;
  int low = 0, high = static_cast<int>(flat.num_segments);  // the answer lies in [low, high]
  while (low < high) {
    // 32 probes cut the range 33 times finer; probe i asks whether segment low + i * stride ends at or before the
    // element.
    const int stride = (high - low + 31) / 32;
    const int probe = low + lane * stride;
    const bool before = probe < high && flat.segments[probe].end <= element;
    const int count = __popc(__ballot_sync(0xffffffffU, before));
    if (count == 0) return low;
    const int next_high = low + count * stride;
    low += (count - 1) * stride + 1;
    high = next_high < high ? next_high : high;
  }
  return low;
}

}  // namespace pgpt::kernels::cuda

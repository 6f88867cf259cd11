#pragma once

// Launcher of the copy-engine transport's only kernel. No torch here, so that the .cu file compiles fast.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace pgpt::comm {

/// Element types that can be summed; arithmetic is fp32.
enum class PartType { kFloat32, kBfloat16, kFloat16 };

/// One rank's part of a reduce-scatter. All pointers are device memory of any element-wise alignment.
struct PartSum {
  PartType type = PartType::kFloat32;  ///< of the parts; the sum is rounded to it
  bool accumulator_fp32 = false;       ///< the accumulator is fp32, else of the parts' type
  bool overwrite = false;              ///< replace the accumulator, else add to it
  float scale = 1;                     ///< multiplies each part first
  std::int64_t count = 0;              ///< elements of a part
  int ranks = 1;                       ///< number of parts
  int own_rank = 0;
  const void* own = nullptr;       ///< this rank's part; may be the accumulator
  const void* received = nullptr;  ///< the others' parts by rank, `stride` bytes apart
  std::size_t stride = 0;          ///< a multiple of 16
  void* accumulator = nullptr;
};

/// Adds the parts in rank order, rounds once, and adds the result to the accumulator. Throws DeviceError.
void sum_parts(const PartSum& sum, cudaStream_t stream);

}  // namespace pgpt::comm

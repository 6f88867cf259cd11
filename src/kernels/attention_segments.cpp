// Attention segments: their tensors, built on the host once a micro-batch.

#include <algorithm>

#include "tensor_math.h"

namespace pgpt::kernels {
namespace {

// Kernels are prepared for 16, 32, 64, ... segments.
constexpr std::int64_t kFewestSegments = 16;

}  // namespace

AttentionSegments make_attention_segments(const std::vector<std::int32_t>& cu_seqlens, std::int64_t b, std::int64_t s,
                                          bool pinned) {
  const std::int64_t tokens = b * s;
  PGPT_ASSERT(cu_seqlens.size() > 1 && cu_seqlens.front() == 0 && cu_seqlens.back() == tokens, "segments of ", tokens,
              " tokens must begin at 0 and end there");
  const auto count = static_cast<std::int64_t>(cu_seqlens.size()) - 1;
  std::int64_t capacity = kFewestSegments;
  while (capacity < count) capacity *= 2;
  const auto options = at::TensorOptions().dtype(at::kInt).pinned_memory(pinned);
  AttentionSegments segments{at::empty({capacity + 1}, options), at::zeros({capacity}, options),
                             at::empty({b, s}, options), count};
  auto* const ends = segments.cu_seqlens.mutable_data_ptr<std::int32_t>();
  auto* const lengths = segments.lengths.mutable_data_ptr<std::int32_t>();
  auto* const starts = segments.starts.mutable_data_ptr<std::int32_t>();
  std::copy(cu_seqlens.begin(), cu_seqlens.end(), ends);
  std::fill(ends + count, ends + capacity + 1, static_cast<std::int32_t>(tokens));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t begin = ends[i], end = ends[i + 1];
    PGPT_ASSERT(begin <= end, "segment ends must not decrease, found ", end, " after ", begin);
    if (begin == end) continue;
    PGPT_ASSERT(begin / s == (end - 1) / s, "the segment of tokens ", begin, " to ", end,
                " lies in two samples of length ", s);
    lengths[i] = static_cast<std::int32_t>(end - begin);
    std::fill(starts + begin, starts + end, static_cast<std::int32_t>(begin % s));
  }
  return segments;
}

AttentionSegments AttentionSegments::to(at::Device device) const {
  if (!defined()) return {};
  return {cu_seqlens.to(device, /*non_blocking=*/true), lengths.to(device, /*non_blocking=*/true),
          starts.to(device, /*non_blocking=*/true), count};
}

}  // namespace pgpt::kernels

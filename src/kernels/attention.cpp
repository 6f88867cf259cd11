// Choice of the attention implementation, and what the forms share.

#include <algorithm>

#include "attention_forms.h"

namespace pgpt::kernels {
namespace detail {

std::vector<RowBlock> row_blocks(std::int64_t heads, std::int64_t s, bool skip_future) {
  constexpr std::int64_t kScores = std::int64_t{1} << 24;
  const std::int64_t rows = std::clamp<std::int64_t>(kScores / std::max<std::int64_t>(1, heads * s), 16, 256);
  std::vector<RowBlock> blocks;
  for (std::int64_t first = 0; first < s; first += rows) {
    const std::int64_t count = std::min(rows, s - first);
    blocks.push_back({first, count, skip_future ? first + count : s});
  }
  return blocks;
}

at::Tensor hidden_keys(const AttentionSegments& segments, const RowBlock& block, at::Device device) {
  const auto ids = at::TensorOptions().dtype(segments.defined() ? at::kInt : at::kLong).device(device);
  const at::Tensor keys = at::arange(block.keys, ids);
  const at::Tensor future = keys > at::arange(block.first, block.first + block.count, ids).unsqueeze(1);
  if (!segments.defined()) return future;
  const at::Tensor starts = segments.starts.narrow(1, block.first, block.count);  // [b,rows]
  return (keys < starts.unsqueeze(1).unsqueeze(3)).logical_or_(future);
}

at::Tensor probability_factors(const AttentionOptions& options, std::int64_t heads, std::int64_t s,
                               const RowBlock& block, at::ScalarType type, at::Device device) {
  const DropoutState state{options.dropout, options.dropout_seed, options.dropout_offset, options.dropout_base};
  return dropout_factors(state, {heads, block.count, block.keys, block.first * s, s * s, s}, type, device);
}

}  // namespace detail

namespace {

enum class Implementation { kCudnn, kCudnnSegments, kFlashGpu, kFlashCpu, kFusedForm, kUnfused };

Implementation choose(const Qkv& qkv, const AttentionSegments& segments, const AttentionOptions& options,
                      const Policy& policy) {
  if (options.form != AttentionForm::kFused) return Implementation::kUnfused;
  const bool any_order = !policy.deterministic;  // in which cuDNN adds up query gradients
  if (segments.defined()) {
    if (any_order && detail::cudnn_segments_takes(qkv, segments, options)) return Implementation::kCudnnSegments;
    if (detail::flash_gpu_takes(qkv, options)) return Implementation::kFlashGpu;
  } else if (any_order && detail::cudnn_takes(qkv, options)) {
    return Implementation::kCudnn;
  } else if (!any_order && detail::flash_gpu_takes(qkv, options)) {
    return Implementation::kFlashGpu;
  }
  return policy.fast && detail::flash_cpu_takes(qkv, options) ? Implementation::kFlashCpu : Implementation::kFusedForm;
}

}  // namespace

at::Tensor attention_forward(const Qkv& qkv, const AttentionSegments& segments, const AttentionOptions& options,
                             AttentionSaved& saved, const Policy& policy) {
  detail::check_dropout(options.dropout);
  PGPT_ASSERT(qkv.q.size(2) % qkv.k.size(2) == 0, qkv.q.size(2), " query heads for ", qkv.k.size(2), " groups");
  PGPT_ASSERT(
      !segments.defined() || (segments.starts.size(0) == qkv.q.size(0) && segments.starts.size(1) == qkv.q.size(1)),
      "segments of another shape than the queries");
  saved = AttentionSaved{};
  saved.q = qkv.q;
  saved.k = qkv.k;
  saved.v = qkv.v;
  saved.segments = segments;
  saved.options = options;
  switch (choose(qkv, segments, options, policy)) {
    case Implementation::kCudnn:
      return detail::cudnn_forward(qkv, options, saved);
    case Implementation::kCudnnSegments:
      return detail::cudnn_segments_forward(qkv, segments, options, saved);
    case Implementation::kFlashGpu:
      return detail::flash_gpu_forward(qkv, segments, options, saved);
    case Implementation::kFlashCpu:
      return detail::flash_cpu_forward(qkv, segments, options, saved);
    case Implementation::kFusedForm:
      return detail::fused_form_forward(qkv, segments, options, saved);
    default:
      return detail::unfused_forward(qkv, segments, options, saved);
  }
}

Qkv attention_backward(const at::Tensor& dout, const AttentionSaved& saved, const Policy& policy) {
  switch (choose({saved.q, saved.k, saved.v}, saved.segments, saved.options, policy)) {
    case Implementation::kCudnn:
      return detail::cudnn_backward(dout, saved);
    case Implementation::kCudnnSegments:
      return detail::cudnn_segments_backward(dout, saved);
    case Implementation::kFlashGpu:
      return detail::flash_gpu_backward(dout, saved);
    case Implementation::kFlashCpu:
      return detail::flash_cpu_backward(dout, saved);
    case Implementation::kFusedForm:
      return detail::fused_form_backward(dout, saved);
    default:
      return detail::unfused_backward(dout, saved);
  }
}

std::string attention_implementation(const Qkv& qkv, const AttentionSegments& segments, const AttentionOptions& options,
                                     const Policy& policy) {
  const std::string segmented = segments.defined() ? ", segments" : "";
  switch (choose(qkv, segments, options, policy)) {
    case Implementation::kCudnn:
      return "cudnn";
    case Implementation::kCudnnSegments:
      return "cudnn, segments";
    case Implementation::kFlashGpu:
      return "flash (libtorch, CUDA)" + segmented;
    case Implementation::kFlashCpu:
      return "flash (libtorch, CPU)" + segmented;
    case Implementation::kFusedForm:
      return "composite (fused form)" + segmented;
    default:
      return std::string("composite (unfused, ") +
             (options.form == AttentionForm::kUnfused && detail::is_16bit(qkv.q) ? "16-bit" : "fp32") +
             " probabilities)" + segmented;
  }
}

}  // namespace pgpt::kernels

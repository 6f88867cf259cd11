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

at::Tensor hidden_keys(const at::Tensor& mask, const RowBlock& block, at::Device device) {
  if (mask.defined()) return mask.narrow(2, block.first, block.count).narrow(3, 0, block.keys);
  const auto ids = at::TensorOptions().dtype(at::kLong).device(device);
  return at::arange(block.keys, ids) > at::arange(block.first, block.first + block.count, ids).unsqueeze(1);
}

at::Tensor probability_factors(const AttentionOptions& options, std::int64_t heads, std::int64_t s,
                               const RowBlock& block, at::ScalarType type, at::Device device) {
  const DropoutState state{options.dropout, options.dropout_seed, options.dropout_offset, options.dropout_base};
  return dropout_factors(state, {heads, block.count, block.keys, block.first * s, s * s, s}, type, device);
}

}  // namespace detail

namespace {

enum class Implementation { kCudnn, kFlashCpu, kFusedForm, kUnfused };

Implementation choose(const Qkv& qkv, const at::Tensor& mask, const AttentionOptions& options, const Policy& policy) {
  if (options.form != AttentionForm::kFused) return Implementation::kUnfused;
  if (detail::cudnn_takes(qkv, options)) return Implementation::kCudnn;
  return policy.fast && detail::flash_cpu_takes(qkv, mask, options) ? Implementation::kFlashCpu
                                                                    : Implementation::kFusedForm;
}

}  // namespace

at::Tensor attention_forward(const Qkv& qkv, const at::Tensor& mask, const AttentionOptions& options,
                             AttentionSaved& saved, const Policy& policy) {
  detail::check_dropout(options.dropout);
  PGPT_ASSERT(qkv.q.size(2) % qkv.k.size(2) == 0, qkv.q.size(2), " query heads for ", qkv.k.size(2), " groups");
  PGPT_ASSERT(!mask.defined() || (mask.scalar_type() == at::kBool && mask.dim() == 4),
              "the mask must be bool [b,1,s,s]");
  saved = AttentionSaved{};
  saved.q = qkv.q;
  saved.k = qkv.k;
  saved.v = qkv.v;
  saved.mask = mask;
  saved.options = options;
  switch (choose(qkv, mask, options, policy)) {
    case Implementation::kCudnn:
      return detail::cudnn_forward(qkv, mask, options, saved);
    case Implementation::kFlashCpu:
      return detail::flash_cpu_forward(qkv, options, saved);
    case Implementation::kFusedForm:
      return detail::fused_form_forward(qkv, mask, options, saved);
    default:
      return detail::unfused_forward(qkv, mask, options, saved);
  }
}

Qkv attention_backward(const at::Tensor& dout, const AttentionSaved& saved, const Policy& policy) {
  switch (choose({saved.q, saved.k, saved.v}, saved.mask, saved.options, policy)) {
    case Implementation::kCudnn:
      return detail::cudnn_backward(dout, saved);
    case Implementation::kFlashCpu:
      return detail::flash_cpu_backward(dout, saved);
    case Implementation::kFusedForm:
      return detail::fused_form_backward(dout, saved);
    default:
      return detail::unfused_backward(dout, saved);
  }
}

std::string attention_implementation(const Qkv& qkv, const at::Tensor& mask, const AttentionOptions& options) {
  const std::string masked = mask.defined() ? ", custom mask" : "";
  switch (choose(qkv, mask, options, {})) {
    case Implementation::kCudnn:
      return "cudnn" + masked;
    case Implementation::kFlashCpu:
      return "flash (libtorch, CPU)";
    case Implementation::kFusedForm:
      return "composite (fused form" + masked + ")";
    default:
      return std::string("composite (unfused, ") + (options.form == AttentionForm::kUnfused ? "16-bit" : "fp32") +
             " probabilities" + masked + ")";
  }
}

}  // namespace pgpt::kernels

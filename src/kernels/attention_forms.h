#pragma once

// The attention implementations behind attention_forward; see attention.cpp for the choice.

#include "tensor_math.h"

namespace pgpt::kernels::detail {

/// Query rows [first, first + count) of the block loop; keys [0, keys) can be visible to them.
struct RowBlock {
  std::int64_t first, count, keys;
};
/// Cuts s query rows into blocks so that fp32 scores of one block over all `heads` (batch included) stay near 64 MiB.
/// With `skip_future` a block's keys end at its last row.
std::vector<RowBlock> row_blocks(std::int64_t heads, std::int64_t s, bool skip_future);

/// Bool [rows,keys] of the causal mask or [b,1,rows,keys] of `mask`, true = hidden.
at::Tensor hidden_keys(const at::Tensor& mask, const RowBlock& block, at::Device device);

/// 0 or 1/(1-p) for each probability of the block, [b*nh, rows, keys]; the element index is that of the [b,nh,s,s]
/// tensor.
at::Tensor probability_factors(const AttentionOptions& options, std::int64_t heads, std::int64_t s,
                               const RowBlock& block, at::ScalarType type, at::Device device);

/// Fused form from ATen calls: the rounding points of flash and cuDNN kernels, in row blocks.
at::Tensor fused_form_forward(const Qkv& qkv, const at::Tensor& mask, const AttentionOptions& options,
                              AttentionSaved& saved);
Qkv fused_form_backward(const at::Tensor& dout, const AttentionSaved& saved);

/// Unfused forms: scores rounded once, probabilities kept.
at::Tensor unfused_forward(const Qkv& qkv, const at::Tensor& mask, const AttentionOptions& options,
                           AttentionSaved& saved);
Qkv unfused_backward(const at::Tensor& dout, const AttentionSaved& saved);

/// libtorch's fused kernel for fp32 and fp64 CPU tensors, causal mask only.
bool flash_cpu_takes(const Qkv& qkv, const at::Tensor& mask, const AttentionOptions& options);
at::Tensor flash_cpu_forward(const Qkv& qkv, const AttentionOptions& options, AttentionSaved& saved);
Qkv flash_cpu_backward(const at::Tensor& dout, const AttentionSaved& saved);

/// cuDNN's kernels for 16-bit CUDA tensors.
bool cudnn_takes(const Qkv& qkv, const AttentionOptions& options);
at::Tensor cudnn_forward(const Qkv& qkv, const at::Tensor& mask, const AttentionOptions& options,
                         AttentionSaved& saved);
Qkv cudnn_backward(const at::Tensor& dout, const AttentionSaved& saved);

}  // namespace pgpt::kernels::detail

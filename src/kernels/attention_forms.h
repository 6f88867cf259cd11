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

/// Bool, true = hidden: [rows,keys] of the causal mask, or [b,1,rows,keys] where segments cut it.
at::Tensor hidden_keys(const AttentionSegments& segments, const RowBlock& block, at::Device device);

/// 0 or 1/(1-p) for each probability of the block, [b*nh, rows, keys]; the element index is that of the [b,nh,s,s]
/// tensor.
at::Tensor probability_factors(const AttentionOptions& options, std::int64_t heads, std::int64_t s,
                               const RowBlock& block, at::ScalarType type, at::Device device);

/// Fused form from ATen calls: the rounding points of flash and cuDNN kernels, in row blocks.
at::Tensor fused_form_forward(const Qkv& qkv, const AttentionSegments& segments, const AttentionOptions& options,
                              AttentionSaved& saved);
Qkv fused_form_backward(const at::Tensor& dout, const AttentionSaved& saved);

/// Unfused forms: scores rounded once, probabilities kept.
at::Tensor unfused_forward(const Qkv& qkv, const AttentionSegments& segments, const AttentionOptions& options,
                           AttentionSaved& saved);
Qkv unfused_backward(const at::Tensor& dout, const AttentionSaved& saved);

/// libtorch's fused kernel for fp32 and fp64 CPU tensors, one call a segment.
bool flash_cpu_takes(const Qkv& qkv, const AttentionOptions& options);
at::Tensor flash_cpu_forward(const Qkv& qkv, const AttentionSegments& segments, const AttentionOptions& options,
                             AttentionSaved& saved);
Qkv flash_cpu_backward(const at::Tensor& dout, const AttentionSaved& saved);

/// True for tensors that fused 16-bit CUDA kernels take, up to a head dimension.
bool fused_gpu_takes(const Qkv& qkv, const AttentionOptions& options, std::int64_t largest_head_dim);
/// Largest head dimension of cuDNN's backward kernels on q's device.
std::int64_t largest_cudnn_head_dim(const at::Tensor& q);

/// cuDNN's kernels for 16-bit CUDA tensors, plain causal attention, through libtorch.
bool cudnn_takes(const Qkv& qkv, const AttentionOptions& options);
at::Tensor cudnn_forward(const Qkv& qkv, const AttentionOptions& options, AttentionSaved& saved);
Qkv cudnn_backward(const at::Tensor& dout, const AttentionSaved& saved);

/// cuDNN's kernels for 16-bit CUDA tensors with segments, through its graph interface; false where the program was
/// built without it or cuDNN has no kernel. Bits of the gradients may differ from call to call.
bool cudnn_segments_takes(const Qkv& qkv, const AttentionSegments& segments, const AttentionOptions& options);
at::Tensor cudnn_segments_forward(const Qkv& qkv, const AttentionSegments& segments, const AttentionOptions& options,
                                  AttentionSaved& saved);
Qkv cudnn_segments_backward(const at::Tensor& dout, const AttentionSaved& saved);

/// libtorch's flash kernel for 16-bit CUDA tensors, with segments or without; bits repeat.
bool flash_gpu_takes(const Qkv& qkv, const AttentionOptions& options);
at::Tensor flash_gpu_forward(const Qkv& qkv, const AttentionSegments& segments, const AttentionOptions& options,
                             AttentionSaved& saved);
Qkv flash_gpu_backward(const at::Tensor& dout, const AttentionSaved& saved);

}  // namespace pgpt::kernels::detail

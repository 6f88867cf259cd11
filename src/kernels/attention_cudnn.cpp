// Fused attention of cuDNN through libtorch's (underscored) entry points; the only file that names them.

#ifdef PGPT_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#endif

#include "attention_forms.h"

namespace pgpt::kernels::detail {

std::int64_t largest_cudnn_head_dim(const at::Tensor& q) {
#ifdef PGPT_WITH_CUDA
  return at::cuda::getDeviceProperties(q.device().index())->major >= 9 ? 256 : 128;
#else
  (void)q;
  return 0;
#endif
}

bool cudnn_takes(const Qkv& qkv, const AttentionOptions& options) {
  return qkv.q.is_cuda() && fused_gpu_takes(qkv, options, largest_cudnn_head_dim(qkv.q));
}

at::Tensor cudnn_forward(const Qkv& qkv, const AttentionOptions& options, AttentionSaved& saved) {
  // An undefined tensor inside the optional would count as a bias.
  const std::optional<at::Tensor> no_bias;
  auto [out, log_sum_exp, cum_q, cum_k, max_q, max_k, seed, offset, debug] =
      at::_scaled_dot_product_cudnn_attention(qkv.q.transpose(1, 2), qkv.k.transpose(1, 2), qkv.v.transpose(1, 2),
                                              no_bias, true, 0.0, /*is_causal=*/true, false, options.scale);
  saved.log_sum_exp = log_sum_exp.squeeze(3);
  saved.philox_seed = seed;
  saved.philox_offset = offset;
  // The kernel lays its output out like the queries; a copy only when that is not [b,s,heads,d].
  saved.out = out.transpose(1, 2).contiguous();
  return saved.out;
}

Qkv cudnn_backward(const at::Tensor& dout, const AttentionSaved& saved) {
  const std::int64_t s = saved.q.size(1);
  auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
      dout.transpose(1, 2), saved.q.transpose(1, 2), saved.k.transpose(1, 2), saved.v.transpose(1, 2),
      saved.out.transpose(1, 2), saved.log_sum_exp.unsqueeze(3), saved.philox_seed, saved.philox_offset, {}, {}, {}, s,
      s, 0.0, /*is_causal=*/true, saved.options.scale);
  return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)};
}

}  // namespace pgpt::kernels::detail

// Fused attention of cuDNN through libtorch's (underscored) entry points; the only file that names them.

#ifdef PGPT_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#endif

#include <limits>

#include "attention_forms.h"

namespace pgpt::kernels::detail {
namespace {

// The mask as cuDNN wants it: added to the scores.
at::Tensor additive_bias(const at::Tensor& mask, at::ScalarType dtype) {
  return at::zeros(mask.sizes(), mask.options().dtype(dtype))
      .masked_fill_(mask, -std::numeric_limits<double>::infinity());
}

// Largest head dimension of the backward kernels.
std::int64_t largest_head_dim(const at::Tensor& q) {
#ifdef PGPT_WITH_CUDA
  return at::cuda::getDeviceProperties(q.device().index())->major >= 9 ? 256 : 128;
#else
  (void)q;
  return 0;
#endif
}

}  // namespace

bool cudnn_takes(const Qkv& qkv, const AttentionOptions& options) {
  const std::int64_t d = qkv.q.size(3);
  return qkv.q.is_cuda() && is_16bit(qkv.q) && options.dropout == 0 && qkv.q.size(1) > 1 && d % 8 == 0 &&
         d <= largest_head_dim(qkv.q);
}

at::Tensor cudnn_forward(const Qkv& qkv, const at::Tensor& mask, const AttentionOptions& options,
                         AttentionSaved& saved) {
  // An undefined tensor inside the optional would count as a bias.
  std::optional<at::Tensor> bias;
  if (mask.defined()) bias = additive_bias(mask, qkv.q.scalar_type());
  auto [out, log_sum_exp, cum_q, cum_k, max_q, max_k, seed, offset, debug] =
      at::_scaled_dot_product_cudnn_attention(qkv.q.transpose(1, 2), qkv.k.transpose(1, 2), qkv.v.transpose(1, 2), bias,
                                              true, 0.0, !mask.defined(), false, options.scale);
  saved.log_sum_exp = log_sum_exp.squeeze(3);
  saved.philox_seed = seed;
  saved.philox_offset = offset;
  // The kernel lays its output out like the queries; a copy only when that is not [b,s,heads,d].
  saved.out = out.transpose(1, 2).contiguous();
  return saved.out;
}

Qkv cudnn_backward(const at::Tensor& dout, const AttentionSaved& saved) {
  const at::Tensor bias = saved.mask.defined() ? additive_bias(saved.mask, saved.q.scalar_type()) : at::Tensor();
  const std::int64_t s = saved.q.size(1);
  auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
      dout.transpose(1, 2), saved.q.transpose(1, 2), saved.k.transpose(1, 2), saved.v.transpose(1, 2),
      saved.out.transpose(1, 2), saved.log_sum_exp.unsqueeze(3), saved.philox_seed, saved.philox_offset, bias, {}, {},
      s, s, 0.0, !saved.mask.defined(), saved.options.scale);
  return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)};
}

}  // namespace pgpt::kernels::detail

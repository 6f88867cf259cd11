// Fused attention of libtorch for fp32 and fp64 on the CPU, through its (underscored) entry points; the only file that
// names them.

#include "attention_forms.h"

namespace pgpt::kernels::detail {

// 16-bit tensors keep the composite: libtorch's kernel rounds them at other points.
bool flash_cpu_takes(const Qkv& qkv, const at::Tensor& mask, const AttentionOptions& options) {
  return qkv.q.is_cpu() && !is_16bit(qkv.q) && options.dropout == 0 && !mask.defined();
}

at::Tensor flash_cpu_forward(const Qkv& qkv, const AttentionOptions& options, AttentionSaved& saved) {
  auto [out, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(
      qkv.q.transpose(1, 2), qkv.k.transpose(1, 2), qkv.v.transpose(1, 2), 0.0, true, {}, options.scale);
  saved.log_sum_exp = log_sum_exp;
  saved.out = out.transpose(1, 2).contiguous();
  return saved.out;
}

Qkv flash_cpu_backward(const at::Tensor& dout, const AttentionSaved& saved) {
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      dout.transpose(1, 2), saved.q.transpose(1, 2), saved.k.transpose(1, 2), saved.v.transpose(1, 2),
      saved.out.transpose(1, 2), saved.log_sum_exp, 0.0, true, {}, saved.options.scale);
  return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)};
}

}  // namespace pgpt::kernels::detail

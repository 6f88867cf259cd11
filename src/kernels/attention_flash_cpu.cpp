// Fused attention of libtorch for fp32 and fp64 on the CPU, through its (underscored) entry points; the only file that
// names them.

#include "attention_forms.h"

namespace pgpt::kernels::detail {
namespace {

// Calls work(sample, first position, length) for every segment that is not empty.
template <class Work>
void for_each_segment(const AttentionSegments& segments, std::int64_t s, const Work& work) {
  const auto* const ends = segments.cu_seqlens.const_data_ptr<std::int32_t>();
  for (std::int64_t i = 0; i + 1 < segments.cu_seqlens.numel(); ++i) {
    const std::int64_t begin = ends[i], length = ends[i + 1] - begin;
    if (length > 0) work(begin / s, begin % s, length);
  }
}

// One segment of x [b,s,heads,d] as [1,heads,length,d].
at::Tensor part(const at::Tensor& x, std::int64_t sample, std::int64_t first, std::int64_t length) {
  return x.narrow(0, sample, 1).narrow(1, first, length).transpose(1, 2);
}

}  // namespace

// 16-bit tensors keep the composite: libtorch's kernel rounds them at other points.
bool flash_cpu_takes(const Qkv& qkv, const AttentionOptions& options) {
  return qkv.q.is_cpu() && !is_16bit(qkv.q) && options.dropout == 0;
}

at::Tensor flash_cpu_forward(const Qkv& qkv, const AttentionSegments& segments, const AttentionOptions& options,
                             AttentionSaved& saved) {
  const auto run = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, true, {}, options.scale);
  };
  if (!segments.defined()) {
    auto [out, log_sum_exp] = run(qkv.q.transpose(1, 2), qkv.k.transpose(1, 2), qkv.v.transpose(1, 2));
    saved.log_sum_exp = log_sum_exp;
    saved.out = out.transpose(1, 2).contiguous();
    return saved.out;
  }
  const std::int64_t b = qkv.q.size(0), s = qkv.q.size(1), nh = qkv.q.size(2);
  saved.out = at::empty({b, s, nh, qkv.q.size(3)}, qkv.q.options());
  saved.log_sum_exp = at::empty({b, nh, s}, qkv.q.options());
  for_each_segment(segments, s, [&](std::int64_t sample, std::int64_t first, std::int64_t length) {
    auto [out, log_sum_exp] =
        run(part(qkv.q, sample, first, length), part(qkv.k, sample, first, length), part(qkv.v, sample, first, length));
    part(saved.out, sample, first, length).copy_(out);
    saved.log_sum_exp.narrow(0, sample, 1).narrow(2, first, length).copy_(log_sum_exp);
  });
  return saved.out;
}

Qkv flash_cpu_backward(const at::Tensor& dout, const AttentionSaved& saved) {
  const auto run = [&](const at::Tensor& dy, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& out, const at::Tensor& log_sum_exp) {
    return at::_scaled_dot_product_flash_attention_for_cpu_backward(dy, q, k, v, out, log_sum_exp, 0.0, true, {},
                                                                    saved.options.scale);
  };
  if (!saved.segments.defined()) {
    auto [dq, dk, dv] = run(dout.transpose(1, 2), saved.q.transpose(1, 2), saved.k.transpose(1, 2),
                            saved.v.transpose(1, 2), saved.out.transpose(1, 2), saved.log_sum_exp);
    return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)};
  }
  const auto like = [](const at::Tensor& x) { return at::empty(x.sizes(), x.options()); };
  Qkv gradient{like(saved.q), like(saved.k), like(saved.v)};
  for_each_segment(saved.segments, saved.q.size(1), [&](std::int64_t sample, std::int64_t first, std::int64_t length) {
    const auto of = [&](const at::Tensor& x) { return part(x, sample, first, length); };
    auto [dq, dk, dv] = run(of(dout), of(saved.q), of(saved.k), of(saved.v), of(saved.out),
                            saved.log_sum_exp.narrow(0, sample, 1).narrow(2, first, length).contiguous());
    of(gradient.q).copy_(dq);
    of(gradient.k).copy_(dk);
    of(gradient.v).copy_(dv);
  });
  return gradient;
}

}  // namespace pgpt::kernels::detail

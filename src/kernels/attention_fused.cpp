// Attention with the rounding points of fused kernels: fp32 scores, un-normalised probabilities rounded before the
// product with v.

#include <limits>

#include "attention_forms.h"

namespace pgpt::kernels::detail {
namespace {

// A group's query heads share its keys, so they are stacked as rows: one batched product over b*ng serves all of them,
// and products that contract over rows sum the group's heads in fp32.
struct Shape {
  std::int64_t b, s, nh, ng, d, per_group;
  explicit Shape(const Qkv& qkv)
      : b(qkv.q.size(0)),
        s(qkv.q.size(1)),
        nh(qkv.q.size(2)),
        ng(qkv.k.size(2)),
        d(qkv.q.size(3)),
        per_group(nh / ng) {}
};

// Rows of x [b,s,nh,d] as [b*ng, per_group*rows, d] in the compute type.
at::Tensor stacked_rows(const at::Tensor& x, const Shape& shape, const RowBlock& block) {
  const at::Tensor rows = widen(x.narrow(1, block.first, block.count)).transpose(1, 2);
  return rows.reshape({shape.b * shape.ng, shape.per_group * block.count, shape.d});
}

// The inverse of stacked_rows: writes into rows of out [b,s,nh,d], rounding.
void store_rows(const at::Tensor& rows, const at::Tensor& out, const Shape& shape, const RowBlock& block) {
  out.narrow(1, block.first, block.count).copy_(rows.view({shape.b, shape.nh, block.count, shape.d}).transpose(1, 2));
}

// x [b,s,ng,d] as contiguous [b*ng, s, d] in the compute type.
at::Tensor keys_by_group(const at::Tensor& x, const Shape& shape) {
  return widen(x).transpose(1, 2).reshape({shape.b * shape.ng, shape.s, shape.d});
}

// [b*ng, s, d] back to [b,s,ng,d], rounded.
at::Tensor group_gradient(const at::Tensor& gradient, const Shape& shape, const at::Tensor& like) {
  return gradient.view({shape.b, shape.ng, shape.s, shape.d}).transpose(1, 2).to(like.scalar_type()).contiguous();
}

// Scaled scores of a block as [b, nh, rows, keys], hidden ones -inf.
at::Tensor scores_of(const at::Tensor& q, const at::Tensor& k, const AttentionSegments& segments, double scale,
                     const Shape& shape, const RowBlock& block) {
  at::Tensor scores = at::bmm(q, k.narrow(1, 0, block.keys).transpose(1, 2)).mul_(scale);
  scores = scores.view({shape.b, shape.nh, block.count, block.keys});
  return scores.masked_fill_(hidden_keys(segments, block, scores.device()), -std::numeric_limits<double>::infinity());
}

at::Tensor stacked(const at::Tensor& t, const Shape& shape, const RowBlock& block) {
  return t.view({shape.b * shape.ng, shape.per_group * block.count, block.keys});
}

}  // namespace

at::Tensor fused_form_forward(const Qkv& qkv, const AttentionSegments& segments, const AttentionOptions& options,
                              AttentionSaved& saved) {
  const Shape shape(qkv);
  const at::ScalarType dtype = qkv.q.scalar_type();
  const at::Tensor k = keys_by_group(qkv.k, shape);
  const at::Tensor v = keys_by_group(qkv.v, shape);
  const at::Tensor out = at::empty({shape.b, shape.s, shape.nh, shape.d}, qkv.q.options());
  saved.log_sum_exp = at::empty({shape.b, shape.nh, shape.s}, k.options());
  for (const RowBlock& block : row_blocks(shape.b * shape.nh, shape.s, true)) {
    at::Tensor p = scores_of(stacked_rows(qkv.q, shape, block), k, segments, options.scale, shape, block);
    const at::Tensor row_max = at::amax(p, {3}, true);
    p = p.sub_(row_max).exp_();
    const at::Tensor row_sum = at::sum(p, {3}, true);
    saved.log_sum_exp.narrow(2, block.first, block.count).copy_((row_max + at::log(row_sum)).squeeze(3));
    if (options.dropout > 0) {
      p = p.mul_(
          probability_factors(options, shape.b * shape.nh, shape.s, block, p.scalar_type(), p.device()).view_as(p));
    }
    const at::Tensor context = at::bmm(stacked(rounded(p, dtype), shape, block), v.narrow(1, 0, block.keys));
    store_rows(context.view({shape.b, shape.nh, block.count, shape.d}).div_(row_sum), out, shape, block);
  }
  saved.out = out;
  return out;
}

Qkv fused_form_backward(const at::Tensor& dout, const AttentionSaved& saved) {
  const Qkv qkv{saved.q, saved.k, saved.v};
  const AttentionOptions& options = saved.options;
  const Shape shape(qkv);
  const at::ScalarType dtype = qkv.q.scalar_type();
  const at::Tensor k = keys_by_group(qkv.k, shape);
  const at::Tensor v = keys_by_group(qkv.v, shape);
  const at::Tensor dk = at::zeros_like(k);
  const at::Tensor dv = at::zeros_like(v);
  Qkv gradient;
  gradient.q = at::empty({shape.b, shape.s, shape.nh, shape.d}, qkv.q.options());
  for (const RowBlock& block : row_blocks(shape.b * shape.nh, shape.s, true)) {
    const at::Tensor q = stacked_rows(qkv.q, shape, block);
    const at::Tensor dy = stacked_rows(dout, shape, block);
    const at::Tensor block_k = k.narrow(1, 0, block.keys);
    const at::Tensor block_v = v.narrow(1, 0, block.keys);
    at::Tensor p = scores_of(q, k, saved.segments, options.scale, shape, block);
    p = p.sub_(saved.log_sum_exp.narrow(2, block.first, block.count).unsqueeze(3)).exp_();
    at::Tensor dp = at::bmm(dy, block_v.transpose(1, 2)).view_as(p);
    at::Tensor dropped = p;
    if (options.dropout > 0) {
      const at::Tensor factors =
          probability_factors(options, shape.b * shape.nh, shape.s, block, p.scalar_type(), p.device()).view_as(p);
      dropped = p * factors;
      dp = dp.mul_(factors);
    }
    const at::Tensor rounded_p = stacked(rounded(dropped, dtype), shape, block);
    dv.narrow(1, 0, block.keys).baddbmm_(rounded_p.transpose(1, 2), dy);
    // Sum over keys of P*dP, equal to the row's dO*O also with dropout.
    const at::Tensor row_dot = at::sum(dy * stacked_rows(saved.out, shape, block), {2}, true);
    const at::Tensor ds =
        stacked(rounded(dp.sub_(row_dot.view({shape.b, shape.nh, block.count, 1})).mul_(p), dtype), shape, block);
    store_rows(at::bmm(ds, block_k).mul_(options.scale), gradient.q, shape, block);
    dk.narrow(1, 0, block.keys).baddbmm_(ds.transpose(1, 2), q);
  }
  gradient.k = group_gradient(at::mul(dk, options.scale), shape, qkv.k);
  gradient.v = group_gradient(dv, shape, qkv.v);
  return gradient;
}

}  // namespace pgpt::kernels::detail

// Attention as separate operations: scores rounded once after scaling, softmax, rounded probabilities, product with v.

#include "attention_forms.h"

namespace pgpt::kernels::detail {
namespace {

// What a hidden score becomes; finite, so a row without any visible key is uniform and not NaN.
constexpr double kHiddenScore = -10000.0;

struct Shape {
  std::int64_t b, s, nh, ng, d;
  explicit Shape(const Qkv& qkv)
      : b(qkv.q.size(0)), s(qkv.q.size(1)), nh(qkv.q.size(2)), ng(qkv.k.size(2)), d(qkv.q.size(3)) {}
};

// x [b,s,heads,d] as contiguous [b*nh, s, d] in the compute type, each group's head repeated for its query heads.
at::Tensor by_head(const at::Tensor& x, const Shape& shape) {
  const std::int64_t heads = x.size(2);
  at::Tensor wide = widen(x).transpose(1, 2);
  if (heads != shape.nh) {
    wide = wide.unsqueeze(2).expand({shape.b, heads, shape.nh / heads, shape.s, shape.d});
  }
  return wide.reshape({shape.b * shape.nh, shape.s, shape.d});
}

// Gradient [b*nh, s, d] as [b,s,heads,d]: rounded a query head at a time, then summed over the group and rounded again.
at::Tensor to_heads(const at::Tensor& gradient, const Shape& shape, std::int64_t heads, at::ScalarType dtype) {
  at::Tensor result = gradient.to(dtype).view({shape.b, heads, shape.nh / heads, shape.s, shape.d});
  result = heads == shape.nh ? result.squeeze(2) : at::sum(result, {2}, false, gradient.scalar_type()).to(dtype);
  return result.transpose(1, 2).contiguous();
}

}  // namespace

at::Tensor unfused_forward(const Qkv& qkv, const AttentionSegments& segments, const AttentionOptions& options,
                           AttentionSaved& saved) {
  const Shape shape(qkv);
  const std::int64_t heads = shape.b * shape.nh;
  const at::ScalarType dtype = qkv.q.scalar_type();
  const at::Tensor q = by_head(qkv.q, shape);
  const at::Tensor k = by_head(qkv.k, shape);
  const at::Tensor v = by_head(qkv.v, shape);
  const at::Tensor out = at::empty({shape.b, shape.s, shape.nh, shape.d}, qkv.q.options());
  const bool keep_wide = options.form == AttentionForm::kUnfusedFp32Softmax;
  saved.probabilities =
      at::empty({shape.b, shape.nh, shape.s, shape.s}, q.options().dtype(keep_wide ? q.scalar_type() : dtype));
  for (const RowBlock& block : row_blocks(heads, shape.s, false)) {
    at::Tensor scores =
        at::bmm(q.narrow(1, block.first, block.count), k.transpose(1, 2)).mul_(options.scale / options.score_divisor);
    scores = rounded(scores, dtype).view({shape.b, shape.nh, block.count, shape.s});
    if (options.score_divisor != 1.0) scores = scores.mul_(options.score_divisor);
    scores = scores.masked_fill_(hidden_keys(segments, block, scores.device()), kHiddenScore);
    at::Tensor p = at::softmax(scores, 3);
    saved.probabilities.narrow(2, block.first, block.count).copy_(p);
    p = rounded(p, dtype);
    if (options.dropout > 0) {
      p = rounded(p * probability_factors(options, heads, shape.s, block, p.scalar_type(), p.device()).view_as(p),
                  dtype);
    }
    const at::Tensor context = at::bmm(p.view({heads, block.count, shape.s}), v);
    out.narrow(1, block.first, block.count)
        .copy_(context.view({shape.b, shape.nh, block.count, shape.d}).transpose(1, 2));
  }
  saved.out = out;
  return out;
}

Qkv unfused_backward(const at::Tensor& dout, const AttentionSaved& saved) {
  const Qkv qkv{saved.q, saved.k, saved.v};
  const AttentionOptions& options = saved.options;
  const Shape shape(qkv);
  const std::int64_t heads = shape.b * shape.nh;
  const at::ScalarType dtype = qkv.q.scalar_type();
  const double scale = options.scale / options.score_divisor;
  const at::Tensor q = by_head(qkv.q, shape);
  const at::Tensor k = by_head(qkv.k, shape);
  const at::Tensor v = by_head(qkv.v, shape);
  const at::Tensor dy = by_head(dout, shape);
  const at::Tensor dq = at::empty_like(q);
  const at::Tensor dk = at::zeros_like(k);
  const at::Tensor dv = at::zeros_like(v);
  for (const RowBlock& block : row_blocks(heads, shape.s, false)) {
    const at::Tensor block_dy = dy.narrow(1, block.first, block.count);
    const at::Tensor p = widen(saved.probabilities.narrow(2, block.first, block.count));
    at::Tensor dropped = rounded(p, dtype);
    at::Tensor dp = rounded(at::bmm(block_dy, v.transpose(1, 2)), dtype).view_as(p);
    if (options.dropout > 0) {
      const at::Tensor factors =
          probability_factors(options, heads, shape.s, block, p.scalar_type(), p.device()).view_as(p);
      dropped = rounded(dropped * factors, dtype);
      dp = rounded(dp * factors, dtype);
    }
    dv.baddbmm_(dropped.reshape({heads, block.count, shape.s}).transpose(1, 2), block_dy);
    at::Tensor ds = (dp - at::sum(dp * p, {3}, true)).mul_(p);
    if (options.score_divisor != 1.0) ds = ds.mul_(options.score_divisor);
    ds = rounded(ds.masked_fill_(hidden_keys(saved.segments, block, ds.device()), 0.0), dtype)
             .view({heads, block.count, shape.s});
    dq.narrow(1, block.first, block.count).copy_(at::bmm(ds, k).mul_(scale));
    dk.baddbmm_(ds.transpose(1, 2), q.narrow(1, block.first, block.count));
  }
  Qkv gradient;
  gradient.q = to_heads(dq, shape, shape.nh, dtype);
  gradient.k = to_heads(at::mul(dk, scale), shape, shape.ng, dtype);
  gradient.v = to_heads(dv, shape, shape.ng, dtype);
  return gradient;
}

}  // namespace pgpt::kernels::detail

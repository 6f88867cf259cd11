#pragma once

// Attention by autograd operations in fp64, with the masks written out, as the reference of the kernels.

#include <cmath>
#include <limits>
#include <vector>

#include "pgpt/kernels/kernels.h"
#include "support/tensor_check.h"

namespace pgpt::test {

using kernels::AttentionForm;
using kernels::AttentionOptions;
using kernels::AttentionSaved;
using kernels::AttentionSegments;
using kernels::DropoutState;
using kernels::Policy;
using kernels::Qkv;

inline constexpr AttentionForm kForms[] = {AttentionForm::kFused, AttentionForm::kUnfused,
                                           AttentionForm::kUnfusedFp32Softmax};

inline at::Tensor causal_mask(std::int64_t s) { return at::ones({s, s}, at::kBool).triu(1); }

struct Sizes {
  std::int64_t b, s, nh, ng, d;
};

inline Qkv random_qkv(const Sizes& n, std::uint64_t seed) {
  return {random_normal({n.b, n.s, n.nh, n.d}, seed), random_normal({n.b, n.s, n.ng, n.d}, seed + 1),
          random_normal({n.b, n.s, n.ng, n.d}, seed + 2)};
}

// Heads first, groups repeated.
inline at::Tensor heads_of(const at::Tensor& x, std::int64_t nh) {
  return x.repeat_interleave(nh / x.size(2), 2).transpose(1, 2);
}

inline at::Tensor attention_reference(const Qkv& qkv, const at::Tensor& hidden, double scale,
                                      const at::Tensor& factors) {
  const std::int64_t nh = qkv.q.size(2);
  const at::Tensor scores = at::matmul(heads_of(qkv.q, nh), heads_of(qkv.k, nh).transpose(2, 3)) * scale;
  at::Tensor p = at::softmax(scores.masked_fill(hidden, -std::numeric_limits<double>::infinity()), 3);
  if (factors.defined()) p = p * factors;
  return at::matmul(p, heads_of(qkv.v, nh)).transpose(1, 2);
}

// The dropout factors of all probabilities, through the public function: their indices are those of [b,nh,s,s].
inline at::Tensor factors_of(const Sizes& n, const AttentionOptions& options) {
  const DropoutState state{options.dropout, options.dropout_seed, options.dropout_offset};
  return options.dropout > 0 ? kernels::dropout(at::ones({n.b, n.nh, n.s, n.s}, at::kDouble), state, {}) : at::Tensor();
}

// [b,1,s,s], true = hidden, of segments that end at `ends` (the micro-batch seen as one sequence).
inline at::Tensor segment_mask(const Sizes& n, const std::vector<std::int32_t>& ends) {
  const at::Tensor mask = at::ones({n.b, 1, n.s, n.s}, at::kBool);
  for (std::size_t i = 1; i < ends.size(); ++i) {
    const std::int64_t begin = ends[i - 1], length = ends[i] - begin;
    if (length == 0) continue;
    mask[begin / n.s][0].narrow(0, begin % n.s, length).narrow(1, begin % n.s, length).copy_(causal_mask(length));
  }
  return mask;
}

// Plain causal attention when `ends` is empty.
inline AttentionSegments segments_of(const Sizes& n, const std::vector<std::int32_t>& ends) {
  return ends.empty() ? AttentionSegments{} : kernels::make_attention_segments(ends, n.b, n.s);
}

inline void check_against_autograd(const Sizes& n, const std::vector<std::int32_t>& ends,
                                   const AttentionOptions& options, const Policy& policy = {}) {
  INFO("b " << n.b << " s " << n.s << " heads " << n.nh << " groups " << n.ng << " d " << n.d << " form "
            << static_cast<int>(options.form) << " dropout " << options.dropout << " segments " << ends.size());
  const Qkv random = random_qkv(n, 1);
  const Qkv in{leaf(random.q), leaf(random.k), leaf(random.v)};
  const at::Tensor dout = random_normal({n.b, n.s, n.nh, n.d}, 9);
  const at::Tensor expected = attention_reference(in, ends.empty() ? causal_mask(n.s) : segment_mask(n, ends),
                                                  options.scale, factors_of(n, options));
  expected.backward(dout);
  const c10::NoGradGuard guard;
  AttentionSaved saved;
  const at::Tensor out = kernels::attention_forward({in.q.detach(), in.k.detach(), in.v.detach()}, segments_of(n, ends),
                                                    options, saved, policy);
  const Qkv gradient = kernels::attention_backward(dout, saved, policy);
  // Five chained contractions over at most s or d terms (two of them per-key sums over the queries of a group), of
  // products of at most three values below 5 with a sum of sqrt(d) * 5 inside the exponential.
  const double terms = static_cast<double>(std::max(n.s * n.nh / n.ng, n.d));
  const double bound = gradient_bound(5, terms, 5 * 5 * 5 * 5 * std::sqrt(static_cast<double>(n.d)));
  require_within(out, expected, bound);
  require_within(gradient.q, in.q.grad(), bound);
  require_within(gradient.k, in.k.grad(), bound);
  require_within(gradient.v, in.v.grad(), bound);
}

}  // namespace pgpt::test

// Attention kept inside segments on the GPU (cuDNN's kernels and libtorch's flash kernel) against exact values with
// bounds that follow from the rounding points, and rotary positions that restart.

#include <c10/cuda/CUDACachingAllocator.h>

#include <cmath>

#include "support/attention_check.h"
#include "support/gpu_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

struct Parts {
  at::Tensor out, q, k, v;
};

// Attention inside segments and its gradients in fp64, and for each element how far a fused kernel may be off. To first
// order, with u a roundoff of the 16-bit type and e(n) that of an fp32 sum of n terms; fp16 numbers below 2^-14 are
// spaced by 2^-24, so half of that is added wherever one is made.
struct FusedReference {
  Parts value, bound;

  FusedReference(const Qkv& in, const at::Tensor& dout, const Sizes& n, const std::vector<std::int32_t>& ends,
                 double scale) {
    const double u = roundoff(in.q.scalar_type()), tiny = in.q.scalar_type() == at::kHalf ? 0x1p-25 : 0.0;
    const auto e = [](std::int64_t terms) { return static_cast<double>(terms) * kRoundoff32; };
    const auto t = [](const at::Tensor& x) { return x.transpose(2, 3); };
    const at::Tensor q = heads_of(wide(in.q), n.nh), k = heads_of(wide(in.k), n.nh), v = heads_of(wide(in.v), n.nh),
                     dy = heads_of(wide(dout), n.nh);
    const at::Tensor hidden = gpu(segment_mask(n, ends)), visible = hidden.logical_not().to(at::kDouble);
    const at::Tensor scores = at::matmul(q, t(k)) * scale;
    const at::Tensor p = at::softmax(scores.masked_fill(hidden, -std::numeric_limits<double>::infinity()), 3);
    const at::Tensor out = at::matmul(p, v), dp = at::matmul(dy, t(v)), row = (dy * out).sum({3}, true);
    const at::Tensor ds = p * (dp - row);
    // A score is a sum of d products, scaled; the exponential turns its absolute error into a relative one. Numerator
    // and row sum share the largest score error of the row; s + 16 more for the sum, the exponential and the quotient.
    const at::Tensor score_error = at::matmul(q.abs(), t(k.abs())) * scale * e(n.d + 4) * visible;
    const at::Tensor p_error = p * (2 * score_error.amax({3}, true) + e(n.s + 16));
    // Probabilities are rounded before they meet v or dy.
    const at::Tensor rounded_p_error = p_error + p * u + visible * tiny;
    const at::Tensor out_error =
        at::matmul(rounded_p_error, v.abs()) + at::matmul(p, v.abs()) * e(n.s + 4) + out.abs() * u + tiny;
    const at::Tensor dv_error =
        at::matmul(t(rounded_p_error), dy.abs()) + at::matmul(t(p), dy.abs()) * e(n.s + 4) + tiny;
    // The row term is taken from the rounded output.
    const at::Tensor row_error = (dy.abs() * out_error).sum({3}, true) + (dy * out).abs().sum({3}, true) * e(n.d + 4);
    const at::Tensor dp_error = at::matmul(dy.abs(), t(v.abs())) * e(n.d + 4);
    // Score gradients are rounded, before or after they are scaled.
    const at::Tensor ds_error = p_error * (dp - row).abs() + p * (dp_error + row_error) +
                                p * (dp.abs() + row.abs()) * e(8) + ds.abs() * u + visible * (tiny / scale);
    const at::Tensor dq = at::matmul(ds, k) * scale, dk = at::matmul(t(ds), q) * scale, dv = at::matmul(t(p), dy);
    const at::Tensor dq_error =
        (at::matmul(ds_error, k.abs()) + at::matmul(ds.abs(), k.abs()) * e(n.s + 4)) * scale + dq.abs() * u + tiny;
    const at::Tensor dk_error =
        (at::matmul(t(ds_error), q.abs()) + at::matmul(t(ds.abs()), q.abs()) * e(n.s + 4)) * scale + tiny;
    // Gradients of keys and values may be rounded for each query head, then summed over the group's and rounded again.
    const auto to_groups = [&](const at::Tensor& x) {
      return x.transpose(1, 2).reshape({n.b, n.s, n.ng, n.nh / n.ng, n.d}).sum(3);
    };
    const auto group_error = [&](const at::Tensor& exact, const at::Tensor& error) {
      return to_groups(error + exact.abs() * u) + to_groups(exact).abs() * u;
    };
    value = {out.transpose(1, 2), dq.transpose(1, 2), to_groups(dk), to_groups(dv)};
    // Products of errors add less than (1 + u)^4 - 1 < 0.02.
    bound = {out_error.transpose(1, 2) * 1.02, dq_error.transpose(1, 2) * 1.02, group_error(dk, dk_error) * 1.02,
             group_error(dv, dv_error) * 1.02};
  }
};

// Views into one packed tensor where the layout has them (as many groups as heads, or one), else tensors of their own.
Qkv packed_heads(const Sizes& n, at::ScalarType type) {
  return split_qkv(gpu_normal({n.b, n.s, (n.nh + 2 * n.ng) * n.d}, 71, type), n.nh, n.ng, n.d, nullptr, kComposite);
}

std::vector<std::int32_t> documents(std::int64_t tokens, std::int32_t length) {
  std::vector<std::int32_t> ends{0};
  while (ends.back() < tokens) ends.push_back(std::min(static_cast<std::int32_t>(tokens), ends.back() + length));
  return ends;
}

}  // namespace

TEST_CASE("GPU attention inside segments is the fused form, by every kernel that does it", "[gpu]") {
  if (!at::hasCUDA()) return;
  struct Case {
    std::int64_t b, s;
    std::vector<std::int32_t> ends;
  };
  const std::vector<Case> cases{
      {2, 192, {0, 0, 1, 60, 60, 60, 192, 192, 300, 383, 384, 384}},  // no and one token among others
      {2, 192, {0, 192, 384}},                                        // whole samples
      {1, 640, documents(640, 16)},                                   // 40 segments: prepared for 64
      {3, 100, {0, 3, 100, 200, 250, 300}},                           // a length that is no multiple of a tile
  };
  for (const Case& c : cases) {
    for (const std::int64_t d : {64, 128}) {
      for (const std::int64_t ng : {8, 2, 1}) {
        for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
          const Sizes n{c.b, c.s, 8, ng, d};
          const Qkv in = packed_heads(n, type);
          const at::Tensor dout = gpu_normal({n.b, n.s, n.nh, n.d}, 72, type);
          const AttentionSegments segments = segments_of(n, c.ends).to(at::kCUDA);
          AttentionOptions options;
          options.scale = 1 / std::sqrt(static_cast<double>(d));
          const FusedReference expected(in, dout, n, c.ends, options.scale);
          for (const bool deterministic : {false, true}) {
            const Policy policy{true, deterministic};
            const std::string name = attention_implementation(in, segments, options, policy);
            INFO(name << ", b " << n.b << " s " << n.s << " groups " << ng << " d " << d << " " << type);
            if (deterministic) REQUIRE(name == "flash (libtorch, CUDA), segments");
            poison_free_memory();
            AttentionSaved saved, again;
            const at::Tensor out = attention_forward(in, segments, options, saved, policy);
            const Qkv gradient = attention_backward(dout, saved, policy);
            REQUIRE(out.is_contiguous());
            require_within(out, expected.value.out, expected.bound.out);
            require_within(gradient.q, expected.value.q, expected.bound.q);
            require_within(gradient.k, expected.value.k, expected.bound.k);
            require_within(gradient.v, expected.value.v, expected.bound.v);
            require_equal(attention_forward(in, segments, options, again, policy), out);
            if (!deterministic) continue;
            for (int i = 0; i < 3; ++i) {
              const Qkv repeated = attention_backward(dout, again, policy);
              require_equal(repeated.q, gradient.q);
              require_equal(repeated.k, gradient.k);
              require_equal(repeated.v, gradient.v);
            }
          }
          // The bounds tell segments from none: most rows of plain causal attention are far outside.
          if (c.ends.size() > 4) {
            AttentionSaved causal;
            const at::Tensor out = attention_forward(in, {}, options, causal, kFast);
            CHECK((wide(out) - expected.value.out).abs().gt(expected.bound.out).to(at::kDouble).mean().item<double>() >
                  0.1);
          }
        }
      }
    }
  }
}

TEST_CASE("GPU attention inside segments without a fused kernel equals the CPU's", "[gpu]") {
  if (!at::hasCUDA()) return;
  const Sizes n{2, 37, 4, 2, 6};
  const std::vector<std::int32_t> ends{0, 5, 6, 37, 37, 74};
  const Qkv host = random_qkv(n, 81), device{gpu(host.q), gpu(host.k), gpu(host.v)};
  const at::Tensor dout = random_normal({n.b, n.s, n.nh, n.d}, 84);
  for (const AttentionForm form : kForms) {
    AttentionOptions options;
    options.form = form;
    options.scale = 0.4;
    options.dropout = 0.25;
    AttentionSaved on_gpu, on_cpu;
    const double bound = gradient_bound(5, 80, 5 * 5 * 5 * 5 * std::sqrt(6.0));
    require_within(attention_forward(device, segments_of(n, ends).to(at::kCUDA), options, on_gpu, kFast),
                   attention_forward(host, segments_of(n, ends), options, on_cpu, kFast), bound);
    const Qkv a = attention_backward(gpu(dout), on_gpu, kFast), b = attention_backward(dout, on_cpu, kFast);
    require_within(a.q, b.q, bound);
    require_within(a.k, b.k, bound);
    require_within(a.v, b.v, bound);
  }
}

TEST_CASE("GPU attention inside segments needs no memory of sequence by sequence size", "[gpu]") {
  if (!at::hasCUDA()) return;
  const Sizes n{1, 16384, 1, 1, 64};
  const Qkv in = packed_heads(n, at::kBFloat16);
  const AttentionSegments segments = segments_of(n, documents(n.s, 1500)).to(at::kCUDA);
  const auto stats = [] { return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0]; };
  for (const bool deterministic : {false, true}) {
    const Policy policy{true, deterministic};
    INFO(attention_implementation(in, segments, {}, policy));
    c10::cuda::CUDACachingAllocator::resetPeakStats(0);
    const auto before = stats().current;
    AttentionSaved saved;
    const at::Tensor out = attention_forward(in, segments, {}, saved, policy);
    (void)attention_backward(out, saved, policy);
    // One byte for each query and key is 256 MiB. Each output and gradient is 2 MiB, the fp32 sum of query gradients 5
    // MiB with its padding; the deterministic kernel has that once for each of ceil(132 multiprocessors / 16 segments).
    CHECK(stats().peak - before < n.s * n.s);
  }
}

TEST_CASE("CUDA rope turns by the positions that it is given", "[gpu]") {
  if (!at::hasCUDA()) return;
  struct Shape {
    std::int64_t b, s, heads, groups, d, dim;
  };
  for (const Shape& n : {Shape{2, 65, 8, 8, 128, 128}, Shape{2, 33, 8, 2, 64, 64}, Shape{3, 17, 6, 1, 96, 96},
                         Shape{2, 9, 6, 3, 6, 4}, Shape{2, 19, 4, 4, 64, 16}}) {
    for (const at::ScalarType type : {at::kBFloat16, at::kFloat}) {
      for (const bool interleaved : {false, true}) {
        INFO("s " << n.s << " heads " << n.heads << " groups " << n.groups << " d " << n.d << " type " << type
                  << " interleaved " << interleaved);
        RopeOptions options;
        options.dim = n.dim;
        options.interleaved = interleaved;
        const RopeTable table = make_rope_table(n.s, options, at::Device(at::kCUDA, 0));
        const std::int64_t tokens = n.b * n.s, width = (n.heads + 2 * n.groups) * n.d;
        const at::Tensor positions =
            (at::arange(tokens, table.cos.options().dtype(at::kInt)) * 7 % n.s).view({n.b, n.s});
        const at::Tensor indices = at::arange(n.s, table.cos.options().dtype(at::kInt)).expand({n.b, n.s}).contiguous();
        // The same angles as a table of its own for every token of one long sample.
        const RopeTable spelled{table.cos.index_select(0, positions.view({-1})),
                                table.sin.index_select(0, positions.view({-1})), options};
        const at::Tensor packed = gpu_normal({n.b, n.s, width}, 91, type);
        const auto flat = [&](const at::Tensor& t) { return t.reshape({1, tokens, t.size(2), t.size(3)}); };
        const Qkv turned = split_qkv(packed.clone(), n.heads, n.groups, n.d, &table, kFast, positions);
        const Qkv wanted = split_qkv(packed.clone().view({1, tokens, width}), n.heads, n.groups, n.d, &spelled, kFast);
        require_same(flat(turned.q), wanted.q);
        require_same(flat(turned.k), wanted.k);
        require_same(flat(turned.v), wanted.v);
        at::Tensor sums, wanted_sums;
        const at::Tensor merged = merge_qkv_gradient(turned, &table, kFast, &sums, positions);
        require_same(merged.view({1, tokens, width}), merge_qkv_gradient(wanted, &spelled, kFast, &wanted_sums));
        require_same(sums, wanted_sums);
        require_same(merge_qkv_gradient(turned, &table, kFast, nullptr, positions), merged);
        at::Tensor x = turned.q.clone(), y = wanted.q.clone();
        rope_(x, table, true, kFast, positions);
        rope_(y, spelled, true, kFast);
        require_same(flat(x), y);
        require_same(split_qkv(packed.clone(), n.heads, n.groups, n.d, &table, kFast, indices).q,
                     split_qkv(packed.clone(), n.heads, n.groups, n.d, &table, kFast).q);
      }
    }
  }
}

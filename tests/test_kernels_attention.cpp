// Attention: every form against autograd in fp64, rounding points in bf16, groups, dropout, block boundaries.

#include <ATen/Parallel.h>

#include <cmath>
#include <limits>

#include "pgpt/base/error.h"
#include "support/attention_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

at::Tensor r(const at::Tensor& t) { return to_bf16_values(t); }

struct Results {
  at::Tensor out, q, k, v;
};

// Attention and its gradients in fp64, and for each what fp32 arithmetic may be off by, to first order. u is one
// roundoff; `terms` of them cover a sum of so many terms in any order; |t| are sums of absolute values.
struct Fp32Reference {
  Results value, bound;

  Fp32Reference(const Qkv& in, const at::Tensor& dout, double scale) {
    const std::int64_t s = in.q.size(1), nh = in.q.size(2), d = in.q.size(3), per_group = nh / in.k.size(2);
    const auto roundoffs = [](std::int64_t terms) { return static_cast<double>(terms) * kRoundoff32; };
    const auto wide = [&](const at::Tensor& t) { return heads_of(t.to(at::kDouble), nh); };
    const at::Tensor q = wide(in.q), k = wide(in.k), v = wide(in.v), dy = wide(dout);
    const auto t = [](const at::Tensor& x) { return x.transpose(2, 3); };
    const at::Tensor scores = at::matmul(q, t(k)) * scale;
    const at::Tensor p = at::softmax(scores.masked_fill(causal_mask(s), -std::numeric_limits<double>::infinity()), 3);
    const at::Tensor out = at::matmul(p, v), dp = at::matmul(dy, t(v)), row = (dy * out).sum({3}, true);
    const at::Tensor ds = p * (dp - row);
    // A score is a sum of d products, scaled; the exponential turns its absolute error into a relative one. Numerator
    // and row sum share the largest score error of the row; s + 16 more for the sum, the exponential and the quotient.
    const at::Tensor score_error = at::matmul(q.abs(), t(k.abs())) * scale * roundoffs(d + 4);
    const at::Tensor p_error =
        p * (2 * score_error.masked_fill(causal_mask(s), 0.0).amax({3}, true) + roundoffs(s + 16));
    const at::Tensor out_error = at::matmul(p_error, v.abs()) + at::matmul(p, v.abs()) * roundoffs(s + 4);
    const at::Tensor row_error =
        (dy.abs() * out_error).sum({3}, true) + (dy * out).abs().sum({3}, true) * roundoffs(d + 4);
    const at::Tensor dp_error = at::matmul(dy.abs(), t(v.abs())) * roundoffs(d + 4);
    const at::Tensor ds_error =
        p_error * (dp - row).abs() + p * (dp_error + row_error) + p * (dp.abs() + row.abs()) * roundoffs(8);
    const auto product = [&](const at::Tensor& a, const at::Tensor& a_error, const at::Tensor& b, std::int64_t terms) {
      return at::matmul(a_error, b.abs()) + at::matmul(a.abs(), b.abs()) * roundoffs(terms + 4);
    };
    // Gradients of keys and values are sums over the queries of a group.
    const auto to_groups = [&](const at::Tensor& x) {
      return x.transpose(1, 2).reshape({x.size(0), s, nh / per_group, per_group, d}).sum(3);
    };
    value = {out.transpose(1, 2), at::matmul(ds, k).transpose(1, 2) * scale, to_groups(at::matmul(t(ds), q)) * scale,
             to_groups(at::matmul(t(p), dy))};
    bound = {out_error.transpose(1, 2), product(ds, ds_error, k, s).transpose(1, 2) * scale,
             to_groups(product(t(ds), t(ds_error), q, s * per_group)) * scale,
             to_groups(product(t(p), t(p_error), dy, s * per_group))};
  }
};

}  // namespace

TEST_CASE("attention and its gradients agree with autograd in fp64", "[cpu]") {
  // One token; odd sizes; groups; more rows than one block of the row loop.
  for (const Sizes& n : {Sizes{2, 1, 2, 2, 4}, Sizes{2, 7, 6, 2, 5}, Sizes{1, 19, 4, 1, 8}, Sizes{1, 300, 2, 1, 4}}) {
    for (const AttentionForm form : kForms) {
      for (const double rate : {0.0, 0.25}) {
        AttentionOptions options;
        options.form = form;
        options.scale = 0.4;
        options.dropout = rate;
        options.dropout_seed = 77;
        options.dropout_offset = 12;
        check_against_autograd(n, {}, options);
        // The composite, where libtorch's kernel ran above.
        if (form == AttentionForm::kFused) check_against_autograd(n, {}, options, {.fast = false});
      }
    }
  }
}

TEST_CASE("query-key layer scaling changes only the rounding", "[cpu]") {
  const Sizes n{1, 12, 2, 2, 8};
  for (const AttentionForm form : kForms) {
    AttentionOptions options;
    options.form = form;
    options.scale = 0.35;
    options.score_divisor = 3;
    check_against_autograd(n, {}, options);
  }
  // In fp16 the divided scores stay finite where the undivided ones overflow to Inf (65504), which is its purpose.
  AttentionOptions options;
  options.form = AttentionForm::kUnfusedFp32Softmax;
  const at::Tensor big = at::full({1, 2, 1, 4}, 150.0, at::kHalf);
  AttentionSaved saved;
  CHECK(attention_forward({big, big, big}, {}, options, saved, {}).isnan().any().item<bool>());
  options.score_divisor = 2;
  CHECK(attention_forward({big, big, big}, {}, options, saved, {}).isfinite().all().item<bool>());
}

TEST_CASE("grouped queries equal repeated keys and values, their gradients the sums", "[cpu]") {
  const Sizes n{2, 10, 6, 2, 4};
  const Qkv in = random_qkv(n, 3);
  const Qkv wide{in.q, in.k.repeat_interleave(3, 2), in.v.repeat_interleave(3, 2)};
  const at::Tensor dout = random_normal({n.b, n.s, n.nh, n.d}, 8);
  for (const AttentionForm form : kForms) {
    AttentionOptions options;
    options.form = form;
    AttentionSaved saved, wide_saved;
    const double bound = gradient_bound(5, 30, 5 * 5 * 5 * 5 * 2);
    require_within(attention_forward(in, {}, options, saved, {}), attention_forward(wide, {}, options, wide_saved, {}),
                   bound);
    const Qkv grouped = attention_backward(dout, saved, {}), repeated = attention_backward(dout, wide_saved, {});
    const auto sum = [&](const at::Tensor& t) { return t.view({n.b, n.s, n.ng, 3, n.d}).sum(3); };
    require_within(grouped.q, repeated.q, bound);
    require_within(grouped.k, sum(repeated.k), bound);
    require_within(grouped.v, sum(repeated.v), bound);
  }
}

TEST_CASE("fp32 attention on the CPU stays within fp32 rounding of fp64, through libtorch and as a composite",
          "[cpu]") {
  // The kernel's three sizes of query blocks (32, 64, 256), none a divisor of the length; more than one block of keys.
  for (const Sizes& n : {Sizes{2, 45, 4, 4, 32}, Sizes{1, 201, 4, 2, 16}, Sizes{1, 790, 3, 1, 8}}) {
    const Qkv random = random_qkv(n, 11);
    const at::Tensor packed =
        at::cat({random.q.view({n.b, n.s, n.ng, -1, n.d}), random.k.unsqueeze(3), random.v.unsqueeze(3)}, 3)
            .to(at::kFloat);
    const Qkv in = split_qkv(packed.view({n.b, n.s, -1}), n.nh, n.ng, n.d, nullptr, {});
    const at::Tensor dout = random_normal({n.b, n.s, n.nh, n.d}, 12).to(at::kFloat);
    AttentionOptions options;
    options.scale = 1 / std::sqrt(static_cast<double>(n.d));
    const Fp32Reference expected(in, dout, options.scale);
    std::vector<at::Tensor> outputs;
    for (const bool fast : {true, false}) {
      INFO("s " << n.s << " heads " << n.nh << " groups " << n.ng << " fast " << fast);
      const Policy policy{.fast = fast};
      AttentionSaved saved;
      const at::Tensor out = attention_forward(in, {}, options, saved, policy);
      const Qkv gradient = attention_backward(dout, saved, policy);
      REQUIRE(out.is_contiguous());
      REQUIRE(saved.log_sum_exp.sizes().vec() == std::vector<std::int64_t>{n.b, n.nh, n.s});
      require_within(out, expected.value.out, expected.bound.out);
      require_within(gradient.q, expected.value.q, expected.bound.q);
      require_within(gradient.k, expected.value.k, expected.bound.k);
      require_within(gradient.v, expected.value.v, expected.bound.v);
      outputs.push_back(out);
    }
    // The bounds are sharp enough to tell a wrong result: a mask off by one is far outside.
    CHECK((outputs[0].to(at::kDouble) - expected.value.out.roll(1, 1)).abs().gt(expected.bound.out).any().item<bool>());
  }
}

TEST_CASE("fp32 attention on the CPU gives the same bits with any number of threads", "[cpu]") {
  const Sizes n{1, 300, 4, 1, 16};
  const Qkv random = random_qkv(n, 21);
  const Qkv in{random.q.to(at::kFloat), random.k.to(at::kFloat), random.v.to(at::kFloat)};
  const at::Tensor dout = random_normal({n.b, n.s, n.nh, n.d}, 22).to(at::kFloat);
  const int threads = at::get_num_threads();
  std::vector<Results> results;
  for (const int count : {1, 4}) {
    at::set_num_threads(count);
    AttentionSaved saved;
    const at::Tensor out = attention_forward(in, {}, AttentionOptions{}, saved, {});
    const Qkv gradient = attention_backward(dout, saved, {});
    results.push_back({out, gradient.q, gradient.k, gradient.v});
  }
  at::set_num_threads(threads);
  require_equal(results[0].out, results[1].out);
  require_equal(results[0].q, results[1].q);
  require_equal(results[0].k, results[1].k);
  require_equal(results[0].v, results[1].v);
}

TEST_CASE("strided inputs give the same bits as contiguous ones", "[cpu]") {
  const Sizes n{2, 17, 4, 4, 8};
  const at::Tensor packed = random_normal({n.b, n.s, n.ng * 3 * n.d}, 1).to(at::kBFloat16);
  const Qkv views = split_qkv(packed, n.nh, n.ng, n.d, nullptr, {});
  REQUIRE_FALSE(views.k.is_contiguous());
  const Qkv copies{views.q.contiguous(), views.k.contiguous(), views.v.contiguous()};
  const at::Tensor dout = random_normal({n.b, n.s, n.nh, n.d}, 2).to(at::kBFloat16);
  for (const AttentionForm form : kForms) {
    AttentionOptions options;
    options.form = form;
    AttentionSaved a, b;
    require_equal(attention_forward(views, {}, options, a, {}), attention_forward(copies, {}, options, b, {}));
    const Qkv da = attention_backward(dout, a, {}), db = attention_backward(dout, b, {});
    require_equal(da.q, db.q);
    require_equal(da.k, db.k);
    require_equal(da.v, db.v);
  }
}

TEST_CASE("bf16 attention rounds exactly where its form says", "[cpu]") {
  const Sizes n{2, 64, 4, 4, 32};
  const double scale = 1 / std::sqrt(32.0);
  const Qkv random = random_qkv(n, 5);
  const Qkv in{random.q.to(at::kBFloat16), random.k.to(at::kBFloat16), random.v.to(at::kBFloat16)};
  const at::Tensor dout = random_normal({n.b, n.s, n.nh, n.d}, 6).to(at::kBFloat16);
  const auto head = [](const at::Tensor& t) { return t.to(at::kDouble).transpose(1, 2); };
  const at::Tensor q = head(in.q), k = head(in.k), v = head(in.v), dy = head(dout);
  const at::Tensor hidden = causal_mask(n.s);
  const at::Tensor exact_scores = at::matmul(q, k.transpose(2, 3)) * scale;

  // Each result is a bf16 number that an fp32 error of some 2^-20 relative (sums of 64 terms) moves to its neighbour
  // with a probability of about 2^-20 / 2^-8, and each of the some hundred roundings feeding it likewise at weight
  // 1/64: below 1 element in 50 in all.
  const std::int64_t allowed = in.q.numel() / 50;
  std::vector<at::Tensor> outputs;
  for (const AttentionForm form : kForms) {
    INFO("form " << static_cast<int>(form));
    AttentionOptions options;
    options.form = form;
    options.scale = scale;
    AttentionSaved saved;
    const at::Tensor out = attention_forward(in, {}, options, saved, {});
    const Qkv gradient = attention_backward(dout, saved, {});
    at::Tensor p, rounded_p, expected, ds;
    const at::Tensor dp = at::matmul(dy, v.transpose(2, 3));
    if (form == AttentionForm::kFused) {
      const at::Tensor scores = exact_scores.masked_fill(hidden, -std::numeric_limits<double>::infinity());
      const at::Tensor e = (scores - scores.amax({3}, true)).exp(), sum = e.sum({3}, true);
      expected = r(at::matmul(r(e), v) / sum);
      p = e / sum;
      rounded_p = r(p);
      ds = r(p * (dp - (dy * expected).sum({3}, true)));
    } else {
      p = at::softmax(r(exact_scores).masked_fill(hidden, -10000.0), 3);
      rounded_p = r(p);
      expected = r(at::matmul(rounded_p, v));
      if (form == AttentionForm::kUnfused) p = rounded_p;
      ds = r(p * (r(dp) - (r(dp) * p).sum({3}, true)));
      CHECK(saved.probabilities.scalar_type() == (form == AttentionForm::kUnfused ? at::kBFloat16 : at::kFloat));
    }
    CHECK(mismatches(head(out), expected) <= allowed);
    CHECK(mismatches(head(gradient.q), r(at::matmul(ds, k) * scale)) <= allowed);
    CHECK(mismatches(head(gradient.k), r(at::matmul(ds.transpose(2, 3), q) * scale)) <= allowed);
    CHECK(mismatches(head(gradient.v), r(at::matmul(rounded_p.transpose(2, 3), dy))) <= allowed);
    outputs.push_back(out);
    outputs.push_back(gradient.q);
  }
  // The forms are told apart by this test: fused from unfused by the output, the unfused ones by their gradients.
  CHECK(mismatches(outputs[0], outputs[2]) > 4 * allowed);
  CHECK(mismatches(outputs[2], outputs[4]) == 0);
  CHECK(mismatches(outputs[3], outputs[5]) > 4 * allowed);
}

TEST_CASE("attention dropout repeats its mask from seed and offset and keeps the expected share", "[cpu]") {
  const Sizes n{1, 33, 2, 2, 8};
  const Qkv random = random_qkv(n, 5);
  const Qkv in{random.q.to(at::kBFloat16), random.k.to(at::kBFloat16), random.v.to(at::kBFloat16)};
  for (const AttentionForm form : kForms) {
    AttentionOptions options;
    options.form = form;
    options.dropout = 0.3;
    options.dropout_seed = 5;
    options.dropout_offset = 8;
    AttentionSaved saved, other;
    const at::Tensor first = attention_forward(in, {}, options, saved, {});
    require_equal(attention_forward(in, {}, options, other, {}), first);
    options.dropout_offset = 12;
    CHECK(mismatches(attention_forward(in, {}, options, other, {}), first) > 0);
    options.dropout = 1.0;
    CHECK_THROWS_AS(attention_forward(in, {}, options, other, {}), ConfigError);
  }
}

TEST_CASE("the log names the attention implementation that runs", "[cpu]") {
  const Qkv wide = random_qkv({1, 4, 2, 2, 8}, 1);
  AttentionOptions options;
  CHECK(attention_implementation(wide, {}, options) == "flash (libtorch, CPU)");
  const Qkv in{wide.q.to(at::kBFloat16), wide.k.to(at::kBFloat16), wide.v.to(at::kBFloat16)};
  CHECK(attention_implementation(in, {}, options) == "composite (fused form)");
  const AttentionSegments segments = make_attention_segments({0, 3, 4}, 1, 4);
  CHECK(attention_implementation(wide, segments, options) == "flash (libtorch, CPU), segments");
  CHECK(attention_implementation(in, segments, options) == "composite (fused form), segments");
  options.form = AttentionForm::kUnfused;
  CHECK(attention_implementation(in, {}, options) == "composite (unfused, 16-bit probabilities)");
  const Qkv single{wide.q.to(at::kFloat), wide.k.to(at::kFloat), wide.v.to(at::kFloat)};
  CHECK(attention_implementation(single, {}, options) == "composite (unfused, fp32 probabilities)");
  options.form = AttentionForm::kUnfusedFp32Softmax;
  CHECK(attention_implementation(in, {}, options) == "composite (unfused, fp32 probabilities)");
}

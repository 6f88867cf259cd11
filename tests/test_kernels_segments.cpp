// Attention kept inside segments (documents of a sample), and rotary positions that restart in each.

#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <stdexcept>

#include "support/attention_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

// The largest block that libtorch's CPU allocator hands out to this thread while the watch is set.
struct LargestAllocation : c10::MemoryReportingInfoBase {
  std::int64_t bytes = 0;
  void reportMemoryUsage(void* /*ptr*/, std::int64_t alloc_size, std::size_t /*total_allocated*/,
                         std::size_t /*total_reserved*/, c10::Device /*device*/) override {
    bytes = std::max(bytes, alloc_size);
  }
  [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }
};

}  // namespace

TEST_CASE("attention inside segments and its gradients agree with autograd in fp64", "[cpu]") {
  struct Case {
    Sizes n;
    std::vector<std::int32_t> ends;
  };
  const std::vector<Case> cases{
      {{2, 9, 4, 2, 4}, {0, 4, 7, 9, 11, 18}},              // other cuts in each sample
      {{2, 9, 4, 4, 4}, {0, 0, 1, 2, 2, 2, 9, 9, 17, 18}},  // no and one token, at both ends of a sample
      {{1, 5, 2, 1, 4}, {0, 1, 2, 3, 4, 5}},                // a token sees itself only
      {{3, 4, 6, 3, 5}, {0, 4, 8, 12}},                     // whole samples
      {{1, 300, 2, 1, 4}, {0, 3, 255, 258, 300}},           // over the edge of a block of rows
      {{1, 40, 2, 2, 4}, {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 40}},  // more than 16
  };
  for (const Case& c : cases) {
    for (const AttentionForm form : kForms) {
      for (const double rate : {0.0, 0.5}) {
        AttentionOptions options;
        options.form = form;
        options.scale = 0.5;
        options.dropout = rate;
        options.dropout_seed = 5;
        check_against_autograd(c.n, c.ends, options);
        if (form == AttentionForm::kFused) check_against_autograd(c.n, c.ends, options, {.fast = false});
      }
    }
  }
}

TEST_CASE("one segment a sample has the bits of plain causal attention, and empty segments change none", "[cpu]") {
  const Sizes n{3, 70, 4, 2, 16};
  const Qkv random = random_qkv(n, 31);
  const at::Tensor dout = random_normal({n.b, n.s, n.nh, n.d}, 32);
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const Qkv in{random.q.to(type), random.k.to(type), random.v.to(type)};
    for (const AttentionForm form : kForms) {
      for (const bool fast : {true, false}) {
        AttentionOptions options;
        options.form = form;
        AttentionSaved plain, whole, empty;
        const Policy policy{.fast = fast};
        const at::Tensor expected = attention_forward(in, {}, options, plain, policy);
        const Qkv gradient = attention_backward(dout.to(type), plain, policy);
        const auto check = [&](const std::vector<std::int32_t>& ends, AttentionSaved& saved) {
          require_equal(attention_forward(in, segments_of(n, ends), options, saved, policy), expected);
          const Qkv other = attention_backward(dout.to(type), saved, policy);
          require_equal(other.q, gradient.q);
          require_equal(other.k, gradient.k);
          require_equal(other.v, gradient.v);
          if (plain.log_sum_exp.defined()) require_equal(saved.log_sum_exp, plain.log_sum_exp);
        };
        check({0, 70, 140, 210}, whole);
        check({0, 0, 70, 70, 70, 140, 210, 210}, empty);
      }
    }
  }
}

TEST_CASE("a document inside a sample gives the rows and gradients that it gives alone", "[cpu]") {
  const Sizes n{2, 50, 4, 2, 8};
  const std::vector<std::int32_t> ends{0, 17, 18, 50, 83, 100};
  const Qkv in = random_qkv(n, 41);
  const at::Tensor dout = random_normal({n.b, n.s, n.nh, n.d}, 42);
  for (const AttentionForm form : kForms) {
    for (const bool fast : {true, false}) {
      INFO("form " << static_cast<int>(form) << " fast " << fast);
      AttentionOptions options;
      options.form = form;
      options.scale = 0.35;
      AttentionSaved saved;
      const Policy policy{.fast = fast};
      const at::Tensor out = attention_forward(in, segments_of(n, ends), options, saved, policy);
      const Qkv gradient = attention_backward(dout, saved, policy);
      // The same formula over the same numbers, in other blocks; one kernel over the same numbers has the same bits.
      const bool same_code = form == AttentionForm::kFused && fast;
      const double bound = same_code ? 0.0 : gradient_bound(5, 64, 5 * 5 * 5 * 5 * std::sqrt(8.0));
      for (std::size_t i = 1; i < ends.size(); ++i) {
        const auto part = [&](const at::Tensor& t) {
          return t.narrow(0, ends[i - 1] / n.s, 1).narrow(1, ends[i - 1] % n.s, ends[i] - ends[i - 1]).contiguous();
        };
        AttentionSaved alone;
        require_within(part(out), attention_forward({part(in.q), part(in.k), part(in.v)}, {}, options, alone, policy),
                       bound);
        const Qkv expected = attention_backward(part(dout), alone, policy);
        require_within(part(gradient.q), expected.q, bound);
        require_within(part(gradient.k), expected.k, bound);
        require_within(part(gradient.v), expected.v, bound);
      }
    }
  }
}

TEST_CASE("segments are padded to a power of two, and bad ones are refused", "[cpu]") {
  const AttentionSegments few = make_attention_segments({0, 3, 3, 8, 10, 16}, 2, 8);
  REQUIRE(few.lengths.numel() == 16);
  REQUIRE(few.cu_seqlens.numel() == 17);
  CHECK(at::equal(few.cu_seqlens.narrow(0, 0, 6), at::tensor({0, 3, 3, 8, 10, 16}, at::kInt)));
  CHECK(at::equal(few.cu_seqlens.narrow(0, 6, 11), at::full({11}, 16, at::kInt)));
  CHECK(at::equal(few.lengths, few.cu_seqlens.diff().to(at::kInt)));
  CHECK(at::equal(few.starts, at::tensor({0, 0, 0, 3, 3, 3, 3, 3, 0, 0, 2, 2, 2, 2, 2, 2}, at::kInt).view({2, 8})));
  std::vector<std::int32_t> ends;
  for (std::int32_t i = 0; i <= 17; ++i) ends.push_back(i);
  CHECK(make_attention_segments(ends, 1, 17).lengths.numel() == 32);
  ends.pop_back();
  CHECK(make_attention_segments(ends, 1, 16).lengths.numel() == 16);
  for (const std::vector<std::int32_t>& wrong :
       {std::vector<std::int32_t>{}, {0}, {0, 15}, {1, 8, 16}, {0, 9, 16}, {0, 16}, {0, 8, 6, 16}}) {
    CHECK_THROWS_AS(make_attention_segments(wrong, 2, 8), std::logic_error);
  }
}

TEST_CASE("attention inside segments makes nothing of sequence by sequence size on the CPU", "[cpu]") {
  // libtorch's kernel has a buffer for each thread.
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const Sizes n{1, 4096, 1, 1, 8};
  const Qkv random = random_qkv(n, 51);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const Qkv in{random.q.to(type), random.k.to(type), random.v.to(type)};
    auto largest = std::make_shared<LargestAllocation>();
    {
      const c10::DebugInfoGuard watch(c10::DebugInfoKind::PROFILER_STATE, largest);
      AttentionSaved saved;
      const at::Tensor out =
          attention_forward(in, make_attention_segments({0, 1000, 1001, 4096}, 1, 4096), {}, saved, {});
      (void)attention_backward(out, saved, {});
    }
    CHECK(largest->bytes > 0);
    CHECK(largest->bytes < n.s * n.s);  // one byte an element: the smallest mask
  }
  at::set_num_threads(threads);
}

TEST_CASE("rope turns by the positions that it is given, and by the index where it is given none", "[cpu]") {
  const std::int64_t b = 2, s = 11, d = 8;
  const std::vector<std::int32_t> restarts{0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  const at::Tensor positions = at::tensor(restarts, at::kInt).view({b, s});
  const at::Tensor indices = at::arange(s, at::kInt).expand({b, s}).contiguous();
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (const bool interleaved : {false, true}) {
      for (const bool fused : {true, false}) {
        INFO("type " << type << " interleaved " << interleaved << " fused " << fused);
        RopeOptions options;
        options.dim = 6;
        options.interleaved = interleaved;
        options.fused_rounding = fused;
        const RopeTable table = make_rope_table(s + 2, options, at::kCPU);
        for (const auto& [heads, groups] : {std::pair<std::int64_t, std::int64_t>{2, 2}, {4, 2}, {3, 1}}) {
          const std::int64_t width = (heads + 2 * groups) * d;
          const at::Tensor packed = random_normal({b, s, width}, 61).to(type);
          const auto split = [&](const at::Tensor& t, const at::Tensor& at_positions) {
            return split_qkv(t.clone(), heads, groups, d, &table, {}, at_positions);
          };
          const Qkv plain = split(packed, {}), indexed = split(packed, indices), turned = split(packed, positions);
          require_equal(indexed.q, plain.q);
          require_equal(indexed.k, plain.k);
          require_equal(merge_qkv_gradient(plain, &table, {}, nullptr, indices), merge_qkv_gradient(plain, &table, {}));
          // Tokens 3 to 10 of the first sample are documents of 1 and of 7 tokens: each as if it stood alone.
          for (const auto& [first, length] : {std::pair<std::int64_t, std::int64_t>{3, 1}, {4, 7}}) {
            const auto part = [&](const at::Tensor& t) { return t.narrow(0, 0, 1).narrow(1, first, length); };
            const Qkv alone = split(part(packed), {});
            require_equal(part(turned.q), alone.q);
            require_equal(part(turned.k), alone.k);
            require_equal(part(turned.v), alone.v);
            require_equal(part(merge_qkv_gradient(turned, &table, {}, nullptr, positions)),
                          merge_qkv_gradient({part(turned.q), part(turned.k), part(turned.v)}, &table, {}));
            at::Tensor x = plain.q.clone(), y = part(plain.q).clone();
            rope_(x, table, true, {}, positions);
            rope_(y, table, true, {});
            require_equal(part(x), y);
          }
          CHECK(mismatches(turned.q, plain.q) > 0);
        }
      }
    }
  }
}

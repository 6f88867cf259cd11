// Embedding, cross entropy, dropout and residual sums.

#include <cmath>

#include "../src/kernels/philox.h"
#include "pgpt/base/error.h"
#include "pgpt/kernels/kernels.h"
#include "support/tensor_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

at::Tensor random_ids(std::int64_t count, std::int64_t limit, std::uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randint(limit, {count}, generator, at::TensorOptions().dtype(at::kLong));
}

}  // namespace

TEST_CASE("embedding and its gradient agree with autograd in fp64", "[cpu]") {
  const Policy policy;
  for (const std::int64_t tokens : {1, 50}) {
    const at::Tensor table = leaf(random_normal({6, 130}, 1)), ids = random_ids(tokens, 6, 2),
                     dy = random_normal({tokens, 130}, 3);
    const at::Tensor expected = at::embedding(table, ids);
    expected.backward(dy);
    const c10::NoGradGuard guard;
    require_within(embedding_forward(table, ids), expected, 0.0);
    const double bound = gradient_bound(1, 50, 5 * 50);
    require_within(embedding_gradient(dy, ids, 6, policy), table.grad(), bound);
    at::Tensor main = at::ones({6, 130}, at::kDouble);
    accumulate_embedding_gradient(main, dy, ids, policy);
    require_within(main, table.grad() + 1, bound);
  }
}

TEST_CASE("embedding gradients of bf16 sum in fp32 and round once", "[cpu]") {
  // 300 times 1 is lost in bf16 arithmetic (257 + 1 = 257 or 258 there), exact in fp32, and 300 is a bf16 number.
  const at::Tensor dy = at::ones({300, 3}, at::kBFloat16), ids = at::zeros({300}, at::kLong);
  const at::Tensor gradient = embedding_gradient(dy, ids, 2, {});
  REQUIRE(gradient.scalar_type() == at::kBFloat16);
  CHECK(gradient[0][0].item<double>() == 300);
  CHECK(gradient[1].abs().sum().item<double>() == 0);
  at::Tensor main = at::full({2, 3}, 0.5, at::kFloat);
  accumulate_embedding_gradient(main, dy, ids, {});
  CHECK(main[0][2].item<double>() == 300.5);
}

TEST_CASE("token ids and labels outside the table are refused with the number", "[cpu]") {
  const at::Tensor table = at::zeros({4, 2}, at::kFloat), ids = at::tensor(std::vector<std::int64_t>{0, 4}, at::kLong);
  CHECK_THROWS_AS(embedding_forward(table, ids), DataError);
  CHECK_THROWS_AS(embedding_gradient(at::zeros({2, 2}, at::kFloat), ids - 1 - 3, 4, {}), DataError);
  CHECK_THROWS_AS(cross_entropy_forward(at::zeros({2, 4}, at::kFloat), ids, {}), DataError);
}

TEST_CASE("cross entropy and its gradient agree with autograd in fp64", "[cpu]") {
  const Policy policy;
  // One token; a vocabulary that is no multiple of 8; more tokens than one block of the loop (2^17 elements).
  struct Sizes {
    std::int64_t tokens, vocabulary;
  };
  for (const Sizes n : {Sizes{1, 5}, Sizes{9, 1003}, Sizes{50, 100003}}) {
    const at::Tensor logits = leaf(random_normal({n.tokens, n.vocabulary}, 1) * 4),
                     labels = random_ids(n.tokens, n.vocabulary, 2);
    const at::Tensor scale = random_normal({n.tokens}, 3);
    const at::Tensor expected = -at::log_softmax(logits, 1).gather(1, labels.unsqueeze(1)).squeeze(1);
    expected.backward(scale);
    const c10::NoGradGuard guard;
    // A sum over the vocabulary of values below 1 and the logarithm of it, at arguments below 40.
    const double bound = gradient_bound(2, static_cast<double>(n.vocabulary), 40);
    require_within(cross_entropy_forward(logits, labels, policy), expected, bound);
    at::Tensor in_place = logits.detach().clone();
    require_within(cross_entropy_forward_backward_(in_place, labels, scale, policy), expected, bound);
    require_within(in_place, logits.grad(), bound);
  }
}

TEST_CASE("cross entropy of bf16 logits is fp32 inside and rounds the gradient once", "[cpu]") {
  const std::int64_t tokens = 40, vocabulary = 509;
  at::Tensor logits = (random_normal({tokens, vocabulary}, 1) * 2).to(at::kBFloat16);
  const at::Tensor labels = random_ids(tokens, vocabulary, 2), scale = at::full({tokens}, 1.0 / 40, at::kFloat);
  const at::Tensor wide = leaf(logits.to(at::kDouble));
  const at::Tensor expected = -at::log_softmax(wide, 1).gather(1, labels.unsqueeze(1)).squeeze(1);
  expected.backward(scale.to(at::kDouble));
  const c10::NoGradGuard guard;
  const at::Tensor loss = cross_entropy_forward(logits, labels, {});
  REQUIRE(loss.scalar_type() == at::kFloat);
  // Sum of 509 positive values: at most 509 roundoffs relative, so that much absolute in its logarithm; values below 20
  // elsewhere.
  const double fp32_error = (509 + 4 * 20) * kRoundoff32;
  require_within(loss, expected, fp32_error);
  require_equal(cross_entropy_forward_backward_(logits, labels, scale, {}), loss);
  require_within(logits, wide.grad(), wide.grad().abs() * (kRoundoffBf16 + 2 * fp32_error) + fp32_error / 40);
}

TEST_CASE("large logits do not overflow", "[cpu]") {
  at::Tensor logits = at::tensor(std::vector<double>{3e4, -3e4, 0}, at::kDouble).view({1, 3}).to(at::kBFloat16);
  const at::Tensor loss = cross_entropy_forward(logits, at::zeros({1}, at::kLong), {});
  CHECK(loss.item<double>() == 0);
}

TEST_CASE("a dropout mask is the documented function of seed, offset and index", "[cpu]") {
  const Policy policy;
  const DropoutState state{0.3, 0x123456789ABCDEFULL, 0x100000004ULL};
  const std::int64_t count = 10007;
  const at::Tensor x = at::ones({count}, at::kFloat);
  const at::Tensor y = dropout(x, state, policy);
  const float* out = y.const_data_ptr<float>();
  const auto threshold = static_cast<std::uint32_t>(0.3 * 4294967296.0);
  std::int64_t wrong = 0, kept = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto words = kernels::detail::philox(state.seed, state.offset, static_cast<std::uint64_t>(i / 4));
    const float expected = words.word[i % 4] >= threshold ? static_cast<float>(1 / (1 - 0.3)) : 0.0F;
    if (out[i] != expected) ++wrong;
    if (out[i] != 0) ++kept;
  }
  CHECK(wrong == 0);
  // Binomial with deviation sqrt(n p (1-p)) = 46: five of them.
  CHECK(std::abs(static_cast<double>(kept) - 0.7 * count) < 5 * 46);
  require_equal(dropout(x, state, policy), y);
  require_equal(dropout(x.view({count, 1}), state, policy).view({count}), y);
  DropoutState next = state;
  next.offset += 4;
  CHECK(mismatches(dropout(x, next, policy), y) > count / 4);
  const DropoutState none{0.0, 1, 2};
  CHECK(dropout(x, none, policy).is_same(x));
  CHECK_THROWS_AS(dropout(x, DropoutState{1.0, 0, 0}, policy), ConfigError);
}

TEST_CASE("philox gives the published known answers", "[cpu]") {
  struct Answer {
    std::uint64_t seed, low, high;
    std::uint32_t word[4];
  };
  // Random123, kat_vectors, philox4x32 with 10 rounds.
  const Answer answers[] = {
      {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {~0ULL, ~0ULL, ~0ULL, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {0x299f31d0a4093822ULL,
       0x85a308d3243f6a88ULL,
       0x0370734413198a2eULL,
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const Answer& answer : answers) {
    const auto words = kernels::detail::philox(answer.seed, answer.low, answer.high);
    for (int i = 0; i < 4; ++i) CHECK(words.word[i] == answer.word[i]);
  }
}

TEST_CASE("bias, dropout and residual share one rounding when fused", "[cpu]") {
  const Policy policy;
  const auto bf16 = [](double value) { return at::full({1, 1}, value, at::kBFloat16); };
  const DropoutState none;
  // 2^-8 is half the spacing above 1: it is lost when added alone, and two of them are one step.
  const at::Tensor x = bf16(1), half_step = bf16(0x1p-8);
  CHECK(bias_dropout_add(x, half_step.view({1}), half_step, none, true, policy).item<double>() == 1 + 0x1p-7);
  CHECK(bias_dropout_add(x, half_step.view({1}), half_step, none, false, policy).item<double>() == 1);
  // Without bias and dropout both are the plain sum, also into an fp32 residual.
  for (const bool fused : {true, false}) {
    CHECK(bias_dropout_add(x, {}, half_step, none, fused, policy).item<double>() == 1);
    const at::Tensor wide = bias_dropout_add(x, {}, half_step.to(at::kFloat), none, fused, policy);
    CHECK(wide.scalar_type() == at::kFloat);
    CHECK(wide.item<double>() == 1 + 0x1p-8);
  }
  const at::Tensor a = random_normal({6, 50}, 1), bias = random_normal({50}, 2), residual = random_normal({6, 50}, 3);
  const DropoutState state{0.4, 9, 16};
  for (const bool fused : {true, false}) {
    const at::Tensor expected = residual + dropout(at::ones_like(a), state, policy) * (a + bias);
    require_within(bias_dropout_add(a, bias, residual, state, fused, policy), expected, 4 * 20 * kRoundoff64);
  }
}

// Flat-buffer norms and optimizer steps.

#include <cmath>
#include <limits>

#include "pgpt/kernels/kernels.h"
#include "support/tensor_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

constexpr std::int64_t kSize = 150000;

// Two segments with a gap, the second longer than one piece of work; the last is a duplicate that another rank counts.
SegmentTable segments() {
  return make_segment_table({{0, 1000, 0, 1.0F, 1.0F}, {1024, 140001, 1, 0.0F, 1.0F}, {140032, kSize, 0, 1.0F, 0.0F}},
                            at::kCPU);
}

bool in_a_segment(std::int64_t i) { return i < 1000 || (i >= 1024 && i < 140001) || i >= 140032; }

StepScalars scalars(std::vector<float> values) { return {at::tensor(values, at::kFloat)}; }

struct Buffers {
  at::Tensor weights, master, first, second, gradient;
};

Buffers buffers(at::ScalarType weight_type, at::ScalarType gradient_type) {
  Buffers b;
  b.master = random_normal({kSize}, 1).to(at::kFloat);
  b.weights = weight_type == at::kFloat ? b.master : b.master.to(weight_type);
  b.first = random_normal({kSize}, 2).to(at::kFloat);
  b.second = random_normal({kSize}, 3).abs().to(at::kFloat);
  b.gradient = random_normal({kSize}, 4).to(gradient_type);
  return b;
}

const float* data(const at::Tensor& t) { return t.const_data_ptr<float>(); }

}  // namespace

TEST_CASE("squared norm and zero count cover the counted segments only", "[cpu]") {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kDouble}) {
    at::Tensor flat = random_normal({kSize}, 1).to(type);
    flat.slice(0, 3, 8).zero_();
    flat.slice(0, 1000, 1024).fill_(std::numeric_limits<double>::quiet_NaN());
    flat.slice(0, 2000, 2010).zero_();
    flat.slice(0, 140032, 140040).zero_();
    const at::Tensor counted = at::cat({flat.slice(0, 0, 1000), flat.slice(0, 1024, 140001)}).to(at::kDouble);
    const double exact = counted.square().sum().item<double>();
    const at::Tensor norm = squared_norm(flat, segments(), {});
    REQUIRE(norm.scalar_type() == at::kDouble);
    // Positive terms: a relative error of at most one roundoff an addition.
    CHECK(std::abs(norm.item<double>() - exact) <= exact * kSize * kRoundoff64);
    CHECK(count_zeros(flat, segments()).item<std::int64_t>() == 15);
  }
  // Each of 139977 + 1000 values 1 + 2^-7: squares of bf16 sum exactly in fp64.
  const at::Tensor flat = at::full({kSize}, 1 + 0x1p-7, at::kBFloat16);
  CHECK(squared_norm(flat, segments(), {}).item<double>() == (138977.0 + 1000.0) * (1 + 0x1p-7) * (1 + 0x1p-7));
}

TEST_CASE("any NaN or infinity is found", "[cpu]") {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    at::Tensor flat = random_normal({10007}, 1).to(type);
    CHECK(has_non_finite(flat).item<float>() == 0.0F);
    for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
                             -std::numeric_limits<double>::infinity()}) {
      for (const std::int64_t position : {0, 5000, 10006}) {
        at::Tensor copy = flat.clone();
        copy[position].fill_(bad);
        CHECK(has_non_finite(copy).item<float>() == 1.0F);
      }
    }
  }
  CHECK(has_non_finite(at::empty({0}, at::kFloat)).item<float>() == 0.0F);
}

TEST_CASE("adam agrees with a scalar loop in double precision", "[cpu]") {
  const AdamOptions options{0.9F, 0.95F, 1e-8F};
  for (const at::ScalarType weight_type : {at::kBFloat16, at::kHalf, at::kFloat}) {
    for (const at::ScalarType gradient_type : {at::kFloat, at::kBFloat16, at::kHalf}) {
      Buffers b = buffers(weight_type, gradient_type);
      const Buffers before{b.weights.clone(), b.master.clone(), b.first.clone(), b.second.clone(),
                           b.gradient.to(at::kFloat)};
      const float scale = 0.37F, correction1 = 0.271F, correction2 = 0.142625F, decay = 0.1F, rates[2] = {3e-4F, 1e-3F};
      adam_step(b.weights, b.master, b.first, b.second, b.gradient, segments(), options,
                scalars({scale, 0, correction1, correction2, decay, 0, rates[0], rates[1], 0, 0}), {});
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < kSize; ++i) {
        if (!in_a_segment(i)) {
          if (data(b.master)[i] != data(before.master)[i] || data(b.first)[i] != data(before.first)[i]) ++wrong;
          continue;
        }
        const bool second_group = i >= 1024 && i < 140001;
        const double g = static_cast<double>(data(before.gradient)[i]) * scale;
        const double m =
            static_cast<double>(options.beta1) * data(before.first)[i] + (1 - static_cast<double>(options.beta1)) * g;
        const double v = static_cast<double>(options.beta2) * data(before.second)[i] +
                         (1 - static_cast<double>(options.beta2)) * g * g;
        const double p = data(before.master)[i];
        const double quotient = m / correction1 / (std::sqrt(v / correction2) + options.epsilon);
        const double rate = rates[second_group ? 1 : 0];
        const double expected = p - rate * (quotient + (second_group ? 0.0 : static_cast<double>(decay)) * p);
        // Per operation one fp32 roundoff of its result. m: 4 operations on |b1 m|, |g| (1 - beta in fp32 is exact
        // within a roundoff of 1, relative to 0.1 ten roundoffs). Its quotient inherits that, v's error halved, and 6
        // operations; p the final subtraction.
        const double terms_m = std::abs(data(before.first)[i]) + std::abs(g);
        const double error_m = 6 * kRoundoff32 * terms_m;
        const double error_q = error_m / correction1 / (std::sqrt(v / correction2) + options.epsilon) +
                               30 * kRoundoff32 * std::abs(quotient);
        const double error_p = rate * (error_q + 6 * kRoundoff32 * (std::abs(quotient) + std::abs(p))) +
                               kRoundoff32 * (std::abs(p) + std::abs(expected));
        if (!(std::abs(data(b.first)[i] - m) <= error_m)) ++wrong;
        if (!(std::abs(data(b.second)[i] - v) <= 40 * kRoundoff32 * v)) ++wrong;
        if (!(std::abs(data(b.master)[i] - expected) <= error_p)) ++wrong;
      }
      CHECK(wrong == 0);
      const at::Tensor first_segment = b.weights.slice(0, 0, 1000);
      require_equal(first_segment, b.master.slice(0, 0, 1000).to(weight_type));
      require_equal(b.weights.slice(0, 1000, 1024), before.weights.slice(0, 1000, 1024));
    }
  }
}

TEST_CASE("adam evaluates the documented order of operations in fp32", "[cpu]") {
  const AdamOptions options;
  Buffers b = buffers(at::kFloat, at::kFloat);
  const Buffers before{{}, b.master.clone(), b.first.clone(), b.second.clone(), b.gradient};
  adam_step(b.weights, b.master, b.first, b.second, b.gradient, segments(), options,
            scalars({1, 0, 0.1F, 0.001F, 0.01F, 0, 1e-3F, 1e-3F}), {});
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < 1000; ++i) {
    // Separate statements: this file is compiled without contraction too.
    const float g = data(before.gradient)[i], p = data(before.master)[i];
    const float m = 0.9F * data(before.first)[i] + (1.0F - 0.9F) * g;
    const float v = 0.999F * data(before.second)[i] + (1.0F - 0.999F) * g * g;
    const float expected = p - 1e-3F * (m / 0.1F / (std::sqrt(v / 0.001F) + 1e-8F) + 0.01F * p);
    if (data(b.master)[i] != expected || data(b.first)[i] != m || data(b.second)[i] != v) ++wrong;
  }
  CHECK(wrong == 0);
}

TEST_CASE("a skipped or lr 0 step leaves the bits it must leave", "[cpu]") {
  Buffers b = buffers(at::kBFloat16, at::kFloat);
  const Buffers before{b.weights.clone(), b.master.clone(), b.first.clone(), b.second.clone(), b.gradient};
  b.gradient = at::full({kSize}, std::numeric_limits<double>::quiet_NaN(), at::kFloat);
  const std::vector<float> skipped{1, 1, 0.1F, 0.1F, 0.1F, 0, 1e-3F, 1e-3F};
  adam_step(b.weights, b.master, b.first, b.second, b.gradient, segments(), {}, scalars(skipped), {});
  sgd_step(b.weights, b.master, b.first, b.gradient, segments(), 0.9, scalars(skipped), {});
  require_equal(b.weights, before.weights);
  require_equal(b.master, before.master);
  require_equal(b.first, before.first);
  require_equal(b.second, before.second);
  b.gradient = before.gradient;
  adam_step(b.weights, b.master, b.first, b.second, b.gradient, segments(), {},
            scalars({1, 0, 0.1F, 0.1F, 0.1F, 0, 0, 0}), {});
  require_equal(b.master, before.master);
  CHECK(mismatches(b.first, before.first) > kSize / 2);
}

TEST_CASE("sgd with momentum follows its formula", "[cpu]") {
  for (const bool first_step : {true, false}) {
    Buffers b = buffers(at::kBFloat16, at::kBFloat16);
    const Buffers before{b.weights.clone(), b.master.clone(), b.first.clone(), b.second.clone(),
                         b.gradient.to(at::kFloat)};
    sgd_step(b.weights, b.master, b.first, b.gradient, segments(), 0.9,
             scalars({0.5F, 0, 1, 1, 0.1F, first_step ? 1.0F : 0.0F, 0.01F, 0.02F}), {});
    const auto check = [&](std::int64_t begin, std::int64_t end, float decay, float rate) {
      const auto part = [&](const at::Tensor& t) { return t.slice(0, begin, end); };
      const at::Tensor g = part(before.gradient) * 0.5F + decay * part(before.master);
      const at::Tensor buffer = first_step ? g : part(before.first) * 0.9F + g;
      require_equal(part(b.first), buffer);
      require_equal(part(b.master), part(before.master) - rate * buffer);
      require_equal(part(b.weights), part(b.master).to(at::kBFloat16));
    };
    check(0, 1000, 0.1F, 0.01F);
    check(1024, 140001, 0.0F, 0.02F);
    require_equal(b.weights.slice(0, 1000, 1024), before.weights.slice(0, 1000, 1024));
  }
}

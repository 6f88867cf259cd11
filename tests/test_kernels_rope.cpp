// Rotary positions and the packed QKV layout.

#include <cmath>
#include <numbers>

#include "pgpt/kernels/kernels.h"
#include "support/tensor_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

// The rotation written out with the table's own angles: out of place, so autograd can follow it.
at::Tensor reference(const at::Tensor& x, const RopeTable& table) {
  const std::int64_t s = x.size(1), dim = table.options.dim;
  const at::Tensor cos = table.cos.narrow(0, 0, s).to(at::kDouble), sin = table.sin.narrow(0, 0, s).to(at::kDouble);
  std::vector<at::Tensor> channels;
  for (std::int64_t c = 0; c < x.size(3); ++c) channels.push_back(x.select(3, c));
  std::vector<at::Tensor> out = channels;
  for (std::int64_t j = 0; j < dim / 2; ++j) {
    const auto a = static_cast<std::size_t>(table.options.interleaved ? 2 * j : j);
    const auto b = static_cast<std::size_t>(table.options.interleaved ? 2 * j + 1 : j + dim / 2);
    const at::Tensor c = cos.select(1, j).view({1, s, 1}), n = sin.select(1, j).view({1, s, 1});
    out[a] = channels[a] * c - channels[b] * n;
    out[b] = channels[b] * c + channels[a] * n;
  }
  return at::stack(out, 3);
}

}  // namespace

TEST_CASE("rope rotates as written out, and backward is its transpose", "[cpu]") {
  const Policy policy;
  for (const bool interleaved : {false, true}) {
    for (const std::int64_t dim : {2, 6, 10}) {
      RopeOptions options;
      options.dim = dim;
      options.interleaved = interleaved;
      const RopeTable table = make_rope_table(9, options, at::kCPU);
      const at::Tensor x = leaf(random_normal({2, 7, 3, 10}, 1)), dy = random_normal({2, 7, 3, 10}, 2);
      const at::Tensor expected = reference(x, table);
      expected.backward(dy);
      const c10::NoGradGuard guard;
      at::Tensor y = x.detach().clone();
      rope_(y, table, false, policy);
      // One sum of two products of values below 5 and 1.
      require_within(y, expected, 4 * 5 * kRoundoff64);
      at::Tensor dx = dy.clone();
      rope_(dx, table, true, policy);
      require_within(dx, x.grad(), 4 * 5 * kRoundoff64);
    }
  }
}

TEST_CASE("rope angles follow the fp32 formula, interpolation and llama3 scaling", "[cpu]") {
  RopeOptions options;
  options.dim = 8;
  options.base = 500000;
  const auto frequency = [&](std::int64_t j) { return std::pow(options.base, -2.0 * static_cast<double>(j) / 8.0); };
  // fp32 power, reciprocal, product and cosine: a few roundoffs of an angle below 4096, so 4096 * 8 roundoffs absolute.
  const double bound = 4096 * 8 * kRoundoff32;
  const auto check = [&](const RopeTable& table, const auto& angle) {
    at::Tensor cos = at::empty({4096, 4}, at::kDouble), sin = at::empty({4096, 4}, at::kDouble);
    for (std::int64_t p = 0; p < 4096; ++p) {
      for (std::int64_t j = 0; j < 4; ++j) {
        cos.mutable_data_ptr<double>()[p * 4 + j] = std::cos(angle(p, j));
        sin.mutable_data_ptr<double>()[p * 4 + j] = std::sin(angle(p, j));
      }
    }
    REQUIRE(table.cos.scalar_type() == at::kFloat);
    require_within(table.cos, cos, bound);
    require_within(table.sin, sin, bound);
  };
  check(make_rope_table(4096, options, at::kCPU),
        [&](auto p, auto j) { return static_cast<double>(p) * frequency(j); });
  options.interpolation_factor = 4;
  check(make_rope_table(4096, options, at::kCPU),
        [&](auto p, auto j) { return static_cast<double>(p) * frequency(j) / 4; });
  options.interpolation_factor = 0;
  options.llama3_scaling = true;
  options.scaling_factor = 8;
  // Base 500000 at 8 channels: wavelengths 6.3 and 167 stay, 4443 blends, 118149 is divided.
  check(make_rope_table(4096, options, at::kCPU), [&](auto p, auto j) {
    const double f = frequency(j), wavelength = 2 * std::numbers::pi / f;
    const double t = (8192 / wavelength - 1) / 3;
    const double scaled = wavelength > 8192 ? f / 8 : wavelength < 2048 ? f : f * ((1 - t) / 8 + t);
    return static_cast<double>(p) * scaled;
  });
}

TEST_CASE("unfused rope rounds cosine, sine, products and sum; fused rope rounds once", "[cpu]") {
  const Policy policy;
  RopeOptions options;
  options.dim = 64;
  const at::Tensor x = random_normal({2, 40, 4, 64}, 1).to(at::kBFloat16);
  const RopeTable table = make_rope_table(40, options, at::kCPU);
  at::Tensor fused = x.clone();
  rope_(fused, table, false, policy);
  const at::Tensor exact = reference(x.to(at::kDouble), table);
  // fp32: two products and a sum of values below 5, then one rounding.
  require_within(fused, exact, exact.abs() * kRoundoffBf16 + 3 * 10 * kRoundoff32);

  options.fused_rounding = false;
  const RopeTable unfused_table{table.cos, table.sin, options};
  at::Tensor unfused = x.clone();
  rope_(unfused, unfused_table, false, policy);
  const auto r = [](const at::Tensor& t) { return t.to(at::kFloat).to(at::kBFloat16).to(at::kDouble); };
  const at::Tensor cos = r(table.cos).view({1, 40, 1, 32}), sin = r(table.sin).view({1, 40, 1, 32});
  const at::Tensor a = x.narrow(3, 0, 32).to(at::kDouble), b = x.narrow(3, 32, 32).to(at::kDouble);
  // Products of two bf16 numbers are exact in fp32, and sums of two bf16 numbers are rounded alike from fp32 and fp64.
  const at::Tensor expected = at::cat({r(r(a * cos) - r(b * sin)), r(r(b * cos) + r(a * sin))}, 3);
  require_equal(unfused, expected.to(at::kBFloat16));
  CHECK(mismatches(unfused, fused) > 1000);
}

TEST_CASE("split and merge of packed QKV are inverse and follow the group layout", "[cpu]") {
  const Policy policy;
  struct Heads {
    std::int64_t heads, groups;
  };
  for (const Heads h : {Heads{4, 4}, Heads{6, 2}, Heads{4, 1}, Heads{1, 1}}) {
    const std::int64_t b = 2, s = 5, d = 4, per_group = h.heads / h.groups;
    const at::Tensor packed = random_normal({b, s, h.groups * (per_group + 2) * d}, 1);
    const Qkv parts = split_qkv(packed.clone(), h.heads, h.groups, d, nullptr, policy);
    REQUIRE(parts.q.sizes().vec() == std::vector<std::int64_t>{b, s, h.heads, d});
    REQUIRE(parts.k.sizes().vec() == std::vector<std::int64_t>{b, s, h.groups, d});
    for (std::int64_t g = 0; g < h.groups; ++g) {
      const std::int64_t first = g * (per_group + 2) * d;
      for (std::int64_t i = 0; i < per_group; ++i) {
        require_equal(parts.q.select(2, g * per_group + i), packed.narrow(2, first + i * d, d));
      }
      require_equal(parts.k.select(2, g), packed.narrow(2, first + per_group * d, d));
      require_equal(parts.v.select(2, g), packed.narrow(2, first + (per_group + 1) * d, d));
    }
    require_equal(merge_qkv_gradient(parts, nullptr, policy), packed);

    RopeOptions options;
    options.dim = 4;
    const RopeTable table = make_rope_table(s, options, at::kCPU);
    Qkv turned{parts.q.clone(), parts.k.clone(), parts.v};
    rope_(turned.q, table, false, policy);
    rope_(turned.k, table, false, policy);
    const Qkv split = split_qkv(packed.clone(), h.heads, h.groups, d, &table, policy);
    require_equal(split.q, turned.q);
    require_equal(split.k, turned.k);
    require_equal(split.v, parts.v);
    // Turning forth and back: two sums of two products, with fp32 angles whose cos^2 + sin^2 is 1 within 4 fp32
    // roundoffs.
    require_within(merge_qkv_gradient(split, &table, policy), packed, 5 * 4 * kRoundoff32);
  }
}

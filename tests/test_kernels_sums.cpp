// Column sums that the backward kernels take along: against fp64 sums of what the kernels wrote, and beside the calls
// without sums.

#include <array>
#include <utility>

#include "support/gpu_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

const std::vector<at::ScalarType> kLayerTypes{at::kBFloat16, at::kHalf, at::kFloat};
const std::vector<ActivationKind> kActivations{ActivationKind::kGeluTanh, ActivationKind::kGeluErf,
                                               ActivationKind::kSwiglu, ActivationKind::kSquaredRelu,
                                               ActivationKind::kQuickGeglu};

bool is_gated(ActivationKind kind) { return kind == ActivationKind::kSwiglu || kind == ActivationKind::kQuickGeglu; }

// n additions in any order err by at most n roundoffs of the sum of the magnitudes (twice that covers the second-order
// terms), then comes one rounding, with a spacing of 2^-24 at least in fp16. For values near 1 that is mostly below 0.3
// at the row counts used here, so a lost or doubled row shows in most columns.
void require_sums(const at::Tensor& sums, const at::Tensor& result) {
  const at::Tensor rows = wide(result).flatten(0, -2);
  REQUIRE(sums.scalar_type() == result.scalar_type());
  REQUIRE(sums.sizes().vec() == std::vector<std::int64_t>{rows.size(1)});
  const at::Tensor exact = rows.sum(0), slack = rows.abs().sum(0) * (2.0 * static_cast<double>(rows.size(0)));
  const at::Tensor bound = exact.abs() * roundoff(result.scalar_type()) + slack * kRoundoff32 + 0x1p-25;
  const at::Tensor good = (wide(sums) - exact).abs() <= bound;
  INFO(good.logical_not().sum().item<std::int64_t>() << " of " << good.numel() << " sums are off");
  CHECK(good.all().item<bool>());
}

// Integers whose sums fp32 holds in any order; the rounding to the type is the only error.
void require_exact_sums(const at::Tensor& sums, const at::Tensor& result) {
  const at::Tensor exact = wide(result).flatten(0, -2).sum(0);
  REQUIRE(wide(result).abs().flatten(0, -2).sum(0).max().item<double>() < 0x1p24);
  require_same(sums, exact.to(at::kFloat).to(result.scalar_type()));
}

at::Tensor integers(at::IntArrayRef shape, std::int64_t largest, at::ScalarType type) {
  return at::randint(-largest, largest + 1, shape, at::TensorOptions().dtype(at::kFloat).device(at::kCUDA)).to(type);
}

void check_activation(std::int64_t rows, std::int64_t features, at::ScalarType type, const ActivationOptions& options,
                      bool with_bias) {
  INFO("rows " << rows << " features " << features << " type " << type << " kind " << static_cast<int>(options.kind)
               << " bias " << with_bias << " fused rounding " << options.fused_rounding);
  const std::int64_t width = is_gated(options.kind) ? 2 * features : features;
  const at::Tensor x = gpu_normal({rows, width}, 1, type), dy = gpu_normal({rows, features}, 2, type);
  const at::Tensor bias = with_bias ? gpu_normal({width}, 3, type) : at::Tensor();
  at::Tensor sums, again;
  const at::Tensor dx = activation_backward(dy, x, bias, options, kFast, &sums);
  require_same(dx, activation_backward(dy, x, bias, options, kFast));
  require_sums(sums, dx);
  require_same(activation_backward(dy, x, bias, options, kFast, &again), dx);
  require_same(again, sums);
}

void check_norm(std::int64_t rows, std::int64_t width, at::ScalarType stream, at::ScalarType layer, bool rms,
                bool with_skip) {
  INFO("rows " << rows << " width " << width << " types " << stream << " " << layer << " rms " << rms << " skip "
               << with_skip);
  const NormOptions options{1e-5, rms, width % 16 == 0};
  const at::Tensor x = gpu_normal({rows, width}, 1, stream), dy = gpu_normal({rows, width}, 2, layer);
  const at::Tensor weight = gpu_normal({width}, 3, layer), bias = rms ? at::Tensor() : gpu_normal({width}, 4, layer);
  const at::Tensor skip = with_skip ? gpu_normal({rows, width}, 5, stream) : at::Tensor();
  NormStatistics statistics;
  (void)norm_forward(x, weight, bias, options, statistics, kFast);
  at::Tensor sums, again;
  const NormGradients with = norm_backward(dy, x, weight, bias, options, statistics, skip, kFast, &sums);
  const NormGradients without = norm_backward(dy, x, weight, bias, options, statistics, skip, kFast);
  require_same(with.input, without.input);
  require_same(with.weight, without.weight);
  if (!rms) require_same(with.bias, without.bias);
  require_sums(sums, with.input);
  (void)norm_backward(dy, x, weight, bias, options, statistics, skip, kFast, &again);
  require_same(again, sums);
}

void check_merge(const Qkv& gradient, const RopeTable* table) {
  at::Tensor sums, again;
  const at::Tensor packed = merge_qkv_gradient(gradient, table, kFast, &sums);
  require_same(packed, merge_qkv_gradient(gradient, table, kFast));
  require_sums(sums, packed);
  require_same(merge_qkv_gradient(gradient, table, kFast, &again), packed);
  require_same(again, sums);
}

}  // namespace

TEST_CASE("backward operations give the column sums of their result where asked", "[cpu]") {
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const auto normal = [&](at::IntArrayRef shape, std::uint64_t seed) { return random_normal(shape, seed).to(type); };
    at::Tensor sums = normal({3}, 9);  // an old value must not survive
    for (const ActivationKind kind : kActivations) {
      ActivationOptions options;
      options.kind = kind;
      const at::Tensor x = normal({37, 16}, 1), dy = normal({37, is_gated(kind) ? 8 : 16}, 2);
      const at::Tensor dx = activation_backward(dy, x, normal({16}, 3), options, {}, &sums);
      require_equal(sums, column_sum(dx));
    }
    for (const bool rms : {false, true}) {
      const NormOptions options{1e-5, rms, false};
      const at::Tensor x = normal({37, 16}, 1), weight = normal({16}, 2), bias = rms ? at::Tensor() : normal({16}, 3);
      NormStatistics statistics;
      (void)norm_forward(x, weight, bias, options, statistics, {});
      const NormGradients gradients =
          norm_backward(normal({37, 16}, 4), x, weight, bias, options, statistics, normal({37, 16}, 5), {}, &sums);
      require_equal(sums, column_sum(gradients.input));
    }
    const Qkv gradient{normal({2, 9, 4, 8}, 1), normal({2, 9, 2, 8}, 2), normal({2, 9, 2, 8}, 3)};
    const at::Tensor packed = merge_qkv_gradient(gradient, nullptr, {}, &sums);
    require_equal(sums, column_sum(packed.view({18, 64})));
  }
}

TEST_CASE("CUDA activation gradients and their column sums come from one pass", "[gpu]") {
  if (!at::hasCUDA()) return;
  poison_free_memory();
  for (const ActivationKind kind : kActivations) {
    for (const at::ScalarType type : kLayerTypes) {
      for (const bool fused : {true, false}) {
        ActivationOptions options;
        options.kind = kind;
        options.fused_rounding = fused;
        if (is_gated(kind) && !fused) {
          options.glu_offset = 1;
          options.clamp = 1.5;
        }
        // Strips of 256 features: part of one, one, one and a bit, many; rows: fewer than warps, one chunk, several.
        for (const auto& [rows, features] :
             std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 8}, {5, 256}, {33, 264}, {1100, 72}, {37, 6400}}) {
          check_activation(rows, features, type, options, fused);
        }
        check_activation(301, 520, type, options, !fused);
        check_activation(19, 100, type, options, true);  // a width that the kernels do not take
      }
    }
  }
}

TEST_CASE("CUDA column sums of an activation's gradient are exact for integers", "[gpu]") {
  if (!at::hasCUDA()) return;
  poison_free_memory();
  ActivationOptions options;
  options.kind = ActivationKind::kSquaredRelu;  // gradient 2 max(x, 0) dy
  for (const at::ScalarType type : kLayerTypes) {
    for (const auto& [rows, features] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {1, 16}, {31, 2048}, {63, 3080}, {500, 6400}, {5000, 264}, {16384, 768}, {40001, 8}}) {
      INFO("type " << type << " rows " << rows << " features " << features);
      const at::Tensor x = integers({rows, features}, 2, type), dy = integers({rows, features}, 3, type);
      at::Tensor sums;
      const at::Tensor dx = activation_backward(dy, x, {}, options, kFast, &sums);
      require_same(dx, x.clamp_min(0) * dy * 2);
      require_exact_sums(sums, dx);
    }
  }
}

TEST_CASE("CUDA norm gradients and their column sums come from one pass", "[gpu]") {
  if (!at::hasCUDA()) return;
  poison_free_memory();
  for (const bool rms : {false, true}) {
    for (const at::ScalarType type : kLayerTypes) {
      for (const std::int64_t width :
           {8, 64, 72, 128, 136, 256, 264, 768, 1600, 2048, 2056, 2560, 4096, 6400, 8192, 8200, 16384}) {
        for (const std::int64_t rows : {1, 5}) check_norm(rows, width, type, type, rms, width % 64 == 0);
      }
      for (const std::int64_t width : {8, 136, 264, 1600}) check_norm(1031, width, type, type, rms, true);
      check_norm(5, 100, type, type, rms, true);        // a width that the kernels do not take
      check_norm(5, 256, at::kFloat, type, rms, true);  // an fp32 stream beside a 16-bit layer
      check_norm(301, 2056, at::kFloat, type, rms, true);
    }
  }
}

TEST_CASE("CUDA column sums of a norm's gradient are exact for integers", "[gpu]") {
  if (!at::hasCUDA()) return;
  poison_free_memory();
  for (const at::ScalarType type : kLayerTypes) {
    for (const bool rms : {false, true}) {
      for (const auto& [rows, width] : std::vector<std::pair<std::int64_t, std::int64_t>>{
               {3, 8}, {5000, 64}, {4999, 200}, {5000, 768}, {8192, 1600}, {3000, 4096}, {2000, 8192}}) {
        INFO("type " << type << " rms " << rms << " rows " << rows << " width " << width);
        // With dy = 0 the gradient is the skip gradient itself.
        const at::Tensor x = integers({rows, width}, 4, type), skip = integers({rows, width}, 4, type);
        const at::Tensor weight = integers({width}, 4, type), bias = rms ? at::Tensor() : integers({width}, 4, type);
        const NormOptions options{1e-5, rms, false};
        NormStatistics statistics;
        (void)norm_forward(x, weight, bias, options, statistics, kFast);
        at::Tensor sums;
        const NormGradients gradients =
            norm_backward(at::zeros_like(x), x, weight, bias, options, statistics, skip, kFast, &sums);
        require_same(gradients.input, skip);
        require_exact_sums(sums, skip);
      }
    }
  }
}

TEST_CASE("CUDA packed QKV gradients and their column sums come from one pass", "[gpu]") {
  if (!at::hasCUDA()) return;
  struct Shape {
    std::int64_t b, s, heads, groups, d, dim;
  };
  // Whole, partial and no rotation, one group, grouped and multi-head, one token, several strips; the last two have
  // dimensions that 16-byte accesses do not fit.
  const std::vector<Shape> shapes{{2, 65, 8, 8, 128, 128}, {1, 1, 4, 4, 64, 64},     {2, 33, 8, 2, 64, 64},
                                  {3, 17, 6, 1, 96, 96},   {2, 19, 4, 4, 64, 16},    {2, 19, 4, 2, 80, 48},
                                  {1, 40, 2, 1, 256, 256}, {1, 300, 32, 8, 128, 64}, {3, 201, 25, 25, 64, 64},
                                  {1, 7, 2, 2, 8, 4},      {2, 9, 6, 3, 6, 4}};
  for (const Shape& n : shapes) {
    for (const at::ScalarType type : kLayerTypes) {
      poison_free_memory();
      // As attention gives them, heads outside the positions, and plain.
      const auto gradient = [&](std::int64_t heads, std::uint64_t seed) {
        return gpu_normal({n.b, heads, n.s, n.d}, seed, type).transpose(1, 2);
      };
      const Qkv gradients{gradient(n.heads, 2), gradient(n.groups, 3).contiguous(), gradient(n.groups, 4)};
      INFO("s " << n.s << " heads " << n.heads << " groups " << n.groups << " d " << n.d << " dim " << n.dim << " type "
                << type);
      check_merge(gradients, nullptr);
      for (const bool interleaved : {false, true}) {
        for (const bool fused : {true, false}) {
          INFO("interleaved " << interleaved << " fused " << fused);
          RopeOptions options;
          options.dim = n.dim;
          options.interleaved = interleaved;
          options.fused_rounding = fused;
          const RopeTable table = make_rope_table(n.s + 3, options, at::Device(at::kCUDA, 0));
          check_merge(gradients, &table);
        }
      }
    }
  }
}

TEST_CASE("CUDA column sums of packed QKV gradients are exact for integers", "[gpu]") {
  if (!at::hasCUDA()) return;
  poison_free_memory();
  for (const at::ScalarType type : kLayerTypes) {
    for (const auto& [b, s, heads, groups, d] : std::vector<std::array<std::int64_t, 5>>{
             {3, 1501, 12, 12, 64}, {1, 4096, 25, 25, 64}, {2, 2048, 8, 2, 128}, {5, 1000, 1, 1, 8}}) {
      INFO("type " << type << " tokens " << b * s << " heads " << heads << " groups " << groups);
      const Qkv gradient{integers({b, s, heads, d}, 4, type), integers({b, s, groups, d}, 4, type),
                         integers({b, s, groups, d}, 4, type)};
      at::Tensor sums;
      const at::Tensor packed = merge_qkv_gradient(gradient, nullptr, kFast, &sums);
      require_same(packed, merge_qkv_gradient(gradient, nullptr, kComposite));
      require_exact_sums(sums, packed);
    }
  }
}

// The CUDA kernels of norms, activations, rope, dropout and sums against exact (fp64) values, the ATen composite and
// themselves.

#include <cmath>

#include "support/gpu_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

struct Types {
  at::ScalarType stream, layer;
};

const std::vector<Types> kTypes{{at::kBFloat16, at::kBFloat16},
                                {at::kHalf, at::kHalf},
                                {at::kFloat, at::kFloat},
                                {at::kFloat, at::kBFloat16},
                                {at::kFloat, at::kHalf}};

void check_norm(std::int64_t rows, std::int64_t width, const Types& types, const NormOptions& options) {
  INFO("rows " << rows << " width " << width << " types " << types.stream << " " << types.layer << " rms "
               << options.rms << " zero-centered " << options.zero_centered);
  const at::Tensor residual = gpu_normal({rows, width}, 1, types.stream),
                   delta = gpu_normal({rows, width}, 2, types.layer);
  const at::Tensor weight = gpu_normal({width}, 3, types.layer),
                   bias = options.rms ? at::Tensor() : gpu_normal({width}, 4, types.layer);
  const at::Tensor dy = gpu_normal({rows, width}, 5, types.layer), skip = gpu_normal({rows, width}, 6, types.stream);

  NormStatistics statistics, exact_statistics, composite_statistics, again_statistics;
  at::Tensor sum, composite_sum, again_sum;
  const at::Tensor y = add_norm_forward(residual, delta, weight, bias, options, sum, statistics, kFast);
  const at::Tensor composite =
      add_norm_forward(residual, delta, weight, bias, options, composite_sum, composite_statistics, kComposite);
  require_same(sum, composite_sum);
  require_same_rounding_points(y, composite);
  const at::Tensor exact = norm_forward(wide(sum), wide(weight), wide(bias), options, exact_statistics, kComposite);
  // A lane adds at most 32 values in a row, lanes and warps add in at most 10 levels, and some 10 operations follow: 64
  // roundoffs. The terms of the result (gain up to 6, normalised value up to 6, bias) are below 40.
  require_rounded(y, exact, 64 * kRoundoff32 * 40);
  require_relative(y, exact, roundoff(types.layer) + 64 * kRoundoff32);
  require_relative(statistics.rstd, exact_statistics.rstd, 64 * kRoundoff32);
  if (!options.rms) require_rounded(statistics.mean, exact_statistics.mean, 64 * kRoundoff32 * 5);
  require_same(norm_forward(sum, weight, bias, options, again_statistics, kFast), y);
  require_same(again_statistics.rstd, statistics.rstd);

  const NormGradients gradients = norm_backward(dy, sum, weight, bias, options, statistics, skip, kFast);
  const NormGradients alone = norm_backward(dy, sum, weight, bias, options, statistics, {}, kFast);
  const NormGradients other = norm_backward(dy, sum, weight, bias, options, statistics, skip, kComposite);
  const NormGradients wanted =
      norm_backward(wide(dy), wide(sum), wide(weight), wide(bias), options, exact_statistics, {}, kComposite);
  // As above; rstd reaches 3 for rows of 8 values, and dy * gain is below 40.
  require_rounded(alone.input, wanted.input, 64 * kRoundoff32 * 40 * 6);
  require_relative(alone.input, wanted.input, roundoff(types.stream) + 256 * kRoundoff32);
  require_same(gradients.input, at::add(skip, alone.input).to(types.stream));
  require_same_rounding_points(gradients.input, other.input);
  // Column sums of `rows` random terms: each of up to `rows` additions errs by a roundoff of a partial sum below
  // sqrt(rows) times the result.
  const double sum_error = (64 + static_cast<double>(rows) * std::sqrt(static_cast<double>(rows))) * kRoundoff32;
  require_relative(gradients.weight, wanted.weight, roundoff(types.layer) + sum_error);
  if (!options.rms) require_relative(gradients.bias, wanted.bias, roundoff(types.layer) + sum_error);
  require_same(alone.weight, gradients.weight);
  const NormGradients again = norm_backward(dy, sum, weight, bias, options, statistics, skip, kFast);
  require_same(again.input, gradients.input);
  require_same(again.weight, gradients.weight);
  if (!options.rms) require_same(again.bias, gradients.bias);
}

RopeTable rope_table(std::int64_t length, std::int64_t dim, bool interleaved, bool fused) {
  RopeOptions options;
  options.dim = dim;
  options.interleaved = interleaved;
  options.fused_rounding = fused;
  return make_rope_table(length, options, at::Device(at::kCUDA, 0));
}

Qkv wide(const Qkv& t) { return {test::wide(t.q), test::wide(t.k), test::wide(t.v)}; }

// fp32: two products below 5 and a sum, three roundoffs each.
constexpr double kRopeSlack = 6 * kRoundoff32 * 10;

void check_rotated(const at::Tensor& fast, const at::Tensor& composite, const at::Tensor& exact, bool fused) {
  if (!fused && fast.scalar_type() != at::kFloat) {
    require_same(fast, composite);
  } else {
    require_rounded(fast, exact, kRopeSlack);
    require_same_rounding_points(fast, composite);
  }
}

}  // namespace

TEST_CASE("CUDA norms match exact values at every width and row count", "[gpu]") {
  if (!at::hasCUDA()) return;
  poison_free_memory();
  for (const Types& types : kTypes) {
    for (const bool rms : {false, true}) {
      for (const std::int64_t width : {8,    64,   72,   128,  136,  256,  264,  512,  520,   768,  1024,
                                       1032, 1600, 2048, 2056, 4096, 5120, 8192, 8200, 12288, 16384}) {
        for (const std::int64_t rows : {1, 5}) check_norm(rows, width, types, {1e-5, rms, width % 16 == 0});
      }
      for (const std::int64_t width : {64, 128, 768, 2048, 4096}) check_norm(1031, width, types, {1e-6, rms, false});
    }
  }
}

TEST_CASE("norms of widths that the CUDA kernels do not take run as composites", "[gpu]") {
  if (!at::hasCUDA()) return;
  for (const std::int64_t width : {4, 100, 16392}) check_norm(3, width, kTypes[0], {1e-5, false, false});
}

TEST_CASE("CUDA activations match exact values and keep the rounding points", "[gpu]") {
  if (!at::hasCUDA()) return;
  poison_free_memory();
  for (const ActivationKind kind : {ActivationKind::kGeluTanh, ActivationKind::kGeluErf, ActivationKind::kSwiglu,
                                    ActivationKind::kSquaredRelu, ActivationKind::kQuickGeglu}) {
    const bool gated = kind == ActivationKind::kSwiglu || kind == ActivationKind::kQuickGeglu;
    for (const at::ScalarType type : {at::kBFloat16, at::kHalf, at::kFloat}) {
      for (const std::int64_t features : {8, 264, 5504}) {
        for (const int variant : {0, 1, 2, 3}) {
          const std::int64_t rows = features == 264 ? 131 : 3, width = gated ? 2 * features : features;
          ActivationOptions options;
          options.kind = kind;
          options.fused_rounding = variant % 2 == 0;
          if (gated && variant >= 2) {
            options.glu_offset = 1;
            options.clamp = 1.5;
          }
          INFO("kind " << static_cast<int>(kind) << " type " << type << " features " << features << " variant "
                       << variant);
          // Few inputs below -3, where 1 + tanh and 1 + erf of the composite lose digits that the kernels keep.
          const at::Tensor x = gpu_normal({rows, width}, 1, type), dy = gpu_normal({rows, features}, 2, type);
          const at::Tensor bias = variant == 0 ? at::Tensor() : gpu_normal({width}, 3, type) * 0.5;
          const at::Tensor y = activation_forward(x, bias, options, kFast);
          const at::Tensor dx = activation_backward(dy, x, bias, options, kFast);
          require_same_rounding_points(y, activation_forward(x, bias, options, kComposite));
          require_same_rounding_points(dx, activation_backward(dy, x, bias, options, kComposite));
          if (options.fused_rounding) {
            // Inputs below 8, sigmoids to some 20 roundoffs (fast exponential and quotient), values and slopes below
            // 8^2, dy below 5.
            const double slack = 32 * kRoundoff32 * 8 * 8;
            const at::Tensor exact = activation_forward(wide(x), wide(bias), options, kComposite);
            require_rounded(y, exact, slack);
            require_relative(y, exact, roundoff(type) + 32 * kRoundoff32);
            const at::Tensor exact_dx = activation_backward(wide(dy), wide(x), wide(bias), options, kComposite);
            require_rounded(dx, exact_dx, slack * 5);
            require_relative(dx, exact_dx, roundoff(type) + 64 * kRoundoff32);
          }
        }
      }
    }
  }
}

TEST_CASE("CUDA rope turns in place, splits and merges like the composite", "[gpu]") {
  if (!at::hasCUDA()) return;
  struct Shape {
    std::int64_t b, s, heads, groups, d, dim;
  };
  // Wide and narrow accesses, partial rotation, one group, grouped and multi-head, one token, more than one block of
  // tokens.
  const std::vector<Shape> shapes{{2, 65, 8, 8, 128, 128},  {1, 1, 4, 4, 64, 64},  {2, 33, 8, 2, 64, 64},
                                  {3, 17, 6, 1, 96, 96},    {2, 19, 4, 4, 64, 16}, {2, 19, 4, 2, 80, 40},
                                  {1, 7, 2, 2, 8, 4},       {2, 9, 6, 3, 6, 4},    {1, 40, 2, 1, 256, 256},
                                  {1, 300, 32, 8, 128, 128}};
  for (const Shape& n : shapes) {
    for (const at::ScalarType type : {at::kBFloat16, at::kHalf, at::kFloat}) {
      for (const bool interleaved : {false, true}) {
        for (const bool fused : {true, false}) {
          INFO("s " << n.s << " heads " << n.heads << " groups " << n.groups << " d " << n.d << " dim " << n.dim
                    << " type " << type << " interleaved " << interleaved << " fused " << fused);
          poison_free_memory();
          const RopeTable table = rope_table(n.s + 3, n.dim, interleaved, fused);
          RopeTable exact_table = table;
          exact_table.options.fused_rounding = true;
          const std::int64_t width = (n.heads + 2 * n.groups) * n.d;
          const at::Tensor packed = gpu_normal({n.b, n.s, width}, 1, type);

          const Qkv fast = split_qkv(packed.clone(), n.heads, n.groups, n.d, &table, kFast);
          const Qkv composite = split_qkv(packed.clone(), n.heads, n.groups, n.d, &table, kComposite);
          const Qkv exact = split_qkv(wide(packed), n.heads, n.groups, n.d, &exact_table, kComposite);
          check_rotated(fast.q, composite.q, exact.q, fused);
          check_rotated(fast.k, composite.k, exact.k, fused);
          require_same(fast.v, composite.v);

          // Gradients as attention gives them: heads outside the positions.
          const auto gradient = [&](std::int64_t heads, std::uint64_t seed) {
            return gpu_normal({n.b, heads, n.s, n.d}, seed, type).transpose(1, 2);
          };
          const Qkv gradients{gradient(n.heads, 2), gradient(n.groups, 3), gradient(n.groups, 4)};
          check_rotated(merge_qkv_gradient(gradients, &table, kFast), merge_qkv_gradient(gradients, &table, kComposite),
                        merge_qkv_gradient(wide(gradients), &exact_table, kComposite), fused);
          require_same(merge_qkv_gradient(gradients, nullptr, kFast),
                       merge_qkv_gradient(gradients, nullptr, kComposite));

          at::Tensor turned = gradients.q.clone(at::MemoryFormat::Preserve), other = turned.clone(),
                     precise = wide(turned);
          rope_(turned, table, false, kFast);
          rope_(other, table, false, kComposite);
          rope_(precise, exact_table, false, kComposite);
          check_rotated(turned, other, precise, fused);
        }
      }
    }
  }
}

TEST_CASE("CUDA dropout has the same mask and rounding points as the composite", "[gpu]") {
  if (!at::hasCUDA()) return;
  poison_free_memory();
  for (const Types& types : kTypes) {
    for (const std::int64_t rows : {1, 77}) {
      for (const std::int64_t width : {8, 13, 768}) {
        for (const double p : {0.0, 0.1, 0.7}) {
          const DropoutState state{p, 0xFEDCBA9876543210ULL, 0x300000004ULL};
          INFO("types " << types.stream << " " << types.layer << " shape " << rows << " " << width << " p " << p);
          const at::Tensor x = gpu_normal({rows, width}, 1, types.layer), bias = gpu_normal({width}, 2, types.layer);
          const at::Tensor residual = gpu_normal({rows, width}, 3, types.stream);
          require_same(dropout(x, state, kFast), dropout(x, state, kComposite));
          require_same(dropout(x, state, kFast).cpu(), dropout(x.cpu(), state, kFast));
          for (const at::Tensor& b : {at::Tensor(), bias}) {
            require_same(bias_dropout_add(x, b, residual, state, false, kFast),
                         bias_dropout_add(x, b, residual, state, false, kComposite));
            const at::Tensor fused = bias_dropout_add(x, b, residual, state, true, kFast);
            require_same_rounding_points(fused, bias_dropout_add(x, b, residual, state, true, kComposite));
            // Terms below 5, 5 and (5 + 5) / 0.3; the rounded dropout scale and three operations.
            require_rounded(fused, bias_dropout_add(wide(x), wide(b), wide(residual), state, true, kComposite),
                            4 * kRoundoff32 * 45);
          }
        }
      }
    }
  }
}

TEST_CASE("CUDA column sums of small integers are exact for every shape", "[gpu]") {
  if (!at::hasCUDA()) return;
  poison_free_memory();
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf, at::kFloat}) {
    for (const std::int64_t columns : {1, 8, 31, 250, 768, 6144, 10001}) {
      for (const std::int64_t rows : {1, 31, 500, 5000}) {
        INFO("type " << type << " rows " << rows << " columns " << columns);
        // Sums stay below 2^24, so fp32 holds them in any order; rounding is the only error and is the same.
        const at::Tensor x = gpu((random_normal({rows, columns}, 1) * 2).round().to(type));
        require_same(column_sum(x), wide(x).sum(0).to(at::kFloat).to(type));
      }
    }
  }
}

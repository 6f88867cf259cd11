// The ATen path on CUDA against the same functions on CPU, cuDNN attention against the composite of its form, and exact
// random fills.

#include <cmath>
#include <nlohmann/json.hpp>

#include "pgpt/kernels/kernels.h"
#include "support/json.h"
#include "support/tensor_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

const Policy kComposite{false, false};

at::Tensor gpu(const at::Tensor& t) { return t.defined() ? t.to(at::kCUDA) : t; }

Qkv gpu(const Qkv& t) { return {gpu(t.q), gpu(t.k), gpu(t.v)}; }

// Two fp64 evaluations of one formula on different devices: four chained sums of at most 64 terms below 5^4.
void require_same(const at::Tensor& on_gpu, const at::Tensor& on_cpu) {
  REQUIRE(on_gpu.is_cuda());
  REQUIRE(on_gpu.scalar_type() == on_cpu.scalar_type());
  require_within(on_gpu.cpu(), on_cpu, gradient_bound(4, 64, 5 * 5 * 5 * 5));
}

double relative_error(const at::Tensor& actual, const at::Tensor& expected) {
  const at::Tensor wanted = expected.to(at::kDouble).cpu();
  return ((actual.to(at::kDouble).cpu() - wanted).norm() / wanted.norm()).item<double>();
}

std::uint32_t crc32(const at::Tensor& tensor) {
  const at::Tensor host = tensor.cpu().contiguous();
  const auto* bytes = static_cast<const unsigned char*>(host.const_data_ptr());
  std::uint32_t crc = ~0U;
  for (std::size_t i = 0; i < host.nbytes(); ++i) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xEDB88320U & (0U - (crc & 1U)));
  }
  return ~crc;
}

}  // namespace

TEST_CASE("norms, activations and sums give the same values on the GPU", "[gpu]") {
  if (!at::hasCUDA()) return;
  const at::Tensor x = random_normal({9, 40}, 1), y = random_normal({9, 40}, 2), row = random_normal({40}, 3),
                   other = random_normal({40}, 4);
  for (const bool rms : {false, true}) {
    const NormOptions options{1e-5, rms, true};
    const at::Tensor bias = rms ? at::Tensor() : other;
    NormStatistics host, device;
    at::Tensor host_sum, device_sum;
    require_same(add_norm_forward(gpu(x), gpu(y), gpu(row), gpu(bias), options, device_sum, device, kComposite),
                 add_norm_forward(x, y, row, bias, options, host_sum, host, kComposite));
    const NormGradients a = norm_backward(gpu(y), device_sum, gpu(row), gpu(bias), options, device, gpu(x), kComposite);
    const NormGradients b = norm_backward(y, host_sum, row, bias, options, host, x, kComposite);
    require_same(a.input, b.input);
    require_same(a.weight, b.weight);
    if (!rms) require_same(a.bias, b.bias);
  }
  for (const ActivationKind kind : {ActivationKind::kGeluTanh, ActivationKind::kGeluErf, ActivationKind::kSwiglu,
                                    ActivationKind::kSquaredRelu, ActivationKind::kQuickGeglu}) {
    ActivationOptions options;
    options.kind = kind;
    const at::Tensor out = activation_forward(x, row, options, kComposite);
    require_same(activation_forward(gpu(x), gpu(row), options, kComposite), out);
    require_same(activation_backward(gpu(out), gpu(x), gpu(row), options, kComposite),
                 activation_backward(out, x, row, options, kComposite));
  }
  const DropoutState state{0.3, 0xFEDCBA9876543210ULL, 0x300000004ULL};
  // The mask comes from integer tensors here and from a loop on the CPU: equal bits.
  require_equal(dropout(gpu(x), state, kComposite).cpu(), dropout(x, state, kComposite));
  require_same(bias_dropout_add(gpu(x), gpu(row), gpu(y), state, true, kComposite),
               bias_dropout_add(x, row, y, state, true, kComposite));
}

TEST_CASE("linear products on the GPU match the exact ones", "[gpu]") {
  if (!at::hasCUDA()) return;
  const at::Tensor x = random_normal({64, 48}, 1), w = random_normal({32, 48}, 2), dy = random_normal({64, 32}, 3);
  require_same(kernels::linear(gpu(x), gpu(w)), kernels::linear(x, w));
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    const at::Tensor a = dy.to(type), b = x.to(type);
    const at::Tensor exact = a.to(at::kDouble).t().mm(b.to(at::kDouble));
    const at::Tensor bound = (a.to(at::kDouble).abs().t().mm(b.to(at::kDouble).abs()) + 1) * (65 * kRoundoff32);
    at::Tensor main = gpu(at::ones({32, 48}, at::kFloat));
    add_weight_gradient(main, gpu(a), gpu(b));
    require_within(main, exact + 1, bound);
    require_within(linear_weight_gradient(gpu(a), gpu(b), at::kFloat), exact, bound);
  }
}

TEST_CASE("rope, the QKV layout and composite attention give the same values on the GPU", "[gpu]") {
  if (!at::hasCUDA()) return;
  RopeOptions rope;
  rope.dim = 4;
  const RopeTable host = make_rope_table(20, rope, at::kCPU);
  const RopeTable device{gpu(host.cos), gpu(host.sin), rope};
  const at::Tensor packed = random_normal({2, 20, 2 * 4 * 6}, 1);
  const Qkv a = split_qkv(gpu(packed), 4, 2, 6, &device, kComposite),
            b = split_qkv(packed.clone(), 4, 2, 6, &host, kComposite);
  require_same(a.q, b.q);
  require_same(a.k, b.k);
  require_same(merge_qkv_gradient(a, &device, kComposite), merge_qkv_gradient(b, &host, kComposite));
  const at::Tensor dout = random_normal({2, 20, 4, 6}, 2);
  for (const AttentionForm form :
       {AttentionForm::kFused, AttentionForm::kUnfused, AttentionForm::kUnfusedFp32Softmax}) {
    AttentionOptions options;
    options.form = form;
    options.scale = 0.4;
    options.dropout = 0.2;
    options.dropout_seed = 3;
    AttentionSaved on_gpu, on_cpu;
    require_same(attention_forward(a, {}, options, on_gpu, kComposite),
                 attention_forward(b, {}, options, on_cpu, kComposite));
    const Qkv da = attention_backward(gpu(dout), on_gpu, kComposite), db = attention_backward(dout, on_cpu, kComposite);
    require_same(da.q, db.q);
    require_same(da.k, db.k);
    require_same(da.v, db.v);
  }
}

TEST_CASE("cuDNN attention is the fused form, with groups and repeatable bits", "[gpu]") {
  if (!at::hasCUDA()) return;
  const std::int64_t b = 2, s = 192, nh = 8;
  for (const std::int64_t d : {64, 128}) {
    for (const std::int64_t ng : {8, 2}) {
      INFO("d " << d << " groups " << ng);
      const Qkv host{random_normal({b, s, nh, d}, 1).to(at::kBFloat16),
                     random_normal({b, s, ng, d}, 2).to(at::kBFloat16),
                     random_normal({b, s, ng, d}, 3).to(at::kBFloat16)};
      const at::Tensor dout = random_normal({b, s, nh, d}, 4).to(at::kBFloat16);
      AttentionOptions options;
      options.scale = 1 / std::sqrt(static_cast<double>(d));
      const Qkv device = gpu(host);
      REQUIRE(attention_implementation(device, {}, options) == "cudnn");
      AttentionSaved on_gpu, on_cpu;
      const at::Tensor out = attention_forward(device, {}, options, on_gpu, kComposite);
      REQUIRE(out.is_contiguous());
      const at::Tensor expected = attention_forward(host, {}, options, on_cpu, kComposite);
      // Both round probabilities and results to bf16 (roundoff 2^-8, in the mean a quarter of it), so they are half a
      // percent apart.
      CHECK(relative_error(out, expected) < 5e-3);
      CHECK(relative_error(on_gpu.log_sum_exp, on_cpu.log_sum_exp) < 1e-5);
      const Qkv first = attention_backward(gpu(dout), on_gpu, kComposite),
                second = attention_backward(gpu(dout), on_gpu, kComposite);
      const Qkv wanted = attention_backward(dout, on_cpu, kComposite);
      CHECK(relative_error(first.q, wanted.q) < 5e-3);
      CHECK(relative_error(first.k, wanted.k) < 5e-3);
      CHECK(relative_error(first.v, wanted.v) < 5e-3);
      CHECK(mismatches(first.q, second.q) + mismatches(first.k, second.k) + mismatches(first.v, second.v) == 0);
    }
  }
}

TEST_CASE("fused attention over many tiles repeats its bits in deterministic mode", "[gpu]") {
  if (!at::hasCUDA()) return;
  struct Shape {
    std::int64_t b, s, heads, groups, d;
  };
  for (const auto& [b, s, heads, groups, d] :
       {Shape{4, 2048, 16, 16, 128}, Shape{2, 4096, 16, 4, 128}, Shape{16, 1024, 12, 12, 64}}) {
    INFO(b << " x " << s << ", heads " << heads << ", groups " << groups << ", " << d << " wide");
    // cuDNN adds up query gradients in any order, which a few tiles do not show.
    const Policy policy{true, /*deterministic=*/true};
    const auto normal = [](at::IntArrayRef shape, std::uint64_t seed) {
      return gpu(random_normal(shape, seed).to(at::kBFloat16));
    };
    const Qkv in{normal({b, s, heads, d}, 1), normal({b, s, groups, d}, 2), normal({b, s, groups, d}, 3)};
    const at::Tensor dout = normal({b, s, heads, d}, 4);
    AttentionSaved saved;
    const at::Tensor out = attention_forward(in, {}, {}, saved, policy);
    const Qkv gradient = attention_backward(dout, saved, policy);
    for (int i = 0; i < 5; ++i) {
      AttentionSaved other;
      require_same(attention_forward(in, {}, {}, other, policy), out);
      const Qkv again = attention_backward(dout, other, policy);
      require_same(again.q, gradient.q);
      require_same(again.k, gradient.k);
      require_same(again.v, gradient.v);
    }
  }
}

TEST_CASE("loss, embedding and optimizer give the same values on the GPU", "[gpu]") {
  if (!at::hasCUDA()) return;
  const at::Tensor ids = at::arange(60, at::kLong) * 7 % 13, scale = random_normal({60}, 2);
  at::Tensor logits = random_normal({60, 13}, 1), device_logits = gpu(logits);
  require_same(cross_entropy_forward_backward_(device_logits, gpu(ids), gpu(scale), kComposite),
               cross_entropy_forward_backward_(logits, ids, scale, kComposite));
  require_same(device_logits, logits);
  require_same(embedding_gradient(gpu(logits), gpu(ids), 13, kComposite),
               embedding_gradient(logits, ids, 13, kComposite));

  const std::vector<Segment> list{{0, 1000, 0, 1.0F, 1.0F}, {1024, 5000, 1, 0.0F, 1.0F}, {5056, 6000, 0, 1.0F, 0.0F}};
  const SegmentTable host = make_segment_table(list, at::kCPU),
                     device = make_segment_table(list, at::Device(at::kCUDA, 0));
  REQUIRE(device.device.nbytes() == list.size() * sizeof(Segment));
  const auto values = [](std::uint64_t seed) { return random_normal({6000}, seed).to(at::kFloat); };
  for (const float skip : {0.0F, 1.0F}) {
    const StepScalars scalars{
        at::tensor(std::vector<float>{0.5F, skip, 0.1F, 0.001F, 0.1F, 0, 1e-3F, 2e-3F, 0, 0}, at::kFloat)};
    at::Tensor p = values(1), m = values(2), v = values(3).abs(), w = p.to(at::kBFloat16);
    const at::Tensor g = values(4);
    at::Tensor gp = gpu(p), gm = gpu(m), gv = gpu(v), gw = gpu(w);
    const StepScalars device_scalars{gpu(scalars.values)};
    for (int step = 0; step < 2; ++step) {
      adam_step(w, p, m, v, g, host, {}, scalars, kComposite);
      adam_step(gw, gp, gm, gv, gpu(g), device, {}, device_scalars, kComposite);
      sgd_step(w, p, m, g, host, 0.9, scalars, kComposite);
      sgd_step(gw, gp, gm, gpu(g), device, 0.9, device_scalars, kComposite);
    }
    if (skip != 0) {
      require_equal(gp.cpu(), values(1));
      require_equal(gm.cpu(), values(2));
    }
    // fp32 on both devices with the same order; single operations may differ by a roundoff of their result (below
    // 5000).
    require_within(gp, p, 1e-2);
    CHECK(relative_error(gp, p) < 64 * kRoundoff32);
    CHECK(relative_error(gm, m) < 64 * kRoundoff32);
    CHECK(relative_error(gv, v) < 64 * kRoundoff32);
    CHECK(std::abs(squared_norm(gp, device, kComposite).item<double>() /
                       squared_norm(p, host, kComposite).item<double>() -
                   1) < 1e-5);
    CHECK(count_zeros(gp, device).item<std::int64_t>() == 0);
    CHECK(has_non_finite(gp).item<float>() == 0.0F);
  }
}

TEST_CASE("GPU normal fills are libtorch's own, bit for bit", "[gpu]") {
  if (!at::hasCUDA()) return;
  const nlohmann::json entries = read_json(std::string(PGPT_TEST_DATA) + "/golden_seed/cuda_normal.json");
  for (const auto& entry : entries) {
    const auto shape = entry.at("shape").get<std::vector<std::int64_t>>();
    const at::ScalarType type = entry.at("dtype") == "bfloat16" ? at::kBFloat16 : at::kFloat;
    const auto std = entry.at("std").get<double>();
    PhiloxState on_gpu{entry.at("seed").get<std::uint64_t>(), 0}, on_cpu = on_gpu;
    at::Tensor tensor = at::empty(shape, at::TensorOptions().dtype(type).device(at::kCUDA));
    philox_normal_(tensor, std, on_gpu, 0);
    if (tensor.numel() < 1 << 21) CHECK(crc32(tensor) == entry.at("crc32").get<std::uint32_t>());
    at::Tensor host = at::empty(shape, type);
    philox_normal_(host, std, on_cpu, entry.at("multi_processor_count").get<std::int64_t>());
    CHECK(on_gpu.offset == on_cpu.offset);
    at::Tensor next = at::empty({5, 3}, tensor.options());
    philox_normal_(next, std, on_gpu, 0);
    require_within(next.flatten(), at::tensor(entry.at("next_draw_5x3").get<std::vector<double>>(), at::kDouble), 0.0);
  }
}

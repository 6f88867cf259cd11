// Bytes a second of the CUDA kernels at training shapes. Hidden from normal runs: test_kernels "[.bench]".

#include <ATen/cuda/CUDAEvent.h>

#include <algorithm>
#include <cstdio>
#include <functional>

#include "support/gpu_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

// Median of the timed calls, after a quarter as many warm ones. Every tensor is larger than the L2 cache or nearly so,
// and each call touches several.
double milliseconds_of(const std::function<void()>& call, int calls = 20) {
  const auto kCalls = static_cast<std::size_t>(calls);
  for (int i = 0; i < calls / 4; ++i) call();
  std::vector<at::cuda::CUDAEvent> begin(kCalls), end(kCalls);
  for (auto* events : {&begin, &end}) {
    for (auto& event : *events) event = at::cuda::CUDAEvent(cudaEventDefault);
  }
  for (std::size_t i = 0; i < kCalls; ++i) {
    begin[i].record();
    call();
    end[i].record();
  }
  end.back().synchronize();
  std::vector<float> times;
  for (std::size_t i = 0; i < kCalls; ++i) times.push_back(begin[i].elapsed_time(end[i]));
  std::nth_element(times.begin(), times.begin() + calls / 2, times.end());
  return times[kCalls / 2];
}

void report(const char* name, const std::string& shape, double bytes, const std::function<void()>& call) {
  const double milliseconds = milliseconds_of(call);
  std::printf("%-32s %-28s %9.1f us %8.0f GB/s\n", name, shape.c_str(), milliseconds * 1e3, bytes / milliseconds / 1e6);
  std::fflush(stdout);
}

std::string shape_text(std::initializer_list<std::int64_t> sizes) {
  std::string text;
  for (const std::int64_t size : sizes) text += (text.empty() ? "" : " x ") + std::to_string(size);
  return text;
}

at::Tensor normal(at::IntArrayRef shape, at::ScalarType type = at::kBFloat16) {
  return at::randn(shape, at::TensorOptions().dtype(type).device(at::kCUDA));
}

}  // namespace

TEST_CASE("speed of the CUDA kernels", "[.bench]") {
  if (!at::hasCUDA()) return;
  {
    const at::Tensor from = normal({1 << 29}), to = at::empty_like(from);
    report("copy (the ceiling)", "1 GiB", 2.0 * static_cast<double>(from.nbytes()), [&] { to.copy_(from); });
  }
  struct Shape {
    std::int64_t tokens, width;
  };
  for (const auto& [t, h] : {Shape{65536, 768}, Shape{16384, 1600}, Shape{16384, 2048}, Shape{8192, 2560},
                             Shape{8192, 4096}, Shape{8192, 8192}}) {
    const double bytes = 2.0 * static_cast<double>(t * h);
    const at::Tensor x = normal({t, h}), delta = normal({t, h}), dy = normal({t, h}), weight = normal({h}),
                     bias = normal({h});
    for (const bool rms : {true, false}) {
      const NormOptions options{1e-5, rms, false};
      const at::Tensor b = rms ? at::Tensor() : bias;
      at::Tensor sum;
      NormStatistics statistics;
      report(rms ? "add + RMSNorm" : "add + LayerNorm", shape_text({t, h}), 4 * bytes,
             [&] { (void)add_norm_forward(x, delta, weight, b, options, sum, statistics, kFast); });
      report(rms ? "RMSNorm backward + skip" : "LayerNorm backward + skip", shape_text({t, h}), 4 * bytes,
             [&] { (void)norm_backward(dy, x, weight, b, options, statistics, delta, kFast); });
      at::Tensor sums;
      report(rms ? "RMSNorm backward + skip, sums" : "LayerNorm backward + skip, sums", shape_text({t, h}), 4 * bytes,
             [&] { (void)norm_backward(dy, x, weight, b, options, statistics, delta, kFast, &sums); });
    }
    report("column sum", shape_text({t, h}), bytes, [&] { (void)column_sum(x); });
    const DropoutState drop{0.1, 1, 2}, none;
    report("bias + dropout + add", shape_text({t, h}), 3 * bytes,
           [&] { (void)bias_dropout_add(x, bias, delta, drop, true, kFast); });
    report("bias + add", shape_text({t, h}), 3 * bytes,
           [&] { (void)bias_dropout_add(x, bias, delta, none, true, kFast); });
  }
  struct Heads {
    std::int64_t b, s, heads, groups, d;
  };
  for (const auto& [b, s, heads, groups, d] : {Heads{8, 2048, 16, 16, 128}, Heads{2, 4096, 32, 8, 128},
                                               Heads{64, 1024, 12, 12, 64}, Heads{16, 1024, 25, 25, 64}}) {
    RopeOptions options;
    options.dim = d;
    const RopeTable table = make_rope_table(s, options, at::Device(at::kCUDA, 0));
    const at::Tensor packed = normal({b, s, (heads + 2 * groups) * d});
    const auto bytes = static_cast<double>(packed.nbytes());
    const double moved = heads == groups ? 2 * bytes * 2 / 3 : 2 * bytes;
    report("rope + split", shape_text({b, s, heads, groups, d}), moved,
           [&] { (void)split_qkv(packed, heads, groups, d, &table, kFast); });
    const Qkv gradient{normal({b, s, heads, d}), normal({b, s, groups, d}), normal({b, s, groups, d})};
    report("rope + merge gradients", shape_text({b, s, heads, groups, d}), 2 * bytes,
           [&] { (void)merge_qkv_gradient(gradient, &table, kFast); });
    at::Tensor sums;
    report("rope + merge gradients, sums", shape_text({b, s, heads, groups, d}), 2 * bytes,
           [&] { (void)merge_qkv_gradient(gradient, &table, kFast, &sums); });
    report("merge gradients", shape_text({b, s, heads, groups, d}), 2 * bytes,
           [&] { (void)merge_qkv_gradient(gradient, nullptr, kFast); });
    report("merge gradients, sums", shape_text({b, s, heads, groups, d}), 2 * bytes,
           [&] { (void)merge_qkv_gradient(gradient, nullptr, kFast, &sums); });
  }
  for (const auto& [t, f] : {Shape{16384, 5504}, Shape{8192, 11008}, Shape{65536, 3072}, Shape{16384, 6400}}) {
    const double bytes = 2.0 * static_cast<double>(t * f);
    const at::Tensor x = normal({t, 2 * f}), single = normal({t, f}), dy = normal({t, f}), bias = normal({f});
    ActivationOptions swiglu, gelu, erf;
    swiglu.kind = ActivationKind::kSwiglu;
    gelu.kind = ActivationKind::kGeluTanh;
    erf.kind = ActivationKind::kGeluErf;
    report("SwiGLU", shape_text({t, f}), 3 * bytes, [&] { (void)activation_forward(x, {}, swiglu, kFast); });
    report("SwiGLU backward", shape_text({t, f}), 5 * bytes,
           [&] { (void)activation_backward(dy, x, {}, swiglu, kFast); });
    at::Tensor sums;
    report("SwiGLU backward, sums", shape_text({t, f}), 5 * bytes,
           [&] { (void)activation_backward(dy, x, {}, swiglu, kFast, &sums); });
    report("bias + tanh GELU", shape_text({t, f}), 2 * bytes,
           [&] { (void)activation_forward(single, bias, gelu, kFast); });
    report("bias + tanh GELU backward", shape_text({t, f}), 3 * bytes,
           [&] { (void)activation_backward(dy, single, bias, gelu, kFast); });
    report("bias + tanh GELU backward, sums", shape_text({t, f}), 3 * bytes,
           [&] { (void)activation_backward(dy, single, bias, gelu, kFast, &sums); });
    report("erf GELU", shape_text({t, f}), 2 * bytes, [&] { (void)activation_forward(single, {}, erf, kFast); });
    report("erf GELU backward", shape_text({t, f}), 3 * bytes,
           [&] { (void)activation_backward(dy, single, {}, erf, kFast); });
    report("bias + erf GELU backward, sums", shape_text({t, f}), 3 * bytes,
           [&] { (void)activation_backward(dy, single, bias, erf, kFast, &sums); });
    report("column sum", shape_text({t, f}), bytes, [&] { (void)column_sum(single); });
  }
  for (const auto& [t, v] : {Shape{8192, 32000}, Shape{4096, 50304}, Shape{4096, 128256}, Shape{2048, 262144}}) {
    at::Tensor logits = normal({t, v});
    const at::Tensor labels = at::randint(v, {t}, logits.options().dtype(at::kLong)),
                     scale = at::ones({t}, logits.options().dtype(at::kFloat));
    const auto bytes = static_cast<double>(logits.nbytes());
    report("cross entropy", shape_text({t, v}), bytes, [&] { (void)cross_entropy_forward(logits, labels, kFast); });
    report("cross entropy + gradient", shape_text({t, v}), 2 * bytes,
           [&] { (void)cross_entropy_forward_backward_(logits, labels, scale, kFast); });
  }
  for (const bool skewed : {false, true}) {
    const std::int64_t t = 16384, h = 2048, v = 50304;
    const at::Tensor dy = normal({t, h}), table = normal({v, h});
    at::Tensor main = at::zeros({v, h}, dy.options().dtype(at::kFloat));
    // Skewed: the density of ids falls as their power, as words do.
    const at::Tensor uniform = at::rand({t}, main.options());
    const at::Tensor ids = (skewed ? uniform.pow(8) * v : uniform * v).to(at::kLong).clamp_(0, v - 1);
    const double bytes = static_cast<double>(dy.nbytes());
    report("embedding", shape_text({t, h}), 2 * bytes, [&] { (void)embedding_forward(table, ids); });
    report(skewed ? "embedding accumulate (skewed)" : "embedding accumulate", shape_text({t, h}), 5 * bytes,
           [&] { accumulate_embedding_gradient(main, dy, ids, kFast); });
    report(skewed ? "embedding gradient (skewed)" : "embedding gradient", shape_text({t, h}),
           bytes + static_cast<double>(table.nbytes()), [&] { (void)embedding_gradient(dy, ids, v, kFast); });
  }
  const std::int64_t n = std::int64_t{1} << 28;
  std::vector<Segment> list;
  for (std::int64_t i = 0; i < 512; ++i) list.push_back({i * n / 512, (i + 1) * n / 512 - 64, 0, 1.0F, 1.0F});
  const SegmentTable segments = make_segment_table(list, at::Device(at::kCUDA, 0));
  at::Tensor p = normal({n}, at::kFloat), m = normal({n}, at::kFloat), v = normal({n}, at::kFloat).abs_(),
             w = normal({n});
  const at::Tensor g = normal({n}, at::kFloat), g16 = normal({n});
  const StepScalars scalars{gpu(at::tensor(std::vector<float>{1, 0, 0.1F, 0.05F, 0.1F, 0, 1e-4F, 0}, at::kFloat))};
  const auto elements = static_cast<double>(n);
  report("AdamW, fp32 gradient", shape_text({n}), 30 * elements,
         [&] { adam_step(w, p, m, v, g, segments, {}, scalars, kFast); });
  report("AdamW, bf16 gradient", shape_text({n}), 28 * elements,
         [&] { adam_step(w, p, m, v, g16, segments, {}, scalars, kFast); });
  report("SGD, fp32 gradient", shape_text({n}), 22 * elements,
         [&] { sgd_step(w, p, m, g, segments, 0.9, scalars, kFast); });
  report("squared norm, fp32", shape_text({n}), 4 * elements, [&] { (void)squared_norm(g, segments, kFast); });
  report("zero count, fp32", shape_text({n}), 4 * elements, [&] { (void)count_zeros(g, segments); });
  report("non-finite, fp32", shape_text({n}), 4 * elements, [&] { (void)has_non_finite(g); });
}

TEST_CASE("what each fused kernel saves in a step", "[.bench-means]") {
  if (!at::hasCUDA()) return;
  // llama-1.3b, micro-batch 8 x 2048.
  constexpr std::int64_t kLayers = 24, kBatch = 8, kSequence = 2048, kTokens = kBatch * kSequence, kHidden = 2048,
                         kFfn = 5504, kHeads = 16, kHeadDim = 128, kVocab = 32000;
  const auto compare = [](const char* name, std::int64_t times, const std::function<void(const Policy&)>& work) {
    const double fused = static_cast<double>(times) * milliseconds_of([&] { work(kFast); }, 8);
    const double apart = static_cast<double>(times) * milliseconds_of([&] { work(kComposite); }, 8);
    std::printf("%-44s %8.2f ms fused %8.2f ms operation by operation, saves %8.2f ms a step\n", name, fused, apart,
                apart - fused);
    std::fflush(stdout);
  };
  {
    const at::Tensor x = normal({kTokens, kHidden}), delta = normal({kTokens, kHidden}),
                     dy = normal({kTokens, kHidden}), weight = normal({kHidden});
    const NormOptions options{1e-5, true, false};
    compare("residual + norm, forward and backward", 2 * kLayers + 1, [&](const Policy& policy) {
      at::Tensor sum;
      NormStatistics statistics;
      (void)add_norm_forward(x, delta, weight, {}, options, sum, statistics, policy);
      (void)norm_backward(dy, x, weight, {}, options, statistics, delta, policy);
    });
  }
  {
    RopeOptions options;
    options.dim = kHeadDim;
    const RopeTable table = make_rope_table(kSequence, options, at::Device(at::kCUDA, 0));
    const at::Tensor packed = normal({kBatch, kSequence, 3 * kHeads * kHeadDim});
    const auto heads = [&] { return normal({kBatch, kSequence, kHeads, kHeadDim}); };
    const Qkv gradient{heads(), heads(), heads()};
    compare("rotary positions in the packed layout", kLayers, [&](const Policy& policy) {
      (void)split_qkv(packed, kHeads, kHeads, kHeadDim, &table, policy);
      (void)merge_qkv_gradient(gradient, &table, policy);
    });
  }
  {
    const at::Tensor x = normal({kTokens, 2 * kFfn}), dy = normal({kTokens, kFfn});
    ActivationOptions swiglu;
    swiglu.kind = ActivationKind::kSwiglu;
    compare("SwiGLU, forward and backward", kLayers, [&](const Policy& policy) {
      (void)activation_forward(x, {}, swiglu, policy);
      (void)activation_backward(dy, x, {}, swiglu, policy);
    });
  }
  {
    const at::Tensor logits = normal({kTokens, kVocab});
    const at::Tensor labels = at::randint(kVocab, {kTokens}, logits.options().dtype(at::kLong)),
                     scale = at::ones({kTokens}, logits.options().dtype(at::kFloat));
    compare("cross entropy, gradient in place", 1, [&](const Policy& policy) {
      at::Tensor overwritten = logits;
      (void)cross_entropy_forward_backward_(overwritten, labels, scale, policy);
    });
  }
  {
    const at::Tensor dy = normal({kTokens, kHidden});
    at::Tensor main = at::zeros({kVocab, kHidden}, dy.options().dtype(at::kFloat));
    const at::Tensor ids = at::randint(kVocab, {kTokens}, dy.options().dtype(at::kLong));
    compare("embedding gradient by sorted ids", 1,
            [&](const Policy& policy) { accumulate_embedding_gradient(main, dy, ids, policy); });
  }
  {
    // Of 1/5 of the parameters, five times: the temporaries of separate operations would not fit.
    const std::int64_t n = std::int64_t{1} << 28;
    const SegmentTable segments = make_segment_table({{0, n, 0, 1.0F, 1.0F}}, at::Device(at::kCUDA, 0));
    at::Tensor p = normal({n}, at::kFloat), m = normal({n}, at::kFloat), v = normal({n}, at::kFloat).abs_(),
               w = normal({n});
    const at::Tensor g = normal({n}, at::kFloat);
    const StepScalars scalars{gpu(at::tensor(std::vector<float>{1, 0, 0.1F, 0.05F, 0.1F, 0, 1e-4F, 0}, at::kFloat))};
    compare("AdamW in one kernel", 5,
            [&](const Policy& policy) { adam_step(w, p, m, v, g, segments, {}, scalars, policy); });
    compare("gradient norm", 5, [&](const Policy& policy) { (void)squared_norm(g, segments, policy); });
  }
  {
    const auto heads = [&] { return normal({kBatch, kSequence, kHeads, kHeadDim}); };
    const Qkv qkv{heads(), heads(), heads()};
    const at::Tensor dout = heads();
    for (const AttentionForm form : {AttentionForm::kFused, AttentionForm::kUnfused}) {
      AttentionOptions options;
      options.form = form;
      options.scale = 1.0 / std::sqrt(static_cast<double>(kHeadDim));
      const double each = milliseconds_of(
          [&] {
            AttentionSaved saved;
            (void)attention_forward(qkv, {}, options, saved, kFast);
            (void)attention_backward(dout, saved, kFast);
          },
          4);
      std::printf("attention, %-33s %8.2f ms a step\n", form == AttentionForm::kFused ? "cuDNN" : "separate operations",
                  static_cast<double>(kLayers) * each);
    }
  }
  {
    // Of the feed-forward block's first matrix: fp32 sums inside the product, or a bf16 gradient added in a second
    // pass.
    const at::Tensor x = normal({kTokens, kHidden}), dy = normal({kTokens, 2 * kFfn});
    at::Tensor main = at::zeros({2 * kFfn, kHidden}, x.options().dtype(at::kFloat));
    const double inside = milliseconds_of([&] { add_weight_gradient(main, dy, x, 1.0, false, kFast); });
    const double apart = milliseconds_of([&] { main.add_(at::mm(dy.t(), x)); });
    std::printf("%-44s %8.2f ms inside, %8.2f ms in a second pass (fc1, all layers)\n", "fp32 sums of weight gradients",
                static_cast<double>(kLayers) * inside, static_cast<double>(kLayers) * apart);
  }
}

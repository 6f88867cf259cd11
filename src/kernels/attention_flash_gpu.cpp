// Flash attention of libtorch for 16-bit CUDA tensors, through its (underscored) entry points; the only file that names
// them. Its bits repeat.

#include <ATen/Context.h>

#include "attention_forms.h"

namespace pgpt::kernels::detail {
namespace {

constexpr std::int64_t kLargestHeadDim = 256;

// libtorch picks the backward kernel whose bits repeat by a process-wide setting.
class RepeatableBits {
 public:
  RepeatableBits()
      : algorithms_(context().deterministicAlgorithms()),
        warn_only_(context().deterministicAlgorithmsWarnOnly()),
        fill_(context().deterministicFillUninitializedMemory()) {
    context().setDeterministicAlgorithms(true, /*warn_only=*/false);
    context().setDeterministicFillUninitializedMemory(false);
  }
  ~RepeatableBits() {
    context().setDeterministicAlgorithms(algorithms_, warn_only_);
    context().setDeterministicFillUninitializedMemory(fill_);
  }
  RepeatableBits(const RepeatableBits&) = delete;
  RepeatableBits& operator=(const RepeatableBits&) = delete;

 private:
  static at::Context& context() { return at::globalContext(); }
  bool algorithms_, warn_only_, fill_;
};

// x [b,s,heads,d] as the kernel wants it: with segments [b*s,heads,d], a view where the strides allow it.
at::Tensor laid_out(const at::Tensor& x, const AttentionSegments& segments) {
  return segments.defined() ? x.flatten(0, 1) : x;
}

// Without the empty segments behind: this kernel needs memory for each and no plans.
at::Tensor used_ends(const AttentionSegments& segments) { return segments.cu_seqlens.narrow(0, 0, segments.count + 1); }

}  // namespace

bool fused_gpu_takes(const Qkv& qkv, const AttentionOptions& options, std::int64_t largest_head_dim) {
  const std::int64_t d = qkv.q.size(3);
  return qkv.q.is_cuda() && is_16bit(qkv.q) && options.dropout == 0 && qkv.q.size(1) > 1 && d % 8 == 0 &&
         d <= largest_head_dim;
}

bool flash_gpu_takes(const Qkv& qkv, const AttentionOptions& options) {
  return fused_gpu_takes(qkv, options, kLargestHeadDim);
}

at::Tensor flash_gpu_forward(const Qkv& qkv, const AttentionSegments& segments, const AttentionOptions& options,
                             AttentionSaved& saved) {
  const std::int64_t s = qkv.q.size(1);
  const auto rows = [&](const at::Tensor& x) { return laid_out(x, segments); };
  // An undefined tensor inside the optional would count as segments.
  std::optional<at::Tensor> ends;
  if (segments.defined()) ends = used_ends(segments);
  auto [out, log_sum_exp, seed, offset, debug] =
      at::_flash_attention_forward(rows(qkv.q), rows(qkv.k), rows(qkv.v), ends, ends, s, s, 0.0, /*is_causal=*/true,
                                   /*return_debug_mask=*/false, options.scale);
  saved.log_sum_exp = log_sum_exp;
  saved.philox_seed = seed;
  saved.philox_offset = offset;
  saved.out = out.view(qkv.q.sizes());
  return saved.out;
}

Qkv flash_gpu_backward(const at::Tensor& dout, const AttentionSaved& saved) {
  const RepeatableBits repeatable;
  const std::int64_t s = saved.q.size(1);
  const auto rows = [&](const at::Tensor& x) { return laid_out(x, saved.segments); };
  const at::Tensor ends = saved.segments.defined() ? used_ends(saved.segments) : at::Tensor();
  auto [dq, dk, dv] =
      at::_flash_attention_backward(rows(dout), rows(saved.q), rows(saved.k), rows(saved.v), rows(saved.out),
                                    saved.log_sum_exp, ends, ends, s, s, 0.0,
                                    /*is_causal=*/true, saved.philox_seed, saved.philox_offset, saved.options.scale);
  return {dq.view(saved.q.sizes()), dk.view(saved.k.sizes()), dv.view(saved.v.sizes())};
}

}  // namespace pgpt::kernels::detail

#pragma once

// Operations of the training step, tensor in and tensor out, on CPU and CUDA.
//
// Legend: T tokens (batch * sequence, batch-major), h hidden, N output features, K input features, V padded vocabulary,
// b micro-batch, s sequence, nh query heads, ng key/value groups, d head dimension.
// "rounded" means to the tensor's dtype (nearest even). Arithmetic is fp32 inside for 16-bit tensors, and in the
// tensor's own type for fp32 and fp64 (fp64 only for tests). All inputs are contiguous unless said otherwise. CUDA work
// goes to the current stream. On CUDA, `Policy::fast` picks this project's fused kernels where they exist; otherwise,
// and on CPU, ATen operations do the work.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace pgpt::kernels {

class GemmAlgorithms;

/// Which implementation runs.
struct Policy {
  bool fast = true;            ///< own and libtorch's fused kernels (on the CPU for fp32, fp64), not ATen calls
  bool deterministic = false;  ///< only kernels whose bits repeat
  /// CUDA: products of 16-bit matrices go through cuBLASLt with these choices (pgpt/kernels/gemm_algorithms.h); null:
  /// through libtorch. Not owned.
  GemmAlgorithms* gemm_algorithms = nullptr;
};

// ---- matrix products (linear.cpp)
// -------------------------------------------------------------------------------------------------

/// y [T,N] = x [T,K] * weight [N,K]^T (+ bias [N] before the single rounding when `bias_in_epilogue`, else rounded
/// product + bias).
[[nodiscard]] at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {},
                                bool bias_in_epilogue = true, const Policy& policy = {});
/// dx [T,K] = dy [T,N] * weight [N,K].
[[nodiscard]] at::Tensor linear_input_gradient(const at::Tensor& dy, const at::Tensor& weight,
                                               const Policy& policy = {});
/// dw [N,K] = dy^T x, rounded once to `dtype` (fp32 accumulation).
[[nodiscard]] at::Tensor linear_weight_gradient(const at::Tensor& dy, const at::Tensor& x, at::ScalarType dtype,
                                                const Policy& policy = {});
/// gradient [N,K] += scale * dy^T x (`overwrite`: = instead of +=). With an fp32 gradient nothing is rounded in
/// between; a 16-bit one receives the product rounded, then scaled and rounded.
void add_weight_gradient(at::Tensor& gradient, const at::Tensor& dy, const at::Tensor& x, double scale = 1.0,
                         bool overwrite = false, const Policy& policy = {});
/// [N] = column sums of dy [T,N], accumulated in fp32, rounded to dy's dtype.
[[nodiscard]] at::Tensor column_sum(const at::Tensor& dy);

// ---- normalisation (norm.cpp)
// -----------------------------------------------------------------------------------------------------

struct NormOptions {
  double epsilon = 1e-5;
  bool rms = false;            ///< RMSNorm: no mean, no bias
  bool zero_centered = false;  ///< gain = 1 + weight
};
/// Row statistics kept for backward, fp32 (fp64 for fp64 input); mean is undefined for RMSNorm.
struct NormStatistics {
  at::Tensor mean;  // [T]
  at::Tensor rstd;  // [T]
};
/// y [T,h] = normalised x [T,h] in weight's dtype, one rounding; x may be fp32 while weight is 16-bit (fp32 residual
/// stream).
[[nodiscard]] at::Tensor norm_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                      const NormOptions& options, NormStatistics& statistics, const Policy& policy);
/// sum = rounded(residual + delta) in residual's dtype, then norm_forward(sum). Returns y; `sum` receives the new
/// residual stream.
[[nodiscard]] at::Tensor add_norm_forward(const at::Tensor& residual, const at::Tensor& delta, const at::Tensor& weight,
                                          const at::Tensor& bias, const NormOptions& options, at::Tensor& sum,
                                          NormStatistics& statistics, const Policy& policy);
struct NormGradients {
  at::Tensor input;   // [T,h] in x's dtype
  at::Tensor weight;  // [h] in weight's dtype, from an fp32 sum
  at::Tensor bias;    // [h] or undefined
};
/// With y' and dy*g in fp32: dx = rstd * (dyg - y' * mean(dyg*y') - mean(dyg)) rounded; with `skip_gradient` [T,h]
/// defined the result is rounded(skip_gradient + rounded dx). `column_sums`, where not null, receives
/// column_sum(input): on CUDA from the same pass where the kernel can (x in the weight's dtype), else from one of its
/// own.
[[nodiscard]] NormGradients norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                                          const at::Tensor& bias, const NormOptions& options,
                                          const NormStatistics& statistics, const at::Tensor& skip_gradient,
                                          const Policy& policy, at::Tensor* column_sums = nullptr);

// ---- rotary positions and the packed QKV layout (rope.cpp)
// ------------------------------------------------------------------------

struct RopeOptions {
  std::int64_t dim = 0;  ///< rotated channels = floor(d * percent), even
  double base = 10000;
  std::int64_t interpolation_factor = 0;  ///< 0 = none: positions are divided by it
  bool llama3_scaling = false;
  double scaling_factor = 8.0;
  bool interleaved = false;
  bool fused_rounding =
      true;  ///< fp32 angles and one rounding; false: cos, sin, both products and the sum each rounded
};
/// Angles of every position, computed in fp32 as the reference does (spec/model.md 4.2).
struct RopeTable {
  at::Tensor cos;  // [s, dim/2] fp32
  at::Tensor sin;  // [s, dim/2] fp32
  RopeOptions options;
};
[[nodiscard]] RopeTable make_rope_table(std::int64_t seq_length, const RopeOptions& options, at::Device device);
/// Rotates x [b,s,heads,d] (inner dimension contiguous) in place by position; `backward` rotates by the negative angle.
/// `positions` [b,s] int32 on x's device, below the table's length; undefined = index along s.
void rope_(at::Tensor& x, const RopeTable& table, bool backward, const Policy& policy,
           const at::Tensor& positions = {});

struct Qkv {
  at::Tensor q;  // [b,s,nh,d]
  at::Tensor k;  // [b,s,ng,d]
  at::Tensor v;  // [b,s,ng,d]
};
/// Splits packed [b,s,ng*(nh/ng+2)*d] (per group: its query heads, then k, then v); results are views where strides
/// allow it, else copies. With `rope` q and k are rotated (the packed input may be overwritten), by `positions` as in
/// rope_.
[[nodiscard]] Qkv split_qkv(at::Tensor packed, std::int64_t num_heads, std::int64_t num_groups, std::int64_t head_dim,
                            const RopeTable* rope, const Policy& policy, const at::Tensor& positions = {});
/// Inverse of split_qkv for gradients: [b,s,ng*(nh/ng+2)*d]; inputs may be strided. `column_sums`, where not null,
/// receives the result's sums over b and s as column_sum gives them (on CUDA from the same pass where the layout
/// allows).
[[nodiscard]] at::Tensor merge_qkv_gradient(const Qkv& gradient, const RopeTable* rope, const Policy& policy,
                                            at::Tensor* column_sums = nullptr, const at::Tensor& positions = {});

// ---- attention (attention.cpp)
// ----------------------------------------------------------------------------------------------------

/// Parts of samples that attention keeps apart: a token sees itself and the earlier tokens of its own segment. A
/// segment lies inside one sample. All undefined: plain causal attention over each sample.
struct AttentionSegments {
  at::Tensor
      cu_seqlens;      // int32 [n+1]: 0, then the segments' ends in the micro-batch seen as one sequence of b*s tokens
  at::Tensor lengths;  // int32 [n], may hold zeros
  at::Tensor starts;   // int32 [b,s]: where each token's segment begins inside its sample
  std::int64_t count = 0;  // segments without the empty ones appended to n

  [[nodiscard]] bool defined() const { return cu_seqlens.defined(); }
  /// The same on `device`; does not wait for copies out of pinned memory.
  [[nodiscard]] AttentionSegments to(at::Device device) const;
};
/// Segments on the host (pinned memory where asked) from cu_seqlens as above: increasing, each multiple of s among
/// them, b*s last. Empty segments are appended until their number is a power of two, at least 16, so that kernels
/// prepared for one number of segments serve many micro-batches.
[[nodiscard]] AttentionSegments make_attention_segments(const std::vector<std::int32_t>& cu_seqlens, std::int64_t b,
                                                        std::int64_t s, bool pinned = false);

enum class AttentionForm {
  kFused,    ///< fp32 scores, un-normalised probabilities rounded before P*V (cuDNN on CUDA)
  kUnfused,  ///< scores rounded once after scaling, fp32 softmax inside, rounded probabilities kept for backward
  kUnfusedFp32Softmax,  ///< the same with fp32 probabilities kept for backward
};
struct AttentionOptions {
  AttentionForm form = AttentionForm::kFused;
  double scale = 1.0;
  double score_divisor =
      1.0;  ///< query-key layer scaling: scores are divided by it and multiplied back inside the fp32 softmax
  double dropout = 0.0;            ///< applied to the probabilities
  std::uint64_t dropout_seed = 0;  ///< with `dropout_offset` repeats the same mask in recompute and backward
  std::uint64_t dropout_offset = 0;
  at::Tensor dropout_base;  ///< as in DropoutState
};
struct AttentionSaved {
  at::Tensor q, k, v, out;                // inputs and output, [b,s,heads,d]
  at::Tensor log_sum_exp;                 // [b,nh,s] fp32 (kFused); as the kernel lays it out for libtorch's CUDA flash
  at::Tensor probabilities;               // [b,nh,s,s] (unfused forms)
  at::Tensor philox_seed, philox_offset;  // of the cuDNN and flash kernels
  AttentionSegments segments;
  AttentionOptions options;
};
/// out [b,s,nh,d] of causal attention, kept inside `segments` where they are defined. Inputs may be strided. 16-bit
/// CUDA tensors with segments and without dropout go to cuDNN's kernels for sequences of different lengths (never with
/// `policy.deterministic`), else to libtorch's flash kernel; nothing of size s*s is made but by the unfused forms.
[[nodiscard]] at::Tensor attention_forward(const Qkv& qkv, const AttentionSegments& segments,
                                           const AttentionOptions& options, AttentionSaved& saved,
                                           const Policy& policy);
/// Gradients of q, k and v; `policy` as in forward.
[[nodiscard]] Qkv attention_backward(const at::Tensor& dout, const AttentionSaved& saved, const Policy& policy);
/// Name of the implementation that attention_forward picks for these inputs, for logs: "cudnn", "composite (fused
/// form)", ...
[[nodiscard]] std::string attention_implementation(const Qkv& qkv, const AttentionSegments& segments,
                                                   const AttentionOptions& options, const Policy& policy = {});

// ---- activations (activation.cpp)
// -------------------------------------------------------------------------------------------------

enum class ActivationKind { kGeluTanh, kGeluErf, kSwiglu, kSquaredRelu, kQuickGeglu };
struct ActivationOptions {
  ActivationKind kind = ActivationKind::kGeluErf;
  bool fused_rounding = true;  ///< bias and gate inside one rounding; false: bias sum and SiLU are rounded first
  double glu_offset = 0.0;     ///< --glu-linear-offset
  double clamp = 0.0;          ///< --activation-func-clamp-value, 0 = none
};
/// [T,f] from x [T,f] (gated kinds: [T,2f] = gate half, linear half) plus optional bias of x's width.
[[nodiscard]] at::Tensor activation_forward(const at::Tensor& x, const at::Tensor& bias,
                                            const ActivationOptions& options, const Policy& policy);
/// Gradient of x, [T, width of x], one rounding. `column_sums`, where not null, receives column_sum of it, the bias's
/// gradient (on CUDA from the same pass where the kernel can).
[[nodiscard]] at::Tensor activation_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& bias,
                                             const ActivationOptions& options, const Policy& policy,
                                             at::Tensor* column_sums = nullptr);

// ---- dropout and residual (dropout.cpp)
// -------------------------------------------------------------------------------------------

/// Philox position of one dropout call; the same values give the same mask again.
struct DropoutState {
  double probability = 0.0;
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  at::Tensor base{};  ///< int64 scalar on the data's device, added to the offset (CUDA graphs); undefined = 0
};
/// x with elements zeroed with the given probability and the rest scaled by 1/(1-p), rounded. p = 0 returns x itself.
/// The mask depends only on (seed, base + offset, element index): Philox4x32-10 with counter (offset, element/4), the
/// same on CPU and CUDA.
[[nodiscard]] at::Tensor dropout(const at::Tensor& x, const DropoutState& state, const Policy& policy);
/// residual + dropout(x + bias): with `fused_rounding` bias and residual share one rounding, else bias sum is rounded
/// first. p = 0 and no bias: the plain rounded sum. residual may be fp32 while x is 16-bit.
[[nodiscard]] at::Tensor bias_dropout_add(const at::Tensor& x, const at::Tensor& bias, const at::Tensor& residual,
                                          const DropoutState& state, bool fused_rounding, const Policy& policy);

// ---- embedding and loss (embedding.cpp, cross_entropy.cpp)
// ------------------------------------------------------------------------

/// [T,h] rows of table [V,h].
[[nodiscard]] at::Tensor embedding_forward(const at::Tensor& table, const at::Tensor& ids);
/// Dense [rows,h] gradient of an embedding table in dy's dtype (sums in fp32, rounded once), without atomics.
[[nodiscard]] at::Tensor embedding_gradient(const at::Tensor& dy, const at::Tensor& ids, std::int64_t rows,
                                            const Policy& policy);
/// main_gradient [rows,h] fp32 += embedding_gradient (row sums rounded to dy's dtype), on CUDA without the intermediate
/// table.
void accumulate_embedding_gradient(at::Tensor& main_gradient, const at::Tensor& dy, const at::Tensor& ids,
                                   const Policy& policy);

/// Per-token loss [T] fp32 of logits [T,V] against labels [T] (int64): log(sum exp(l - max)) - (l_target - max), fp32
/// inside.
[[nodiscard]] at::Tensor cross_entropy_forward(const at::Tensor& logits, const at::Tensor& labels,
                                               const Policy& policy);
/// The same, and logits are overwritten by their gradient (softmax - onehot) * scale[t] (scale [T] fp32), rounded once.
[[nodiscard]] at::Tensor cross_entropy_forward_backward_(at::Tensor& logits, const at::Tensor& labels,
                                                         const at::Tensor& scale, const Policy& policy);

// ---- flat buffers: norms, optimizers (optimizer.cpp)
// ------------------------------------------------------------------------------

/// One parameter's stretch of the flat buffers, and what the optimizer and the norms do with it.
struct Segment {
  std::int64_t begin = 0, end = 0;  ///< elements; alignment gaps belong to no segment
  std::int32_t group = 0;           ///< index into the learning-rate table
  float weight_decay_multiplier = 1;
  float norm_weight = 1;  ///< 0 for duplicates that another rank counts
};
/// Segments on host and, for CUDA, on the device as well.
struct SegmentTable {
  std::vector<Segment> host;
  at::Tensor device;  ///< raw bytes of `host` on the buffers' CUDA device; undefined on CPU
};
[[nodiscard]] SegmentTable make_segment_table(std::vector<Segment> segments, at::Device device);

/// Sum of squares of `flat` over segments with norm_weight != 0: fp64 scalar tensor on flat's device.
[[nodiscard]] at::Tensor squared_norm(const at::Tensor& flat, const SegmentTable& segments, const Policy& policy);
/// Exact zeros of `flat` over segments with norm_weight != 0: int64 scalar tensor on flat's device.
[[nodiscard]] at::Tensor count_zeros(const at::Tensor& flat, const SegmentTable& segments);
/// fp32 scalar tensor: 1 if any element is NaN or Inf, else 0.
[[nodiscard]] at::Tensor has_non_finite(const at::Tensor& flat);

/// Values of one optimizer step that live on the device, fp32: see the accessors for the order.
struct StepScalars {
  at::Tensor values;                                   ///< [kCount + 2 * groups] fp32 on the device
  static constexpr std::int64_t kGradientScale = 0;    ///< clip coefficient
  static constexpr std::int64_t kSkip = 1;             ///< != 0: nothing is changed, in this and all later steps
  static constexpr std::int64_t kBiasCorrection1 = 2;  ///< 1 - beta1^t
  static constexpr std::int64_t kBiasCorrection2 = 3;  ///< 1 - beta2^t
  static constexpr std::int64_t kWeightDecay = 4;
  static constexpr std::int64_t kFirstMomentum = 5;  ///< SGD: != 0 on the first step (buffer = gradient)
  static constexpr std::int64_t kCount = 6;          ///< then one learning rate a group
  static constexpr float kJustStopped = 1.0F;        ///< kSkip: by this step
  static constexpr float kStoppedBefore = 2.0F;      ///< kSkip: by an earlier one
};
/// Ends the gradient norm on the device, without a host wait. `squared` (fp64 scalar) is the all-reduced squared norm.
/// Writes norm (fp32 scalar) = sqrt(squared) and scalars[kGradientScale] = clip > 0 ? min(1, clip / (norm + 1e-6)) : 1,
/// where NaN stays NaN. With a `guard` (fp64 scalar) scalars[kSkip] becomes kJustStopped, and stays set for good, when
/// norm or guard is not finite.
void finish_norm(const at::Tensor& squared, double clip, const at::Tensor& guard, at::Tensor& norm,
                 StepScalars& scalars);
/// On the step that set scalars[kSkip]: sets flags[i] (uint8) of every segment of `flat` that holds NaN or Inf, and the
/// flag to kStoppedBefore, so that later steps leave the finding alone. Otherwise does nothing.
void mark_non_finite(const at::Tensor& flat, const SegmentTable& segments, StepScalars& scalars, at::Tensor& flags);
struct AdamOptions {
  float beta1 = 0.9F, beta2 = 0.999F, epsilon = 1e-8F;
};
/// Decoupled AdamW over all segments, spec/training.md 4.2: p -= lr * (m^ / (sqrt(v^) + eps) + wd * p), all fp32.
/// `master` is the fp32 copy of `weights` (the same tensor when training in fp32); `gradient` is fp32, bf16 or fp16;
/// weights receive the rounded master.
void adam_step(at::Tensor& weights, at::Tensor& master, at::Tensor& exp_avg, at::Tensor& exp_avg_sq,
               const at::Tensor& gradient, const SegmentTable& segments, const AdamOptions& options,
               const StepScalars& scalars, const Policy& policy);
/// SGD with momentum: g += wd*p; buf = momentum*buf + g (first step: buf = g); p -= lr*buf.
void sgd_step(at::Tensor& weights, at::Tensor& master, at::Tensor& momentum_buffer, const at::Tensor& gradient,
              const SegmentTable& segments, double momentum, const StepScalars& scalars, const Policy& policy);

// ---- random draws (philox.cpp)
// ----------------------------------------------------------------------------------------------------

/// State of one CUDA random stream: Philox key and offset.
struct PhiloxState {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
};
/// Fills a contiguous tensor with the values `tensor.normal_(0, std)` gets from a CUDA generator in this state, and
/// advances it. CUDA tensors: libtorch's own kernel, exact. CPU tensors: the same counters and exact math
/// (spec/model.md 9.2); `sm_count` is the emulated GPU's.
void philox_normal_(at::Tensor& tensor, double std, PhiloxState& state, std::int64_t sm_count);
/// The same for `tensor.uniform_(-bound, bound)` (Xavier initialisation).
void philox_uniform_(at::Tensor& tensor, double bound, PhiloxState& state, std::int64_t sm_count);

}  // namespace pgpt::kernels

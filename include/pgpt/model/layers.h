#pragma once

// Transformer layers with explicit forward and backward. Activations are [T, features] with T = micro-batch * sequence,
// batch-major. A layer's `Saved` is filled by forward and consumed once by backward. The residual stream travels as a
// sum not yet taken, so that the addition is fused with the norm that follows.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pgpt/model/context.h"

namespace pgpt::model {

/// x + dropout(delta + bias), not added yet; delta is undefined at the start of a stage.
struct ResidualStream {
  at::Tensor x;      // [T,h], fp32 with --fp32-residual-connection
  at::Tensor delta;  // [T,h] or undefined
  at::Tensor bias;   // [h] or undefined
  kernels::DropoutState dropout;

  /// The sum itself.
  [[nodiscard]] at::Tensor materialize(const StepContext& context) const;
};

/// Gradient of the residual stream's sum.
struct StreamGradient {
  at::Tensor sum;          // [T,h]
  at::Tensor column_sums;  // [h] its column sums, where the norm that made it took them along; else undefined
};

/// A matrix held by the chain, with an optional replicated bias.
struct Linear {
  gtp::UseId use = 0;
  parameter::Parameter* bias = nullptr;

  /// y [T,N] = x W^T, without the bias.
  [[nodiscard]] at::Tensor forward(const StepContext& context, const at::Tensor& x, gtp::Pass pass,
                                   const at::Tensor& epilogue_bias = {}, bool bias_in_epilogue = true) const;
  /// Returns dx [T,K] and sends the weight gradient dy^T x on its way; `x` is the forward input.
  [[nodiscard]] at::Tensor backward(const StepContext& context, const at::Tensor& dy, const at::Tensor& x) const;
};

/// LayerNorm or RMSNorm fused with the residual addition before it.
struct Norm {
  parameter::Parameter* weight = nullptr;
  parameter::Parameter* bias = nullptr;
  kernels::NormOptions options;

  struct Saved {
    at::Tensor x;  // [T,h] the summed residual stream
    at::Tensor y;  // [T,h] output; dropped when recomputed
    kernels::NormStatistics statistics;
  };
  /// Takes the stream's sum (which becomes stream.x, with no delta) and normalises it.
  [[nodiscard]] at::Tensor forward(const StepContext& context, ResidualStream& stream, Saved& saved) const;
  /// The output again, from the saved input and statistics.
  [[nodiscard]] at::Tensor recompute(const StepContext& context, const Saved& saved) const;
  /// rounded(skip_gradient + dx); adds the gain and bias gradients. `column_sums`, where not null, receives the
  /// result's.
  [[nodiscard]] at::Tensor backward(const StepContext& context, const at::Tensor& dy, const Saved& saved,
                                    const at::Tensor& skip_gradient, at::Tensor* column_sums = nullptr) const;
};

/// Which parts of a layer are computed again in backward instead of being kept (--recompute-granularity selective).
struct SelectiveRecompute {
  bool core_attention = false;
  bool layernorm = false;
  bool mlp = false;
};

/// How the tokens of a micro-batch lie, for the layers that mix them.
struct SequenceLayout {
  std::int64_t batch = 0;               ///< samples
  kernels::AttentionSegments segments;  ///< undefined: each sample is one
  at::Tensor rope_positions;            ///< [b,s] int32; undefined: index inside the sample
};

/// Self-attention: packed QKV projection, optional per-head norms, rotary positions, causal attention, output
/// projection.
class SelfAttention {
 public:
  struct Saved {
    at::Tensor input;    // [T,h]; dropped when the norm is recomputed
    at::Tensor packed;   // [T,qkv rows], only when the core is recomputed
    at::Tensor context;  // [T,nh*d] input of the output projection
    Norm::Saved q_norm, k_norm;
    kernels::AttentionSaved core;
  };
  Linear qkv, proj;
  std::unique_ptr<Norm> q_norm, k_norm;
  const kernels::RopeTable* rope = nullptr;  ///< null without rotary positions
  std::int64_t layer_number = 1;             ///< 1-based, global
  std::string name;

  /// delta [T,h] before the output bias.
  [[nodiscard]] at::Tensor forward(const StepContext& context, const at::Tensor& x, const SequenceLayout& layout,
                                   gtp::Pass pass, bool recompute_core, Saved& saved) const;
  /// Gradient of the input; `ddelta` [T,h], `x` the input.
  [[nodiscard]] at::Tensor backward(const StepContext& context, const at::Tensor& ddelta, const at::Tensor& x,
                                    const SequenceLayout& layout, bool recompute_core, Saved& saved) const;

 private:
  [[nodiscard]] kernels::Qkv split(const StepContext& context, const at::Tensor& packed, const SequenceLayout& layout,
                                   Saved& saved) const;
};

/// Which attention implementation these layers run in training on micro-batches of `batch` samples, for the start-up
/// lines; `segmented`: of documents that are kept apart.
[[nodiscard]] std::string attention_implementation(const config::ModelConfig& config, at::ScalarType dtype,
                                                   at::Device device, std::int64_t batch, bool segmented,
                                                   const kernels::Policy& policy);

/// Feed-forward block: fc1, activation (gated or not), fc2.
class Mlp {
 public:
  struct Saved {
    at::Tensor input;      // [T,h]
    at::Tensor hidden;     // [T, fc1 rows] fc1 output without bias
    at::Tensor activated;  // [T,f]
  };
  Linear fc1, fc2;
  kernels::ActivationOptions activation;
  std::string name;

  [[nodiscard]] at::Tensor forward(const StepContext& context, const at::Tensor& x, gtp::Pass pass, Saved& saved) const;
  /// What backward needs of a forward pass: everything but fc2.
  void forward_inside(const StepContext& context, const at::Tensor& x, gtp::Pass pass, Saved& saved) const;
  [[nodiscard]] at::Tensor backward(const StepContext& context, const at::Tensor& ddelta, const at::Tensor& x,
                                    const Saved& saved) const;
};

/// norm, attention, norm, feed-forward around the residual stream.
class TransformerLayer {
 public:
  struct Saved {
    Norm::Saved input_norm, pre_mlp_norm;
    SelfAttention::Saved attention;
    Mlp::Saved mlp;
    kernels::DropoutState attention_dropout, mlp_dropout;  // of the two residual additions
    SequenceLayout layout;
  };
  Norm input_norm, pre_mlp_norm;
  SelfAttention attention;
  Mlp mlp;
  SelectiveRecompute recompute;
  std::string name;

  /// Advances the stream by one layer; the last addition is left to whoever reads the stream next. Without
  /// `needs_output` (the last layer that is recomputed at once) fc2 does not run and the stream must not be read.
  void forward(const StepContext& context, ResidualStream& stream, const SequenceLayout& layout, gtp::Pass pass,
               bool needs_output, Saved& saved) const;
  /// Takes the gradient of the stream's sum after the layer and returns it before the layer, with column sums when
  /// `with_column_sums`.
  [[nodiscard]] StreamGradient backward(const StepContext& context, const StreamGradient& gradient,
                                        bool with_column_sums, Saved& saved) const;
  /// True when backward has a use for the column sums of its gradient, a stream of type `stream`.
  [[nodiscard]] bool takes_column_sums(const StepContext& context, at::ScalarType stream) const;
};

}  // namespace pgpt::model

#include "pgpt/model/layers.h"

#include <ATen/ATen.h>

#include <cmath>

#include "pgpt/base/error.h"

namespace pgpt::model {

using at::Tensor;
using gtp::Pass;

namespace {

/// The next hidden-dropout call, or none in evaluation or at probability zero.
kernels::DropoutState next_hidden_dropout(const StepContext& context) {
  kernels::DropoutState state;
  if (!context.training || context.config->hidden_dropout == 0.0) return state;
  state.probability = context.config->hidden_dropout;
  state.seed = context.dropout->hidden_seed;
  state.offset = context.dropout->hidden_offset++;
  state.base = context.dropout->hidden_base;
  return state;
}

}  // namespace

// ---- residual stream and norms ----

Tensor ResidualStream::materialize(const StepContext& context) const {
  if (!delta.defined()) return x;
  return kernels::bias_dropout_add(delta, bias, x, dropout, context.config->bias_dropout_fusion, context.policy);
}

Tensor Norm::forward(const StepContext& context, ResidualStream& stream, Saved& saved) const {
  const Tensor gain = weight->weight;
  const Tensor shift = bias != nullptr ? bias->weight : Tensor();
  const bool plain_addition = stream.delta.defined() && !stream.bias.defined() && stream.dropout.probability == 0.0;
  if (plain_addition) {
    saved.y = kernels::add_norm_forward(stream.x, stream.delta, gain, shift, options, saved.x, saved.statistics,
                                        context.policy);
  } else {
    saved.x = stream.materialize(context);
    saved.y = kernels::norm_forward(saved.x, gain, shift, options, saved.statistics, context.policy);
  }
  stream = ResidualStream{saved.x, {}, {}, {}};
  return saved.y;
}

Tensor Norm::recompute(const StepContext& context, const Saved& saved) const {
  kernels::NormStatistics statistics;
  return kernels::norm_forward(saved.x, weight->weight, bias != nullptr ? bias->weight : Tensor(), options, statistics,
                               context.policy);
}

Tensor Norm::backward(const StepContext& context, const Tensor& dy, const Saved& saved, const Tensor& skip_gradient,
                      Tensor* column_sums) const {
  const kernels::NormGradients gradients =
      kernels::norm_backward(dy, saved.x, weight->weight, bias != nullptr ? bias->weight : Tensor(), options,
                             saved.statistics, skip_gradient, context.policy, column_sums);
  add_replicated_gradient(context, *weight, gradients.weight);
  if (bias != nullptr) add_replicated_gradient(context, *bias, gradients.bias);
  return gradients.input;
}

// ---- linear ----

Tensor Linear::forward(const StepContext& context, const Tensor& x, Pass pass, const Tensor& epilogue_bias,
                       bool bias_in_epilogue) const {
  const gtp::GatheredWeight weight = context.chain->read(use, pass);
  return kernels::linear(x, weight.get(), epilogue_bias, bias_in_epilogue, context.policy);
}

Tensor Linear::backward(const StepContext& context, const Tensor& dy, const Tensor& x) const {
  gtp::WeightChain& chain = *context.chain;
  const gtp::GatheredWeight weight = chain.read(use, Pass::kBackward);
  Tensor dx = kernels::linear_input_gradient(dy, weight.get(), context.policy);
  const gtp::UseSpec& spec = chain.uses()[use];
  if (context.observer != nullptr && context.observer->gradient) {
    // What is written may be a running sum, so an observer gets a gradient computed beside it.
    context.observer->gradient(spec.weight->spec.name, kernels::linear_weight_gradient(dy, x, spec.gradient_dtype));
  }
  chain.add_product(
      use, [dy, x, policy = context.policy](Tensor target, std::int64_t first, double scale, bool overwrite) {
        kernels::add_weight_gradient(target, dy.narrow(1, first, target.size(0)), x, scale, overwrite, policy);
      });
  return dx;
}

// ---- self-attention ----

namespace {

kernels::AttentionForm attention_form(const config::ModelConfig& config, at::ScalarType dtype) {
  using config::AttentionBackend;
  const bool local = config.transformer_impl == config::TransformerImpl::kLocal;
  if (!local && config.attention_backend != AttentionBackend::kUnfused &&
      config.attention_backend != AttentionBackend::kLocal) {
    return kernels::AttentionForm::kFused;
  }
  const bool fused_softmax = local && config.masked_softmax_fusion && dtype != at::kFloat;
  if (local && !fused_softmax && config.attention_softmax_in_fp32) return kernels::AttentionForm::kUnfusedFp32Softmax;
  return kernels::AttentionForm::kUnfused;
}

kernels::AttentionOptions attention_options(const StepContext& context, std::int64_t layer_number,
                                            at::ScalarType dtype) {
  const config::ModelConfig& config = *context.config;
  kernels::AttentionOptions options;
  options.form = attention_form(config, dtype);
  options.scale = 1.0 / std::sqrt(static_cast<double>(config.kv_channels));
  if (config.apply_query_key_layer_scaling) {
    options.form = kernels::AttentionForm::kUnfusedFp32Softmax;
    options.score_divisor = static_cast<double>(layer_number);
  }
  if (context.training && config.attention_dropout > 0.0) {
    options.dropout = config.attention_dropout;
    options.dropout_seed = context.dropout->attention_seed;
    options.dropout_offset = context.dropout->attention_offset++;
    options.dropout_base = context.dropout->attention_base;
  }
  return options;
}

}  // namespace

std::string attention_implementation(const config::ModelConfig& config, at::ScalarType dtype, at::Device device,
                                     std::int64_t batch, bool segmented, const kernels::Policy& policy) {
  kernels::AttentionOptions options;
  options.form = attention_form(config, dtype);
  options.dropout = config.attention_dropout;
  const std::int64_t s = config.seq_length;
  // Heads as the layers see them: parts of one packed tensor, or tensors of their own.
  const Tensor packed = at::empty({batch, s, config.qkv_rows()}, at::TensorOptions(device).dtype(dtype));
  const kernels::Qkv qkv = kernels::split_qkv(packed, config.num_attention_heads, config.num_query_groups,
                                              config.kv_channels, nullptr, policy);
  kernels::AttentionSegments segments;
  if (segmented) {
    std::vector<std::int32_t> ends;
    for (std::int64_t i = 0; i <= batch; ++i) ends.push_back(static_cast<std::int32_t>(i * s));
    segments = kernels::make_attention_segments(ends, batch, s).to(device);
  }
  return kernels::attention_implementation(qkv, segments, options, policy);
}

kernels::Qkv SelfAttention::split(const StepContext& context, const Tensor& packed, const SequenceLayout& layout,
                                  Saved& saved) const {
  const config::ModelConfig& config = *context.config;
  const Tensor packed_BSF = packed.view({layout.batch, packed.size(0) / layout.batch, packed.size(1)});
  kernels::Qkv heads =
      kernels::split_qkv(packed_BSF, config.num_attention_heads, config.num_query_groups, config.kv_channels,
                         q_norm ? nullptr : rope, context.policy, layout.rope_positions);
  if (!q_norm) return heads;
  const auto normalise = [&](const Norm& norm, const Tensor& head, Norm::Saved& norm_saved) {
    ResidualStream rows{head.reshape({-1, config.kv_channels}), {}, {}, {}};
    return norm.forward(context, rows, norm_saved).view(head.sizes());
  };
  Tensor q = normalise(*q_norm, heads.q, saved.q_norm);
  Tensor k = normalise(*k_norm, heads.k, saved.k_norm);
  if (rope != nullptr) {
    kernels::rope_(q, *rope, false, context.policy, layout.rope_positions);
    kernels::rope_(k, *rope, false, context.policy, layout.rope_positions);
  }
  return {q, k, heads.v};
}

Tensor SelfAttention::forward(const StepContext& context, const Tensor& x, const SequenceLayout& layout, Pass pass,
                              bool recompute_core, Saved& saved) const {
  const bool transformer_engine = context.config->transformer_impl == config::TransformerImpl::kTransformerEngine;
  saved.input = x;
  const Tensor packed =
      qkv.forward(context, x, pass, qkv.bias != nullptr ? qkv.bias->weight : Tensor(), transformer_engine);
  context.observe(name + ".linear_qkv", packed);
  // The split may rotate the packed tensor in place, so a recomputed core keeps its own copy.
  if (recompute_core) saved.packed = rope != nullptr && !q_norm ? packed.clone() : packed;
  const kernels::Qkv heads = split(context, packed, layout, saved);
  const kernels::AttentionOptions options = attention_options(context, layer_number, x.scalar_type());
  const Tensor out = kernels::attention_forward(heads, layout.segments, options, saved.core, context.policy);
  saved.context = out.reshape({x.size(0), context.config->query_projection_size()});
  context.observe(name + ".core_attention", saved.context);
  if (recompute_core) {
    Saved kept;
    kept.core.options = options;
    saved.core = kept.core;
    saved.q_norm = saved.k_norm = {};
  }
  return proj.forward(context, saved.context, pass);
}

Tensor SelfAttention::backward(const StepContext& context, const Tensor& ddelta, const Tensor& x,
                               const SequenceLayout& layout, bool recompute_core, Saved& saved) const {
  const config::ModelConfig& config = *context.config;
  const std::int64_t sequence = x.size(0) / layout.batch;
  const Tensor dcontext = proj.backward(context, ddelta, saved.context);
  if (recompute_core) {
    const kernels::AttentionOptions options = saved.core.options;
    const kernels::Qkv heads = split(context, saved.packed, layout, saved);
    (void)kernels::attention_forward(heads, layout.segments, options, saved.core, context.policy);
  }
  kernels::Qkv gradient = kernels::attention_backward(
      dcontext.view({layout.batch, sequence, config.num_attention_heads, config.kv_channels}), saved.core,
      context.policy);
  if (q_norm) {
    const auto through_norm = [&](const Norm& norm, const Tensor& heads, const Norm::Saved& norm_saved) {
      Tensor dy = heads.contiguous();
      if (rope != nullptr) kernels::rope_(dy, *rope, true, context.policy, layout.rope_positions);
      return norm.backward(context, dy.view({-1, config.kv_channels}), norm_saved, {}).view(heads.sizes());
    };
    gradient.q = through_norm(*q_norm, gradient.q, saved.q_norm);
    gradient.k = through_norm(*k_norm, gradient.k, saved.k_norm);
  }
  Tensor bias_gradient;
  const Tensor dpacked =
      kernels::merge_qkv_gradient(gradient, q_norm ? nullptr : rope, context.policy,
                                  qkv.bias != nullptr ? &bias_gradient : nullptr, layout.rope_positions)
          .view({x.size(0), config.qkv_rows()});
  if (qkv.bias != nullptr) add_replicated_gradient(context, *qkv.bias, bias_gradient);
  return qkv.backward(context, dpacked, x);
}

// ---- feed-forward ----

void Mlp::forward_inside(const StepContext& context, const Tensor& x, Pass pass, Saved& saved) const {
  saved.input = x;
  saved.hidden = fc1.forward(context, x, pass);
  saved.activated = kernels::activation_forward(saved.hidden, fc1.bias != nullptr ? fc1.bias->weight : Tensor(),
                                                activation, context.policy);
}

Tensor Mlp::forward(const StepContext& context, const Tensor& x, Pass pass, Saved& saved) const {
  forward_inside(context, x, pass, saved);
  context.observe(name + ".activation", saved.activated);
  return fc2.forward(context, saved.activated, pass);
}

Tensor Mlp::backward(const StepContext& context, const Tensor& ddelta, const Tensor& x, const Saved& saved) const {
  const Tensor dactivated = fc2.backward(context, ddelta, saved.activated);
  Tensor bias_gradient;
  const Tensor dhidden =
      kernels::activation_backward(dactivated, saved.hidden, fc1.bias != nullptr ? fc1.bias->weight : Tensor(),
                                   activation, context.policy, fc1.bias != nullptr ? &bias_gradient : nullptr);
  if (fc1.bias != nullptr) add_replicated_gradient(context, *fc1.bias, bias_gradient);
  return fc1.backward(context, dhidden, x);
}

// ---- layer ----

void TransformerLayer::forward(const StepContext& context, ResidualStream& stream, const SequenceLayout& layout,
                               Pass pass, bool needs_output, Saved& saved) const {
  saved.layout = layout;
  const Tensor attention_input = input_norm.forward(context, stream, saved.input_norm);
  context.observe(name + ".input_norm", attention_input);
  stream.delta = attention.forward(context, attention_input, layout, pass, recompute.core_attention, saved.attention);
  context.observe(name + ".self_attention", stream.delta);
  stream.bias = attention.proj.bias != nullptr ? attention.proj.bias->weight : Tensor();
  stream.dropout = saved.attention_dropout = next_hidden_dropout(context);

  const Tensor mlp_input = pre_mlp_norm.forward(context, stream, saved.pre_mlp_norm);
  context.observe(name + ".pre_mlp_norm", mlp_input);
  if (needs_output) {
    stream.delta = mlp.forward(context, mlp_input, pass, saved.mlp);
    context.observe(name + ".mlp", stream.delta);
  } else {
    mlp.forward_inside(context, mlp_input, pass, saved.mlp);
  }
  stream.bias = mlp.fc2.bias != nullptr ? mlp.fc2.bias->weight : Tensor();
  stream.dropout = saved.mlp_dropout = next_hidden_dropout(context);

  if (recompute.layernorm) {
    saved.input_norm.y = saved.pre_mlp_norm.y = Tensor();
    saved.attention.input = saved.mlp.input = Tensor();
  }
  if (recompute.mlp) saved.mlp.hidden = saved.mlp.activated = Tensor();
}

namespace {

/// True when the bias of `last`, which ends a branch, has the column sums of the stream's gradient as its gradient:
/// neither dropout nor a rounding lies in between.
bool bias_sums_stream_gradient(const StepContext& context, const Linear& last, at::ScalarType stream) {
  return last.bias != nullptr && context.config->hidden_dropout == 0.0 &&
         context.chain->uses()[last.use].weight->weight.scalar_type() == stream;
}

}  // namespace

bool TransformerLayer::takes_column_sums(const StepContext& context, at::ScalarType stream) const {
  return bias_sums_stream_gradient(context, mlp.fc2, stream);
}

StreamGradient TransformerLayer::backward(const StepContext& context, const StreamGradient& gradient,
                                          bool with_column_sums, Saved& saved) const {
  // Gradient of a branch output delta from the gradient of x + dropout(delta + bias).
  const auto branch_gradient = [&](const StreamGradient& stream, const kernels::DropoutState& dropout,
                                   const Linear& last) {
    Tensor branch = stream.sum.to(context.chain->uses()[last.use].weight->weight.scalar_type());
    if (dropout.probability > 0.0) branch = kernels::dropout(branch, dropout, context.policy);
    if (last.bias != nullptr) {
      add_replicated_gradient(context, *last.bias,
                              stream.column_sums.defined() ? stream.column_sums : kernels::column_sum(branch));
    }
    return branch;
  };
  const Tensor ddelta_mlp = branch_gradient(gradient, saved.mlp_dropout, mlp.fc2);
  Tensor mlp_input = saved.mlp.input;
  if (!mlp_input.defined()) mlp_input = pre_mlp_norm.recompute(context, saved.pre_mlp_norm);
  if (!saved.mlp.hidden.defined()) {
    // Backward of fc2 reads the activated tensor, not fc2's output.
    mlp.forward_inside(context, mlp_input, Pass::kRecompute, saved.mlp);
  }
  const Tensor dmlp_input = mlp.backward(context, ddelta_mlp, mlp_input, saved.mlp);
  saved.mlp = {};
  StreamGradient middle;
  const bool middle_sums = bias_sums_stream_gradient(context, attention.proj, gradient.sum.scalar_type());
  middle.sum = pre_mlp_norm.backward(context, dmlp_input, saved.pre_mlp_norm, gradient.sum,
                                     middle_sums ? &middle.column_sums : nullptr);
  saved.pre_mlp_norm = {};

  const Tensor ddelta_attention = branch_gradient(middle, saved.attention_dropout, attention.proj);
  Tensor attention_input = saved.attention.input;
  if (!attention_input.defined()) attention_input = input_norm.recompute(context, saved.input_norm);
  const Tensor dattention_input = attention.backward(context, ddelta_attention, attention_input, saved.layout,
                                                     recompute.core_attention, saved.attention);
  saved.attention = {};
  StreamGradient before;
  before.sum = input_norm.backward(context, dattention_input, saved.input_norm, middle.sum,
                                   with_column_sums ? &before.column_sums : nullptr);
  saved.input_norm = {};
  context.observe(name + ".gradient", before.sum);
  return before;
}

}  // namespace pgpt::model

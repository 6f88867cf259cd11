#include "pgpt/model/gpt.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "pgpt/base/error.h"

namespace pgpt::model {

using at::Tensor;
using gtp::Pass;

namespace {

constexpr gtp::UseId kEmbeddingUse = 0;
constexpr gtp::UseId kUsesPerLayer = 4;  // qkv, proj, fc1, fc2

parameter::Parameter* find_optional(parameter::ParameterStore& store, const std::string& name) {
  return store.contains(name) ? &store.find(name) : nullptr;
}

kernels::ActivationOptions activation_options(const config::ModelConfig& config) {
  kernels::ActivationOptions options;
  switch (config.activation) {
    case config::Activation::kGeluTanh:
      options.kind = kernels::ActivationKind::kGeluTanh;
      break;
    case config::Activation::kGeluErf:
      options.kind = kernels::ActivationKind::kGeluErf;
      break;
    case config::Activation::kSwiglu:
      options.kind = kernels::ActivationKind::kSwiglu;
      break;
    case config::Activation::kSquaredRelu:
      options.kind = kernels::ActivationKind::kSquaredRelu;
      break;
    case config::Activation::kQuickGeglu:
      options.kind = kernels::ActivationKind::kQuickGeglu;
      break;
  }
  options.fused_rounding = config.bias_activation_fusion;
  options.glu_offset = config.glu_linear_offset;
  options.clamp = config.activation_clamp;
  return options;
}

}  // namespace

GptModel::GptModel(const config::ModelConfig& model, const config::TrainingConfig& training,
                   parameter::ParameterStore& store, at::Device device)
    : config_(model), logits_chunks_(training.logits_chunks) {
  if (config_.has_rope()) {
    kernels::RopeOptions options;
    options.dim = static_cast<std::int64_t>(static_cast<double>(config_.kv_channels) * config_.rotary_percent);
    options.base = static_cast<double>(config_.rotary_base);
    options.interpolation_factor = config_.rotary_seq_len_interpolation_factor;
    options.llama3_scaling = config_.rope_scaling;
    options.scaling_factor = config_.rope_scaling_factor;
    options.interleaved = config_.rotary_interleaved;
    options.fused_rounding = config_.rope_fusion;
    rope_ = std::make_unique<kernels::RopeTable>(kernels::make_rope_table(config_.seq_length, options, device));
  }
  plan_chunks(training);
  build_layers(training, store);
}

void GptModel::plan_chunks(const config::TrainingConfig& training) {
  const auto layers = static_cast<std::size_t>(config_.num_layers);
  if (training.recompute != config::RecomputeGranularity::kFull) {
    chunks_.push_back({0, layers, false});
    return;
  }
  const auto size = static_cast<std::size_t>(training.recompute_num_layers);
  if (training.recompute_method == config::RecomputeMethod::kUniform) {
    for (std::size_t begin = 0; begin < layers; begin += size)
      chunks_.push_back({begin, std::min(begin + size, layers), true});
    return;
  }
  // block: the first layers are recomputed one by one, the rest are kept.
  const std::size_t recomputed = std::min(size, layers);
  for (std::size_t i = 0; i < recomputed; ++i) chunks_.push_back({i, i + 1, true});
  if (recomputed < layers) chunks_.push_back({recomputed, layers, false});
}

void GptModel::build_layers(const config::TrainingConfig& training, parameter::ParameterStore& store) {
  const bool fused_norms = config_.transformer_impl == config::TransformerImpl::kTransformerEngine;
  const bool selective = training.recompute == config::RecomputeGranularity::kSelective;
  const auto recomputes = [&](const char* module) {
    const auto& modules = training.recompute_modules;
    return selective && std::find(modules.begin(), modules.end(), module) != modules.end();
  };
  const SelectiveRecompute recompute{recomputes("core_attn"), recomputes("layernorm"), recomputes("mlp")};
  const kernels::NormOptions norm_options{
      config_.norm_epsilon, config_.normalization == config::Normalization::kRMSNorm, config_.zero_centered_gamma};
  const auto norm = [&](const std::string& prefix) {
    return Norm{&store.find(prefix + "weight"), find_optional(store, prefix + "bias"), norm_options};
  };
  // Gradients take the main gradient's type, without a rounding in between, where products add to it; under GTP only in
  // modules that the reference builds with Transformer Engine (spec/model.md 10.3).
  const parameter::StoreOptions& types = store.options();
  const bool whole = types.gtp_size == 1;
  const bool fuse = training.gradient_accumulation_fusion;
  const auto gradient_dtype = [&](bool fused) { return fused ? types.gradient_dtype : types.weight_dtype; };
  const auto use = [&](const std::string& module, std::int64_t recompute_group, at::ScalarType gradient,
                       bool on_demand = false) {
    uses_.push_back({module, &store.find(module + ".weight"), !on_demand, !on_demand, recompute_group, gradient});
    return uses_.size() - 1;
  };
  const auto linear = [&](const std::string& module, std::int64_t recompute_group) {
    return Linear{use(module, recompute_group, gradient_dtype(fuse && (whole || fused_norms))),
                  find_optional(store, module + ".bias")};
  };

  word_embeddings_ = &store.find("embedding.word_embeddings.weight");
  position_embeddings_ = find_optional(store, "embedding.position_embeddings.weight");
  use("embedding.word_embeddings", -1, gradient_dtype(whole && types.gradient_dtype == at::kFloat), true);
  layers_.resize(static_cast<std::size_t>(config_.num_layers));
  for (std::size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    for (std::size_t i = chunks_[chunk].begin; i < chunks_[chunk].end; ++i) {
      const auto group = chunks_[chunk].recompute ? static_cast<std::int64_t>(chunk) : std::int64_t{-1};
      TransformerLayer& layer = layers_[i];
      layer.name = "decoder.layers." + std::to_string(i);
      layer.recompute = recompute;
      layer.input_norm =
          norm(fused_norms ? layer.name + ".self_attention.linear_qkv.layer_norm_" : layer.name + ".input_layernorm.");
      layer.attention.name = layer.name + ".self_attention";
      layer.attention.layer_number = static_cast<std::int64_t>(i) + 1;
      layer.attention.rope = rope_.get();
      layer.attention.qkv = linear(layer.attention.name + ".linear_qkv", group);
      layer.attention.proj = linear(layer.attention.name + ".linear_proj", group);
      if (config_.qk_layernorm) {
        layer.attention.q_norm = std::make_unique<Norm>(norm(layer.attention.name + ".q_layernorm."));
        layer.attention.k_norm = std::make_unique<Norm>(norm(layer.attention.name + ".k_layernorm."));
      }
      layer.pre_mlp_norm =
          norm(fused_norms ? layer.name + ".mlp.linear_fc1.layer_norm_" : layer.name + ".pre_mlp_layernorm.");
      layer.mlp.name = layer.name + ".mlp";
      layer.mlp.activation = activation_options(config_);
      // With selective recompute of the MLP only fc1 runs again, so it is a group of its own.
      layer.mlp.fc1 =
          linear(layer.mlp.name + ".linear_fc1", recompute.mlp ? static_cast<std::int64_t>(chunks_.size() + i) : group);
      layer.mlp.fc2 = linear(layer.mlp.name + ".linear_fc2", i + 1 < chunks_[chunk].end ? group : -1);
    }
  }
  PGPT_ASSERT(uses_.size() == 1 + kUsesPerLayer * layers_.size());
  final_norm_ = norm("decoder.final_layernorm.");
  if (config_.untie_embeddings) {
    output_ = Linear{use("output_layer", -1, gradient_dtype(fuse && whole)), nullptr};
  } else {
    uses_.push_back({"output_layer (tied)", word_embeddings_, true, true, -1, gradient_dtype(fuse && whole)});
    output_ = Linear{uses_.size() - 1, nullptr};
  }
}

std::size_t GptModel::uses_of_last(std::int64_t layers) const {
  if (layers == 0) return 0;
  const std::size_t count = 1 + kUsesPerLayer * static_cast<std::size_t>(layers);  // with the output matrix
  return layers == config_.num_layers ? uses_.size() : count;
}

Tensor GptModel::embed(const StepContext& context, const Batch& batch, Saved& saved) const {
  const gtp::GatheredWeight table = context.chain->read(kEmbeddingUse, Pass::kForward);
  Tensor x = kernels::embedding_forward(table.get(), batch.tokens.view({-1}));
  if (position_embeddings_ != nullptr) {
    x = x.add(kernels::embedding_forward(position_embeddings_->weight, batch.position_ids.view({-1})));
  }
  if (context.training && config_.hidden_dropout > 0.0) {
    saved.embedding_dropout = {config_.hidden_dropout, context.dropout->hidden_seed, context.dropout->hidden_offset++,
                               context.dropout->hidden_base};
    x = kernels::dropout(x, saved.embedding_dropout, context.policy);
  }
  if (config_.fp32_residual_connection) x = x.to(at::kFloat);
  context.observe("embedding", x);
  return x;
}

void GptModel::embed_backward(const StepContext& context, const Batch& batch, const Tensor& gradient,
                              const Saved& saved) const {
  Tensor dx = gradient.to(word_embeddings_->weight.scalar_type());
  if (saved.embedding_dropout.probability > 0.0) dx = kernels::dropout(dx, saved.embedding_dropout, context.policy);
  if (position_embeddings_ != nullptr) {
    add_replicated_gradient(context, *position_embeddings_,
                            kernels::embedding_gradient(dx, batch.position_ids.view({-1}),
                                                        position_embeddings_->weight.size(0), context.policy));
  }
  const Tensor ids = batch.tokens.view({-1});
  const std::int64_t rows = word_embeddings_->layout.logical_shape.at(0);
  if (context.observer != nullptr && context.observer->gradient) {
    context.observer->gradient(word_embeddings_->spec.name, kernels::embedding_gradient(dx, ids, rows, context.policy));
  }
  const gtp::WeightChain::GradientTarget target = context.chain->gradient_target(kEmbeddingUse);
  Tensor table = target.tensor;
  if (table.scalar_type() == at::kFloat && target.scale == 1.0) {
    if (target.overwrite) table.zero_();
    kernels::accumulate_embedding_gradient(table, dx, ids, context.policy);
  } else {
    target.write(kernels::embedding_gradient(dx, ids, rows, context.policy));
  }
  context.chain->gradient_written(kEmbeddingUse);
}

void GptModel::run_chunk(const StepContext& context, const Chunk& chunk, ResidualStream& stream, const Batch& batch,
                         Pass pass, ChunkSaved& saved) const {
  const SequenceLayout layout{batch.tokens.size(0), batch.segments, batch.rope_positions};
  saved.layers.resize(chunk.end - chunk.begin);
  for (std::size_t i = chunk.begin; i < chunk.end; ++i) {
    const bool needs_output = pass == Pass::kForward || i + 1 < chunk.end;
    layers_[i].forward(context, stream, layout, pass, needs_output, saved.layers[i - chunk.begin]);
    // Evaluation, and a chunk that will be recomputed, keep nothing.
    if (!context.training || (chunk.recompute && pass == Pass::kForward)) saved.layers[i - chunk.begin] = {};
  }
}

LossSum GptModel::run_forward(const StepContext& context, const Batch& batch, bool with_gradient, Saved& saved) const {
  ResidualStream stream{embed(context, batch, saved), {}, {}, {}};
  saved.chunks.resize(chunks_.size());
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    if (chunks_[i].recompute && context.training) {
      stream = ResidualStream{stream.materialize(context), {}, {}, {}};
      saved.chunks[i].input = stream.x;
      saved.chunks[i].dropout = *context.dropout;
    }
    run_chunk(context, chunks_[i], stream, batch, Pass::kForward, saved.chunks[i]);
  }
  const Tensor y = final_norm_.forward(context, stream, saved.final_norm);
  context.observe("decoder.final_layernorm", y);
  LossSum loss;
  if (logits_chunks_ > 1) {
    loss.token_losses = with_gradient ? losses_and_gradients_in_parts(context, batch, y, saved.doutput)
                                      : losses_in_parts(context, batch, y);
  } else {
    Tensor logits = output_.forward(context, y, Pass::kForward);
    context.observe("logits", logits);
    if (with_gradient) {
      loss.token_losses =
          kernels::cross_entropy_forward_backward_(logits, batch.labels, batch.gradient_scale, context.policy);
      saved.dlogits = std::move(logits);
    } else {
      loss.token_losses = kernels::cross_entropy_forward(logits, batch.labels, context.policy);
    }
  }
  loss.sum = loss.token_losses.mul(batch.loss_mask).sum();
  context.chain->end_pass(Pass::kForward);
  return loss;
}

void GptModel::for_each_part(std::int64_t tokens, const std::function<void(std::int64_t, std::int64_t)>& work) const {
  const std::int64_t size = (tokens + logits_chunks_ - 1) / logits_chunks_;
  for (std::int64_t first = 0; first < tokens; first += size) work(first, std::min(size, tokens - first));
}

Tensor GptModel::losses_in_parts(const StepContext& context, const Batch& batch, const Tensor& y) const {
  const gtp::GatheredWeight weight = context.chain->read(output_.use, Pass::kForward);
  std::vector<Tensor> losses;
  for_each_part(y.size(0), [&](std::int64_t first, std::int64_t count) {
    const Tensor logits = kernels::linear(y.narrow(0, first, count), weight.get(), {}, true, context.policy);
    losses.push_back(kernels::cross_entropy_forward(logits, batch.labels.narrow(0, first, count), context.policy));
  });
  return at::cat(losses);
}

Tensor GptModel::losses_and_gradients_in_parts(const StepContext& context, const Batch& batch, const Tensor& y,
                                               Tensor& dy) const {
  gtp::WeightChain& chain = *context.chain;
  // Backward begins here, so the weight is read in both passes.
  (void)chain.read(output_.use, Pass::kForward);
  chain.end_pass(Pass::kForward);
  const gtp::GatheredWeight weight = chain.read(output_.use, Pass::kBackward);
  const gtp::WeightChain::GradientTarget target = chain.gradient_target(output_.use);
  // The sum over the parts is not rounded in between, whatever type the gradient has in the end.
  const bool wide = target.tensor.element_size() == 2;
  Tensor sum = wide ? at::empty(target.tensor.sizes(), target.tensor.options().dtype(at::kFloat)) : target.tensor;
  std::vector<Tensor> losses;
  dy = at::empty_like(y);
  for_each_part(y.size(0), [&](std::int64_t first, std::int64_t count) {
    const Tensor part = y.narrow(0, first, count);
    Tensor logits = kernels::linear(part, weight.get(), {}, true, context.policy);
    losses.push_back(kernels::cross_entropy_forward_backward_(
        logits, batch.labels.narrow(0, first, count), batch.gradient_scale.narrow(0, first, count), context.policy));
    dy.narrow(0, first, count).copy_(kernels::linear_input_gradient(logits, weight.get(), context.policy));
    const bool overwrite = first == 0 && (wide || target.overwrite);
    kernels::add_weight_gradient(sum, logits, part, wide ? 1.0 : target.scale, overwrite, context.policy);
  });
  if (wide) target.write(sum);
  chain.gradient_written(output_.use);
  return at::cat(losses);
}

LossSum GptModel::forward(const StepContext& context, const Batch& batch) {
  Saved saved;
  return run_forward(context, batch, false, saved);
}

LossSum GptModel::forward_backward(const StepContext& context, const Batch& batch) {
  Saved saved;
  LossSum loss = run_forward(context, batch, true, saved);

  const Tensor dy =
      saved.doutput.defined() ? std::move(saved.doutput) : output_.backward(context, saved.dlogits, saved.final_norm.y);
  saved.dlogits.reset();
  // The norm below which `layers` layers lie takes column sums along where the last of them has a use for them.
  const at::ScalarType stream_type = saved.final_norm.x.scalar_type();
  const auto with_column_sums = [&](std::size_t layers) {
    return layers > 0 && layers_[layers - 1].takes_column_sums(context, stream_type);
  };
  // The head reads the plain sum of the stream, so there is no skip gradient.
  StreamGradient gradient;
  gradient.sum = final_norm_.backward(context, dy, saved.final_norm, {},
                                      with_column_sums(layers_.size()) ? &gradient.column_sums : nullptr);
  saved.final_norm = {};
  for (std::size_t i = chunks_.size(); i-- > 0;) {
    const Chunk& chunk = chunks_[i];
    ChunkSaved& chunk_saved = saved.chunks[i];
    if (chunk.recompute) {
      StepContext again = context;
      DropoutCursor cursor = chunk_saved.dropout;
      again.dropout = &cursor;
      again.observer = nullptr;
      ResidualStream stream{chunk_saved.input, {}, {}, {}};
      run_chunk(again, chunk, stream, batch, Pass::kRecompute, chunk_saved);
      context.chain->end_pass(Pass::kRecompute);
    }
    for (std::size_t layer = chunk.end; layer-- > chunk.begin;) {
      gradient =
          layers_[layer].backward(context, gradient, with_column_sums(layer), chunk_saved.layers[layer - chunk.begin]);
    }
    chunk_saved = {};
  }
  context.observe("embedding.gradient", gradient.sum);
  context.reducer->note_backward(gradient.sum);
  embed_backward(context, batch, gradient.sum, saved);
  context.chain->end_pass(Pass::kBackward);
  return loss;
}

}  // namespace pgpt::model

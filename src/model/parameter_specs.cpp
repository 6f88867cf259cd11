#include <cmath>

#include "pgpt/model/gpt.h"

namespace pgpt::model {

using parameter::InitRule;
using parameter::ParameterSpec;

namespace {

/// Collects specs; `use` counts up in forward order while registration follows the reference's module tree
/// (spec/model.md 3).
class SpecList {
 public:
  explicit SpecList(const config::ModelConfig& model) : model_(model) {}

  void matrix(const std::string& name, std::int64_t rows, std::int64_t columns, double std, std::int64_t use,
              bool shard_drawn) {
    ParameterSpec spec;
    spec.name = name;
    spec.shape = {rows, columns};
    spec.init = model_.init_method_xavier_uniform ? InitRule::kXavierUniform : InitRule::kNormal;
    spec.std = std;
    spec.gtp_sharded = true;
    spec.shard_drawn = shard_drawn && model_.transformer_impl == config::TransformerImpl::kTransformerEngine;
    spec.first_use = use;
    specs_.push_back(std::move(spec));
  }
  void vector(const std::string& name, std::int64_t size, InitRule init, std::int64_t use, double weight_decay = 0.0) {
    ParameterSpec spec;
    spec.name = name;
    spec.shape = {size};
    spec.init = init;
    spec.first_use = use;
    spec.weight_decay_multiplier = weight_decay;
    specs_.push_back(std::move(spec));
  }
  /// Gain and, for LayerNorm, bias; `separator` is "." for norm modules and "_" for norms fused into a linear.
  void norm(const std::string& prefix, std::int64_t size, std::int64_t use) {
    vector(prefix + "weight", size, model_.zero_centered_gamma ? InitRule::kZeros : InitRule::kOnes, use);
    if (model_.normalization == config::Normalization::kLayerNorm) vector(prefix + "bias", size, InitRule::kZeros, use);
  }
  [[nodiscard]] std::vector<ParameterSpec>& specs() { return specs_; }

 private:
  const config::ModelConfig& model_;
  std::vector<ParameterSpec> specs_;
};

}  // namespace

std::vector<ParameterSpec> GptModel::parameter_specs(const config::ModelConfig& model) {
  const bool fused_norms = model.transformer_impl == config::TransformerImpl::kTransformerEngine;
  const double output_std = model.init_method_std / std::sqrt(2.0 * static_cast<double>(model.num_layers));
  const std::int64_t h = model.hidden_size;
  SpecList list(model);
  std::int64_t use = 0;

  // A spread of their own makes the embedding tables normal under --init-method-xavier-uniform too.
  const bool xavier_tables =
      model.init_method_xavier_uniform && model.embedding_init_method_std == model.init_method_std;
  list.matrix("embedding.word_embeddings.weight", model.padded_vocab_size, h, model.embedding_init_method_std, use,
              false);
  list.specs().back().init = xavier_tables ? InitRule::kXavierUniform : InitRule::kNormal;
  list.specs().back().decoupled_lr = true;
  if (model.position_embedding == config::PositionEmbedding::kLearnedAbsolute) {
    list.matrix("embedding.position_embeddings.weight", model.max_position_embeddings, h,
                model.embedding_init_method_std, ++use, false);
    list.specs().back().gtp_sharded = false;
    list.specs().back().init = xavier_tables ? InitRule::kXavierPositionTable : InitRule::kPositionTable;
  }
  for (std::int64_t i = 0; i < model.num_layers; ++i) {
    const std::string layer = "decoder.layers." + std::to_string(i) + ".";
    const std::string attention = layer + "self_attention.";
    // Forward order: norm, qkv, q/k norms, proj, norm, fc1, fc2.
    const std::int64_t norm1 = use + 1, qkv = use + 2, head_norms = use + 3, proj = use + 4, norm2 = use + 5,
                       fc1 = use + 6, fc2 = use + 7;
    use += 7;
    if (!fused_norms) list.norm(layer + "input_layernorm.", h, norm1);
    list.matrix(attention + "linear_proj.weight", h, model.query_projection_size(), output_std, proj, true);
    if (model.add_bias_linear) list.vector(attention + "linear_proj.bias", h, InitRule::kZeros, proj);
    if (fused_norms) list.norm(attention + "linear_qkv.layer_norm_", h, norm1);
    list.matrix(attention + "linear_qkv.weight", model.qkv_rows(), h, model.init_method_std, qkv, true);
    if (model.add_bias_linear || model.add_qkv_bias)
      list.vector(attention + "linear_qkv.bias", model.qkv_rows(), InitRule::kZeros, qkv);
    if (model.qk_layernorm) {
      list.norm(attention + "q_layernorm.", model.kv_channels, head_norms);
      list.norm(attention + "k_layernorm.", model.kv_channels, head_norms);
    }
    list.norm(fused_norms ? layer + "mlp.linear_fc1.layer_norm_" : layer + "pre_mlp_layernorm.", h, norm2);
    list.matrix(layer + "mlp.linear_fc1.weight", model.fc1_rows(), h, model.init_method_std, fc1, true);
    if (model.add_bias_linear) list.vector(layer + "mlp.linear_fc1.bias", model.fc1_rows(), InitRule::kZeros, fc1);
    list.matrix(layer + "mlp.linear_fc2.weight", h, model.ffn_hidden_size, output_std, fc2, true);
    if (model.add_bias_linear) list.vector(layer + "mlp.linear_fc2.bias", h, InitRule::kZeros, fc2);
  }
  list.norm("decoder.final_layernorm.", h, ++use);
  if (model.untie_embeddings) {
    list.matrix("output_layer.weight", model.padded_vocab_size, h, model.init_method_std, ++use, false);
    list.specs().back().decoupled_lr = true;
  }
  return std::move(list.specs());
}

}  // namespace pgpt::model

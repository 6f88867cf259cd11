// Which tensors of a Hugging Face model hold which numbers of a model here.
#include <ATen/ATen.h>

#include "pgpt/base/error.h"
#include "pgpt/checkpoint/hugging_face.h"

namespace pgpt::checkpoint {
namespace {

using config::ModelConfig;
using Kind = HfLink::Kind;
using Shape = std::vector<std::int64_t>;

/// Collects links; shapes follow from the kind and the model.
class LinkList {
 public:
  LinkList(const ModelConfig& model, std::int64_t vocab_size) : model_(model), vocab_size_(vocab_size) {}

  void add(Kind kind, const std::string& native, const Shape& shape, const std::vector<std::string>& names) {
    HfLink link{kind, native, shape, names, {}};
    Shape there = shape;
    switch (kind) {
      case Kind::kSame:
        link.shapes = {there};
        break;
      case Kind::kVocabulary:
        there[0] = vocab_size_;
        link.shapes = {there};
        break;
      case Kind::kGateUp:
        there[0] /= 2;
        link.shapes = {there, there};
        break;
      case Kind::kQkv: {
        Shape query = shape;
        query[0] = model_.query_projection_size();
        there[0] = model_.kv_projection_size();
        link.shapes = {query, there, there};
        break;
      }
      case Kind::kTransposed:
        link.shapes = {{shape[1], shape[0]}};
        break;
      case Kind::kFusedQkv:
        link.shapes = {shape.size() == 2 ? Shape{shape[1], shape[0]} : shape};
        break;
    }
    links_.push_back(std::move(link));
  }
  /// A norm: gain, and bias where the model has one.
  void norm(const std::string& native, std::int64_t size, const std::string& there) {
    add(Kind::kSame, native + "weight", {size}, {there + ".weight"});
    if (model_.normalization == config::Normalization::kLayerNorm)
      add(Kind::kSame, native + "bias", {size}, {there + ".bias"});
  }
  [[nodiscard]] std::vector<HfLink>& links() { return links_; }

 private:
  const ModelConfig& model_;
  std::int64_t vocab_size_;
  std::vector<HfLink> links_;
};

void add_gpt2_layer(LinkList& list, const ModelConfig& m, const std::string& layer, const std::string& there,
                    const std::string& norm1, const std::string& norm2) {
  const std::string attention = layer + "self_attention.";
  const std::int64_t h = m.hidden_size;
  list.norm(norm1, h, there + "ln_1");
  list.add(Kind::kFusedQkv, attention + "linear_qkv.weight", {m.qkv_rows(), h}, {there + "attn.c_attn.weight"});
  list.add(Kind::kFusedQkv, attention + "linear_qkv.bias", {m.qkv_rows()}, {there + "attn.c_attn.bias"});
  list.add(Kind::kTransposed, attention + "linear_proj.weight", {h, m.query_projection_size()},
           {there + "attn.c_proj.weight"});
  list.add(Kind::kSame, attention + "linear_proj.bias", {h}, {there + "attn.c_proj.bias"});
  list.norm(norm2, h, there + "ln_2");
  list.add(Kind::kTransposed, layer + "mlp.linear_fc1.weight", {m.fc1_rows(), h}, {there + "mlp.c_fc.weight"});
  list.add(Kind::kSame, layer + "mlp.linear_fc1.bias", {m.fc1_rows()}, {there + "mlp.c_fc.bias"});
  list.add(Kind::kTransposed, layer + "mlp.linear_fc2.weight", {h, m.ffn_hidden_size}, {there + "mlp.c_proj.weight"});
  list.add(Kind::kSame, layer + "mlp.linear_fc2.bias", {h}, {there + "mlp.c_proj.bias"});
}

void add_llama_layer(LinkList& list, const ModelConfig& m, const std::string& layer, const std::string& there,
                     const std::string& norm1, const std::string& norm2) {
  const std::string attention = layer + "self_attention.";
  const std::int64_t h = m.hidden_size;
  const std::string their_attention = there + "self_attn.";
  const std::string their_mlp = there + "mlp.";
  const auto qkv = [&](const std::string& end) {
    return std::vector<std::string>{their_attention + "q_proj." + end, their_attention + "k_proj." + end,
                                    their_attention + "v_proj." + end};
  };
  const auto gate_up = [&](const std::string& end) {
    return std::vector<std::string>{their_mlp + "gate_proj." + end, their_mlp + "up_proj." + end};
  };
  list.norm(norm1, h, there + "input_layernorm");
  list.add(Kind::kQkv, attention + "linear_qkv.weight", {m.qkv_rows(), h}, qkv("weight"));
  if (m.add_qkv_bias) list.add(Kind::kQkv, attention + "linear_qkv.bias", {m.qkv_rows()}, qkv("bias"));
  if (m.qk_layernorm) {
    list.norm(attention + "q_layernorm.", m.kv_channels, their_attention + "q_norm");
    list.norm(attention + "k_layernorm.", m.kv_channels, their_attention + "k_norm");
  }
  list.add(Kind::kSame, attention + "linear_proj.weight", {h, m.query_projection_size()},
           {their_attention + "o_proj.weight"});
  if (m.add_bias_linear) list.add(Kind::kSame, attention + "linear_proj.bias", {h}, {their_attention + "o_proj.bias"});
  list.norm(norm2, h, there + "post_attention_layernorm");
  list.add(Kind::kGateUp, layer + "mlp.linear_fc1.weight", {m.fc1_rows(), h}, gate_up("weight"));
  if (m.add_bias_linear) list.add(Kind::kGateUp, layer + "mlp.linear_fc1.bias", {m.fc1_rows()}, gate_up("bias"));
  list.add(Kind::kSame, layer + "mlp.linear_fc2.weight", {h, m.ffn_hidden_size}, {their_mlp + "down_proj.weight"});
  if (m.add_bias_linear) list.add(Kind::kSame, layer + "mlp.linear_fc2.bias", {h}, {their_mlp + "down_proj.bias"});
}

/// Query, key and value rows of a packed matrix or bias, in the order of heads.
struct Heads {
  at::Tensor query, key, value;
};

Heads split_groups(const at::Tensor& packed, const ModelConfig& m) {
  const std::int64_t r = m.num_attention_heads / m.num_query_groups;
  const at::Tensor groups = packed.reshape({m.num_query_groups, r + 2, m.kv_channels, -1});
  const auto rows = [&](std::int64_t first, std::int64_t count) {
    const at::Tensor part = groups.narrow(1, first, count).reshape({m.num_query_groups * count * m.kv_channels, -1});
    return packed.dim() == 1 ? part.view({-1}) : part;
  };
  return {rows(0, r), rows(r, 1), rows(r + 1, 1)};
}

at::Tensor join_groups(const Heads& heads, const ModelConfig& m) {
  const std::int64_t r = m.num_attention_heads / m.num_query_groups;
  const auto grouped = [&](const at::Tensor& part, std::int64_t count) {
    return part.reshape({m.num_query_groups, count, m.kv_channels, -1});
  };
  const at::Tensor packed = at::cat({grouped(heads.query, r), grouped(heads.key, 1), grouped(heads.value, 1)}, 1);
  return heads.query.dim() == 1 ? packed.reshape({m.qkv_rows()}) : packed.reshape({m.qkv_rows(), -1});
}

}  // namespace

std::vector<HfLink> hf_links(HfFamily family, const ModelConfig& m, std::int64_t vocab_size) {
  const bool fused_norms = m.transformer_impl == config::TransformerImpl::kTransformerEngine;
  const bool gpt2 = family == HfFamily::kGpt2;
  const std::int64_t h = m.hidden_size;
  LinkList list(m, vocab_size);
  list.add(Kind::kVocabulary, "embedding.word_embeddings.weight", {m.padded_vocab_size, h},
           {gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight"});
  if (gpt2)
    list.add(Kind::kSame, "embedding.position_embeddings.weight", {m.max_position_embeddings, h},
             {"transformer.wpe.weight"});
  for (std::int64_t i = 0; i < m.num_layers; ++i) {
    const std::string layer = concat("decoder.layers.", i, ".");
    const std::string norm1 = layer + (fused_norms ? "self_attention.linear_qkv.layer_norm_" : "input_layernorm.");
    const std::string norm2 = layer + (fused_norms ? "mlp.linear_fc1.layer_norm_" : "pre_mlp_layernorm.");
    if (gpt2) {
      add_gpt2_layer(list, m, layer, concat("transformer.h.", i, "."), norm1, norm2);
    } else {
      add_llama_layer(list, m, layer, concat("model.layers.", i, "."), norm1, norm2);
    }
  }
  list.norm("decoder.final_layernorm.", h, gpt2 ? "transformer.ln_f" : "model.norm");
  if (m.untie_embeddings)
    list.add(Kind::kVocabulary, "output_layer.weight", {m.padded_vocab_size, h}, {"lm_head.weight"});
  return std::move(list.links());
}

std::vector<at::Tensor> to_hf(const HfLink& link, const at::Tensor& native, const ModelConfig& model) {
  PGPT_ASSERT(native.sizes().vec() == link.native_shape, link.native);
  switch (link.kind) {
    case Kind::kSame:
      return {native.contiguous()};
    case Kind::kVocabulary:
      return {native.narrow(0, 0, link.shapes[0][0]).contiguous()};
    case Kind::kGateUp: {
      const std::int64_t half = native.size(0) / 2;
      return {native.narrow(0, 0, half).contiguous(), native.narrow(0, half, half).contiguous()};
    }
    case Kind::kQkv: {
      const Heads heads = split_groups(native, model);
      return {heads.query.contiguous(), heads.key.contiguous(), heads.value.contiguous()};
    }
    case Kind::kTransposed:
      return {native.t().contiguous()};
    case Kind::kFusedQkv: {
      const Heads heads = split_groups(native, model);
      const at::Tensor rows = at::cat({heads.query, heads.key, heads.value}, 0);
      return {rows.dim() == 2 ? rows.t().contiguous() : rows};
    }
  }
  throw std::logic_error("unknown kind of link");
}

at::Tensor from_hf(const HfLink& link, const std::vector<at::Tensor>& parts, const ModelConfig& model) {
  PGPT_ASSERT(parts.size() == link.shapes.size(), link.native);
  switch (link.kind) {
    case Kind::kSame:
      return parts[0].contiguous();
    case Kind::kVocabulary: {
      at::Tensor whole = at::zeros(link.native_shape, parts[0].options());
      whole.narrow(0, 0, parts[0].size(0)).copy_(parts[0]);
      return whole;
    }
    case Kind::kGateUp:
      return at::cat({parts[0], parts[1]}, 0);
    case Kind::kQkv:
      return join_groups({parts[0], parts[1], parts[2]}, model).contiguous();
    case Kind::kTransposed:
      return parts[0].t().contiguous();
    case Kind::kFusedQkv: {
      const at::Tensor rows = parts[0].dim() == 2 ? parts[0].t() : parts[0];
      const std::int64_t n = model.query_projection_size();
      return join_groups({rows.narrow(0, 0, n), rows.narrow(0, n, n), rows.narrow(0, 2 * n, n)}, model).contiguous();
    }
  }
  throw std::logic_error("unknown kind of link");
}

}  // namespace pgpt::checkpoint

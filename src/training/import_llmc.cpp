// GPT-2 model files of llm.c: 256 integers, then the tensors of all layers, kind by kind.
#include <ATen/ATen.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "conversion.h"
#include "pgpt/base/error.h"
#include "pgpt/checkpoint/hugging_face.h"
#include "pgpt/config/parse.h"

namespace pgpt::training {
namespace {

namespace fs = std::filesystem;

constexpr std::int32_t kMagic = 20240326;
constexpr std::int32_t kFloat32 = 3, kBfloat16 = 5;  // both with padded vocabulary rows
constexpr std::int64_t kHeaderBytes = 256 * sizeof(std::int32_t);

/// Consecutive stretches of the file.
class Layout {
 public:
  Layout(fs::path path, at::ScalarType dtype) : path_(std::move(path)), dtype_(dtype) {}

  /// The next `layers` tensors of one kind; the result reads that of one layer.
  std::function<at::Tensor(std::int64_t)> next(std::int64_t layers, const std::vector<std::int64_t>& shape) {
    std::int64_t elements = 1;
    for (const std::int64_t n : shape) elements *= n;
    const std::int64_t bytes = elements * static_cast<std::int64_t>(c10::elementSize(dtype_));
    const std::int64_t begin = position_;
    position_ += layers * bytes;
    return [path = path_, dtype = dtype_, shape, begin, bytes](std::int64_t layer) {
      at::Tensor values = at::empty(shape, dtype);
      std::ifstream in(path, std::ios::binary);
      in.seekg(begin + layer * bytes);
      in.read(static_cast<char*>(values.data_ptr()), bytes);
      PGPT_CHECK(DataError, in.good(), "cannot read ", path.string(), ": ", std::strerror(errno));
      return values;
    };
  }
  [[nodiscard]] std::int64_t end() const { return position_; }

 private:
  fs::path path_;
  at::ScalarType dtype_;
  std::int64_t position_ = kHeaderBytes;
};

}  // namespace

ImportedModel open_llmc(const fs::path& path, std::int64_t divisor, config::TransformerImpl implementation) {
  std::array<std::int32_t, 256> header{};
  std::ifstream in(path, std::ios::binary);
  in.read(reinterpret_cast<char*>(header.data()), sizeof header);
  PGPT_CHECK(DataError, in.good(), "cannot read ", path.string(), " as an llm.c model: it has no header of ",
             kHeaderBytes, " bytes");
  PGPT_CHECK(DataError, header[0] == kMagic, path.string(), " is no llm.c model: it starts with ", header[0], ", not ",
             kMagic);
  PGPT_CHECK(DataError, header[1] == kFloat32 || header[1] == kBfloat16, path.string(),
             " is an llm.c model of version ", header[1],
             "; versions 3 (fp32) and 5 (bf16) are read, write it again with a current llm.c");
  ImportedModel result{{}, header[1] == kFloat32 ? at::kFloat : at::kBFloat16, {}};
  config::ModelConfig& m = result.model;
  m.max_position_embeddings = header[2];
  m.vocab_size = header[3];
  m.num_layers = header[4];
  m.num_attention_heads = m.num_query_groups = header[5];
  m.hidden_size = header[6];
  const std::int64_t stored_rows = header[7];
  PGPT_CHECK(DataError,
             m.max_position_embeddings > 0 && m.vocab_size > 0 && m.num_layers > 0 && m.num_attention_heads > 0 &&
                 m.hidden_size > 0 && m.hidden_size % m.num_attention_heads == 0 && stored_rows >= m.vocab_size,
             path.string(), " is damaged: its header says ", m.num_layers, " layers, ", m.num_attention_heads,
             " heads, hidden size ", m.hidden_size, ", vocabulary ", m.vocab_size, " in ", stored_rows, " rows");
  m.ffn_hidden_size = 4 * m.hidden_size;
  m.kv_channels = m.hidden_size / m.num_attention_heads;
  m.attention_dropout = m.hidden_dropout = 0;  // llm.c has none
  m.transformer_impl = implementation;
  m.padded_vocab_size = config::padded_vocab_size(m.vocab_size, divisor, 1);

  const std::int64_t h = m.hidden_size;
  const std::int64_t f = m.ffn_hidden_size;
  const std::int64_t layers = m.num_layers;
  Layout layout(path, result.dtype);
  const auto words = layout.next(1, {stored_rows, h});
  const auto positions = layout.next(1, {m.max_position_embeddings, h});
  const auto norm1_weight = layout.next(layers, {h});
  const auto norm1_bias = layout.next(layers, {h});
  const auto qkv_weight = layout.next(layers, {3, h, h});
  const auto qkv_bias = layout.next(layers, {3, h});
  const auto proj_weight = layout.next(layers, {h, h});
  const auto proj_bias = layout.next(layers, {h});
  const auto norm2_weight = layout.next(layers, {h});
  const auto norm2_bias = layout.next(layers, {h});
  const auto fc1_weight = layout.next(layers, {f, h});
  const auto fc1_bias = layout.next(layers, {f});
  const auto fc2_weight = layout.next(layers, {h, f});
  const auto fc2_bias = layout.next(layers, {h});
  const auto final_weight = layout.next(1, {h});
  const auto final_bias = layout.next(1, {h});
  in.seekg(0, std::ios::end);
  const auto size = static_cast<std::int64_t>(in.tellg());
  PGPT_CHECK(DataError, size == layout.end(), path.string(), " has ", size, " bytes, by its header it should have ",
             layout.end(), "; it is truncated or of another model");

  const auto add = [&](const std::string& name, std::vector<std::int64_t> shape,
                       const std::function<at::Tensor(std::int64_t)>& read, std::int64_t layer) {
    result.tensors.push_back({name, std::move(shape), [read, layer] { return read(layer); }});
  };
  const auto add_qkv = [&](const std::string& name, std::vector<std::int64_t> shape,
                           const std::function<at::Tensor(std::int64_t)>& read, std::int64_t layer) {
    checkpoint::HfLink link;
    link.kind = checkpoint::HfLink::Kind::kQkv;
    link.native = name;
    link.shapes.resize(3);
    result.tensors.push_back({name, std::move(shape), [read, layer, link, m] {
                                const at::Tensor stacked = read(layer);
                                return checkpoint::from_hf(link, {stacked[0], stacked[1], stacked[2]}, m);
                              }});
  };
  result.tensors.push_back(
      {"embedding.word_embeddings.weight", {m.padded_vocab_size, h}, [words, m] {
         at::Tensor rows = words(0).narrow(0, 0, m.vocab_size);
         return at::cat({rows, at::zeros({m.padded_vocab_size - m.vocab_size, m.hidden_size}, rows.options())}, 0);
       }});
  add("embedding.position_embeddings.weight", {m.max_position_embeddings, h}, positions, 0);
  const bool fused_norms = implementation == config::TransformerImpl::kTransformerEngine;
  for (std::int64_t i = 0; i < layers; ++i) {
    const std::string layer = concat("decoder.layers.", i, ".");
    const std::string attention = layer + "self_attention.";
    const std::string norm1 = fused_norms ? attention + "linear_qkv.layer_norm_" : layer + "input_layernorm.";
    const std::string norm2 = fused_norms ? layer + "mlp.linear_fc1.layer_norm_" : layer + "pre_mlp_layernorm.";
    add(norm1 + "weight", {h}, norm1_weight, i);
    add(norm1 + "bias", {h}, norm1_bias, i);
    add_qkv(attention + "linear_qkv.weight", {3 * h, h}, qkv_weight, i);
    add_qkv(attention + "linear_qkv.bias", {3 * h}, qkv_bias, i);
    add(attention + "linear_proj.weight", {h, h}, proj_weight, i);
    add(attention + "linear_proj.bias", {h}, proj_bias, i);
    add(norm2 + "weight", {h}, norm2_weight, i);
    add(norm2 + "bias", {h}, norm2_bias, i);
    add(layer + "mlp.linear_fc1.weight", {f, h}, fc1_weight, i);
    add(layer + "mlp.linear_fc1.bias", {f}, fc1_bias, i);
    add(layer + "mlp.linear_fc2.weight", {h, f}, fc2_weight, i);
    add(layer + "mlp.linear_fc2.bias", {h}, fc2_bias, i);
  }
  add("decoder.final_layernorm.weight", {h}, final_weight, 0);
  add("decoder.final_layernorm.bias", {h}, final_bias, 0);
  return result;
}

}  // namespace pgpt::training

#include "pgpt/checkpoint/architecture.h"

#include <algorithm>
#include <charconv>
#include <set>

#include "pgpt/base/error.h"
#include "pgpt/config/option_table.h"
#include "pgpt/config/parse.h"

namespace pgpt::checkpoint {

using config::Activation;
using config::ModelConfig;
using config::Normalization;
using config::PositionEmbedding;

namespace {

/// Reads values out of an argument dump.
class Arguments {
 public:
  Arguments(const std::map<std::string, std::string>& values, const std::string& where)
      : values_(values), where_(where) {}

  [[nodiscard]] const std::string& text(const std::string& name) const {
    const auto found = values_.find(name);
    PGPT_CHECK(DataError, found != values_.end(), where_, " does not say ", name, ", so its architecture is unknown");
    return found->second;
  }
  [[nodiscard]] bool flag(const std::string& name) const {
    const std::string& value = text(name);
    if (value != "True" && value != "False") fail(name, "True or False");
    return value == "True";
  }
  [[nodiscard]] std::int64_t integer(const std::string& name) const {
    return number<std::int64_t>(name, "a whole number");
  }
  [[nodiscard]] double real(const std::string& name) const { return number<double>(name, "a number"); }
  [[nodiscard]] bool absent(const std::string& name) const { return text(name) == "None"; }
  [[nodiscard]] bool contains(const std::string& name) const { return values_.count(name) != 0; }

 private:
  template <class Number>
  [[nodiscard]] Number number(const std::string& name, const char* kind) const {
    const std::string& value = text(name);
    Number result{};
    const auto [end, status] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (status != std::errc() || end != value.data() + value.size()) fail(name, kind);
    return result;
  }
  [[noreturn]] void fail(const std::string& name, const char* kind) const {
    throw DataError(concat(where_, " says ", name, " = '", text(name), "', which is not ", kind));
  }

  const std::map<std::string, std::string>& values_;
  const std::string& where_;
};

const char* position_name(PositionEmbedding kind) {
  switch (kind) {
    case PositionEmbedding::kRope:
      return "rope";
    case PositionEmbedding::kNone:
      return "none";
    case PositionEmbedding::kLearnedAbsolute:
      return "learned_absolute";
  }
  return "?";
}

}  // namespace

std::string number_text(double value) {
  char text[32];
  const auto [end, status] = std::to_chars(text, text + sizeof text, value);
  PGPT_ASSERT(status == std::errc());
  return {text, end};
}

std::string Trait::text() const {
  if (!is_switch) return option + " " + value;
  return given ? option : "no " + option;
}

std::vector<Trait> traits(const ModelConfig& m) {
  std::vector<Trait> list;
  const auto value = [&](const char* option, const auto& v) { list.push_back({option, concat(v), false, true}); };
  const auto toggle = [&](const char* option, bool given) { list.push_back({option, "", true, given}); };
  value("--num-layers", m.num_layers);
  value("--hidden-size", m.hidden_size);
  value("--ffn-hidden-size", m.ffn_hidden_size);
  value("--num-attention-heads", m.num_attention_heads);
  const bool grouped = m.num_query_groups != m.num_attention_heads;
  toggle("--group-query-attention", grouped);
  if (grouped) value("--num-query-groups", m.num_query_groups);
  value("--kv-channels", m.kv_channels);
  value("--position-embedding-type", position_name(m.position_embedding));
  if (m.has_rope()) {
    value("--rotary-base", m.rotary_base);
    value("--rotary-percent", number_text(m.rotary_percent));
    toggle("--rotary-interleaved", m.rotary_interleaved);
    toggle("--use-rope-scaling", m.rope_scaling);
    if (m.rotary_seq_len_interpolation_factor > 0)
      value("--rotary-seq-len-interpolation-factor", m.rotary_seq_len_interpolation_factor);
  }
  value("--normalization", m.normalization == Normalization::kRMSNorm ? "RMSNorm" : "LayerNorm");
  value("--norm-epsilon", number_text(m.norm_epsilon));
  toggle("--apply-layernorm-1p", m.zero_centered_gamma);
  toggle("--disable-bias-linear", !m.add_bias_linear);
  toggle("--add-qkv-bias", m.add_qkv_bias && !m.add_bias_linear);
  toggle("--untie-embeddings-and-output-weights", m.untie_embeddings);
  toggle("--qk-layernorm", m.qk_layernorm);
  toggle("--swiglu", m.activation == Activation::kSwiglu);
  toggle("--squared-relu", m.activation == Activation::kSquaredRelu);
  toggle("--quick-geglu", m.activation == Activation::kQuickGeglu);
  // Where biases are off the exact form is used anyway.
  const bool exact = m.activation == Activation::kGeluErf || m.activation == Activation::kSquaredRelu;
  toggle("--no-bias-gelu-fusion", exact && m.add_bias_linear);
  value("--vocab-size", m.vocab_size);
  return list;
}

std::vector<std::string> architecture_flags(const ModelConfig& model) {
  std::vector<std::string> words;
  for (const Trait& trait : traits(model)) {
    if (trait.is_switch && !trait.given) continue;
    words.push_back(trait.option);
    if (!trait.is_switch) words.push_back(trait.value);
  }
  words.insert(words.end(), {"--max-position-embeddings", std::to_string(model.max_position_embeddings)});
  return words;
}

void check_same_architecture(const ModelConfig& mine, const ModelConfig& theirs, const std::string& where) {
  const std::vector<Trait> a = traits(mine);
  for (const Trait& wanted : traits(theirs)) {
    const auto found =
        std::find_if(a.begin(), a.end(), [&](const Trait& trait) { return trait.option == wanted.option; });
    const std::string has = found == a.end() ? "no " + wanted.option : found->text();
    PGPT_CHECK(ConfigError, found != a.end() && *found == wanted, "this run has ", has, ", ", where, " has ",
               wanted.text(), "; give the same");
  }
  for (const Trait& trait : a) {
    const std::vector<Trait> b = traits(theirs);
    const bool known =
        std::any_of(b.begin(), b.end(), [&](const Trait& other) { return other.option == trait.option; });
    PGPT_CHECK(ConfigError, known, "this run has ", trait.text(), ", ", where, " has no ", trait.option,
               "; give the same");
  }
}

ModelConfig model_of_arguments(const std::map<std::string, std::string>& values, const std::string& where) {
  const Arguments a(values, where);
  PGPT_CHECK(DataError, !a.contains("num_experts") || a.absent("num_experts"), where,
             " is a mixture-of-experts model, which is not converted");
  ModelConfig m;
  m.num_layers = a.integer("num_layers");
  m.hidden_size = a.integer("hidden_size");
  m.ffn_hidden_size = a.integer("ffn_hidden_size");
  m.num_attention_heads = a.integer("num_attention_heads");
  m.num_query_groups = a.flag("group_query_attention") ? a.integer("num_query_groups") : m.num_attention_heads;
  m.kv_channels = a.integer("kv_channels");
  m.max_position_embeddings = a.integer("max_position_embeddings");
  m.vocab_size = a.integer("vocab_size");
  m.padded_vocab_size = a.integer("padded_vocab_size");
  const std::string& position = a.text("position_embedding_type");
  m.position_embedding = position == "rope"   ? PositionEmbedding::kRope
                         : position == "none" ? PositionEmbedding::kNone
                                              : PositionEmbedding::kLearnedAbsolute;
  m.rotary_base = a.integer("rotary_base");
  m.rotary_percent = a.real("rotary_percent");
  m.rotary_interleaved = a.flag("rotary_interleaved");
  m.rotary_seq_len_interpolation_factor =
      a.absent("rotary_seq_len_interpolation_factor") ? 0 : a.integer("rotary_seq_len_interpolation_factor");
  m.rope_scaling = a.flag("use_rope_scaling");
  m.normalization = a.text("normalization") == "RMSNorm" ? Normalization::kRMSNorm : Normalization::kLayerNorm;
  m.norm_epsilon = a.real("norm_epsilon");
  m.zero_centered_gamma = a.flag("apply_layernorm_1p");
  m.add_bias_linear = a.flag("add_bias_linear");
  m.add_qkv_bias = m.add_bias_linear || a.flag("add_qkv_bias");
  m.untie_embeddings = a.flag("untie_embeddings_and_output_weights");
  m.qk_layernorm = a.flag("qk_layernorm");
  m.activation = a.flag("swiglu")                                  ? Activation::kSwiglu
                 : a.flag("squared_relu")                          ? Activation::kSquaredRelu
                 : a.flag("quick_geglu")                           ? Activation::kQuickGeglu
                 : m.add_bias_linear && a.flag("bias_gelu_fusion") ? Activation::kGeluTanh
                                                                   : Activation::kGeluErf;
  m.transformer_impl = a.text("transformer_impl") == "local" ? config::TransformerImpl::kLocal
                                                             : config::TransformerImpl::kTransformerEngine;
  m.attention_dropout = a.real("attention_dropout");
  m.hidden_dropout = a.real("hidden_dropout");
  return m;
}

std::map<std::string, std::string> arguments_of_model(const ModelConfig& model) {
  std::vector<std::string> words = architecture_flags(model);
  const bool local = model.transformer_impl == config::TransformerImpl::kLocal;
  // The rest completes a command line that the option table accepts; nothing of it is kept.
  words.insert(words.end(), {"--padded-vocab-size",
                             std::to_string(model.padded_vocab_size),
                             "--transformer-impl",
                             local ? "local" : "transformer_engine",
                             "--attention-dropout",
                             number_text(model.attention_dropout),
                             "--hidden-dropout",
                             number_text(model.hidden_dropout),
                             "--seq-length",
                             std::to_string(model.max_position_embeddings),
                             "--micro-batch-size",
                             "1",
                             "--train-iters",
                             "1",
                             "--lr",
                             "1e-4",
                             "--mock-data",
                             "--tokenizer-type",
                             "NullTokenizer",
                             "--distributed-backend",
                             "gloo"});
  const config::ParsedCommand command = config::parse_command_line(words, {});
  std::map<std::string, std::string> all(command.config.arguments.begin(), command.config.arguments.end());
  std::map<std::string, std::string> kept;
  for (const config::Option& option : config::option_table()) {
    if (!option.imported) continue;
    PGPT_ASSERT(all.count(option.destination) == 1, option.destination);
    kept[option.destination] = all[option.destination];
  }
  return kept;
}

}  // namespace pgpt::checkpoint

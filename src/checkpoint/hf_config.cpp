// config.json of a Hugging Face model, both ways.
#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "pgpt/base/error.h"
#include "pgpt/checkpoint/architecture.h"
#include "pgpt/checkpoint/hugging_face.h"

namespace pgpt::checkpoint {
namespace {

namespace fs = std::filesystem;
using config::Activation;
using config::ModelConfig;
using config::Normalization;
using config::PositionEmbedding;
using Json = nlohmann::ordered_json;

struct Family {
  HfFamily family;
  const char* name;
  const char* architecture;
};
constexpr std::array<Family, 5> kFamilies = {{{HfFamily::kGpt2, "gpt2", "GPT2LMHeadModel"},
                                              {HfFamily::kLlama, "llama", "LlamaForCausalLM"},
                                              {HfFamily::kMistral, "mistral", "MistralForCausalLM"},
                                              {HfFamily::kQwen2, "qwen2", "Qwen2ForCausalLM"},
                                              {HfFamily::kQwen3, "qwen3", "Qwen3ForCausalLM"}}};

const Family& facts(HfFamily family) {
  return *std::find_if(kFamilies.begin(), kFamilies.end(), [&](const Family& f) { return f.family == family; });
}

// The frequency scaling of --use-rope-scaling; its factor cannot be chosen.
constexpr double kScalingFactor = 8, kLowFrequency = 1, kHighFrequency = 4;
constexpr std::int64_t kOriginalContext = 8192;

/// Reads config.json; what is absent or null takes the default that the transformers library gives it.
class Reader {
 public:
  Reader(Json json, std::string path) : json_(std::move(json)), path_(std::move(path)) {}

  [[nodiscard]] bool has(const std::string& key) const { return json_.contains(key) && !json_[key].is_null(); }
  template <class T>
  [[nodiscard]] T get(const std::string& key) const {
    PGPT_CHECK(DataError, has(key), path_, " has no ", key);
    return convert<T>(key);
  }
  template <class T>
  [[nodiscard]] T get(const std::string& key, T otherwise) const {
    return has(key) ? convert<T>(key) : otherwise;
  }
  /// Throws DataError unless a switch has the value that the model here implies.
  void require(const std::string& key, bool value, bool otherwise) const {
    PGPT_CHECK(DataError, get<bool>(key, otherwise) == value, path_, " has ", key, " ", value ? "false" : "true",
               ", which has no counterpart here");
  }
  [[nodiscard]] Reader part(const std::string& key) const {
    PGPT_CHECK(DataError, json_[key].is_object(), path_, ": ", key, " is no object");
    return {json_[key], path_ + ": " + key};
  }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  template <class T>
  [[nodiscard]] T convert(const std::string& key) const {
    try {
      return json_[key].get<T>();
    } catch (const Json::exception&) {
      throw DataError(concat(path_, ": ", key, " is ", json_[key].dump(), ", which is of the wrong type"));
    }
  }
  Json json_;
  std::string path_;
};

std::int64_t whole(const Reader& reader, const std::string& key, double value, const char* option) {
  PGPT_CHECK(DataError, value == std::floor(value) && value > 0, reader.path(), " has ", key, " ", value, "; ", option,
             " takes whole numbers only");
  return static_cast<std::int64_t>(value);
}

void read_rope(const Reader& reader, ModelConfig& m) {
  m.position_embedding = PositionEmbedding::kRope;
  double base = reader.get<double>("rope_theta", 10000.0);
  PGPT_CHECK(DataError, reader.get<double>("partial_rotary_factor", 1.0) == 1.0, reader.path(),
             " rotates a part of each head only (partial_rotary_factor), which has no counterpart in these families");
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    if (!reader.has(key)) continue;
    const Reader rope = reader.part(key);
    base = rope.get<double>("rope_theta", base);
    PGPT_CHECK(DataError, rope.get<double>("partial_rotary_factor", 1.0) == 1.0, rope.path(),
               " rotates a part of each head only (partial_rotary_factor), which has no counterpart in these families");
    const auto type = rope.get<std::string>("rope_type", rope.get<std::string>("type", "default"));
    if (type == "linear") {
      m.rotary_seq_len_interpolation_factor =
          whole(rope, "factor", rope.get<double>("factor"), "--rotary-seq-len-interpolation-factor");
    } else if (type == "llama3") {
      const bool same = rope.get<double>("factor") == kScalingFactor &&
                        rope.get<double>("low_freq_factor") == kLowFrequency &&
                        rope.get<double>("high_freq_factor") == kHighFrequency &&
                        rope.get<std::int64_t>("original_max_position_embeddings") == kOriginalContext;
      PGPT_CHECK(DataError, same, rope.path(), " has factor ", rope.get<double>("factor"), ", low_freq_factor ",
                 rope.get<double>("low_freq_factor"), ", high_freq_factor ", rope.get<double>("high_freq_factor"),
                 ", original_max_position_embeddings ", rope.get<std::int64_t>("original_max_position_embeddings"),
                 "; --use-rope-scaling has 8, 1, 4 and 8192 only");
      m.rope_scaling = true;
    } else {
      PGPT_CHECK(DataError, type == "default", rope.path(), " has rope_type ", type,
                 "; only default, linear and llama3 have a counterpart here");
    }
    break;
  }
  m.rotary_base = whole(reader, "rope_theta", base, "--rotary-base");
}

void read_gpt2(const Reader& reader, ModelConfig& m) {
  m.num_layers = reader.get<std::int64_t>("n_layer");
  m.hidden_size = reader.get<std::int64_t>("n_embd");
  m.num_attention_heads = reader.get<std::int64_t>("n_head");
  m.num_query_groups = m.num_attention_heads;
  m.max_position_embeddings = reader.get<std::int64_t>("n_positions");
  m.ffn_hidden_size = reader.get<std::int64_t>("n_inner", 4 * m.hidden_size);
  m.norm_epsilon = reader.get<double>("layer_norm_epsilon", 1e-5);
  m.untie_embeddings = !reader.get<bool>("tie_word_embeddings", true);
  const auto activation = reader.get<std::string>("activation_function", "gelu_new");
  PGPT_CHECK(
      DataError,
      activation == "gelu_new" || activation == "gelu_pytorch_tanh" || activation == "gelu" || activation == "relu2",
      reader.path(), " has activation_function ", activation,
      "; only gelu_new, gelu_pytorch_tanh, gelu and relu2 have a counterpart here");
  m.activation = activation == "gelu"    ? Activation::kGeluErf
                 : activation == "relu2" ? Activation::kSquaredRelu
                                         : Activation::kGeluTanh;
  reader.require("scale_attn_weights", true, true);
  reader.require("scale_attn_by_inverse_layer_idx", false, false);
  reader.require("add_cross_attention", false, false);
  m.attention_dropout = reader.get<double>("attn_pdrop", 0.1);
  m.hidden_dropout = reader.get<double>("resid_pdrop", 0.1);
}

void read_llama(const Reader& reader, HfConfig& result) {
  ModelConfig& m = result.model;
  m.num_layers = reader.get<std::int64_t>("num_hidden_layers");
  m.hidden_size = reader.get<std::int64_t>("hidden_size");
  m.ffn_hidden_size = reader.get<std::int64_t>("intermediate_size");
  m.num_attention_heads = reader.get<std::int64_t>("num_attention_heads");
  if (result.family != HfFamily::kLlama)
    (void)reader.get<std::int64_t>("num_key_value_heads");  // their default is no safe guess
  m.num_query_groups = reader.get<std::int64_t>("num_key_value_heads", m.num_attention_heads);
  m.max_position_embeddings = reader.get<std::int64_t>("max_position_embeddings");
  m.norm_epsilon = reader.get<double>("rms_norm_eps", 1e-6);
  m.untie_embeddings = !reader.get<bool>("tie_word_embeddings", false);
  m.normalization = Normalization::kRMSNorm;
  m.activation = Activation::kSwiglu;
  const auto activation = reader.get<std::string>("hidden_act", "silu");
  PGPT_CHECK(DataError, activation == "silu" || activation == "swish", reader.path(), " has hidden_act ", activation,
             "; only silu has a counterpart here (--swiglu)");
  if (result.family == HfFamily::kQwen3) (void)reader.get<std::int64_t>("head_dim");
  const bool attention_bias = reader.get<bool>("attention_bias", false);
  const bool mlp_bias = reader.get<bool>("mlp_bias", false);
  const bool all_biases = result.family == HfFamily::kLlama && attention_bias && mlp_bias;
  PGPT_CHECK(DataError, all_biases || (!attention_bias && !mlp_bias), reader.path(), " has attention_bias ",
             attention_bias ? "true" : "false", " and mlp_bias ", mlp_bias ? "true" : "false",
             ", which has no counterpart here: biases are on everywhere, on queries, keys and values "
             "of Qwen2, or off");
  m.add_bias_linear = all_biases;
  m.add_qkv_bias = all_biases || result.family == HfFamily::kQwen2;
  m.qk_layernorm = result.family == HfFamily::kQwen3;
  m.attention_dropout = reader.get<double>("attention_dropout", 0.0);
  m.hidden_dropout = 0;
  read_rope(reader, m);
  const bool qwen = result.family == HfFamily::kQwen2 || result.family == HfFamily::kQwen3;
  if (result.family == HfFamily::kMistral || (qwen && reader.get<bool>("use_sliding_window", false))) {
    if (reader.has("sliding_window")) result.sliding_window = reader.get<std::int64_t>("sliding_window");
  }
}

Json optional_json(const std::optional<std::int64_t>& value) { return value ? Json(*value) : Json(); }

std::string torch_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kFloat:
      return "float32";
    default:
      throw std::logic_error("no such weights");
  }
}

/// Why a model has no counterpart in GPT-2; empty if it has.
std::string not_gpt2(const ModelConfig& m) {
  if (m.position_embedding != PositionEmbedding::kLearnedAbsolute)
    return "GPT-2 has learned positions (--position-embedding-type learned_absolute)";
  if (m.normalization != Normalization::kLayerNorm) return "GPT-2 has --normalization LayerNorm";
  if (!m.add_bias_linear) return "GPT-2 has biases in every linear layer, this model has --disable-bias-linear";
  if (m.gated()) return "GPT-2 has no gated MLP (--swiglu, --quick-geglu)";
  if (m.num_query_groups != m.num_attention_heads) return "GPT-2 has no --group-query-attention";
  if (m.query_projection_size() != m.hidden_size)
    return "GPT-2 has heads of --hidden-size / --num-attention-heads channels, not --kv-channels";
  if (m.qk_layernorm) return "GPT-2 has no --qk-layernorm";
  return "";
}

/// Why a model has no counterpart in the Llama family (Llama, Mistral, Qwen2, Qwen3); empty if it has.
std::string not_llama(const ModelConfig& m) {
  if (!m.has_rope()) return "Llama, Mistral and Qwen have --position-embedding-type rope";
  if (m.rotary_percent != 1.0) return "Llama, Mistral and Qwen rotate whole heads (--rotary-percent 1.0)";
  if (m.rotary_interleaved) return "Llama, Mistral and Qwen rotate halves, not --rotary-interleaved";
  if (m.rope_scaling && m.rotary_seq_len_interpolation_factor > 0) {
    return "config.json has one kind of position scaling, not --use-rope-scaling and "
           "--rotary-seq-len-interpolation-factor together";
  }
  if (m.normalization != Normalization::kRMSNorm) return "Llama, Mistral and Qwen have --normalization RMSNorm";
  if (m.activation != Activation::kSwiglu) return "Llama, Mistral and Qwen have --swiglu";
  return "";
}

std::string not_family(HfFamily family, const ModelConfig& m) {
  if (m.zero_centered_gamma) return "none of the families has --apply-layernorm-1p";
  if (family == HfFamily::kGpt2) return not_gpt2(m);
  if (std::string reason = not_llama(m); !reason.empty()) return reason;
  const bool qwen2 = family == HfFamily::kQwen2;
  const bool qwen3 = family == HfFamily::kQwen3;
  if (m.qk_layernorm != qwen3) return qwen3 ? "Qwen3 has --qk-layernorm" : "only Qwen3 has --qk-layernorm";
  if (qwen2) return m.add_qkv_bias && !m.add_bias_linear ? "" : "Qwen2 has --disable-bias-linear --add-qkv-bias";
  if (family == HfFamily::kLlama) {
    if (m.hidden_size % m.num_attention_heads != 0)
      return "Llama needs a --hidden-size that is a multiple of --num-attention-heads";
    return m.add_qkv_bias == m.add_bias_linear ? ""
                                               : "Llama has biases everywhere or nowhere, not --add-qkv-bias alone";
  }
  return m.add_qkv_bias ? concat(facts(family).name, " has no biases (--disable-bias-linear without --add-qkv-bias)")
                        : "";
}

}  // namespace

std::string family_name(HfFamily family) { return facts(family).name; }

HfFamily family_named(const std::string& name, const std::string& where) {
  for (const Family& family : kFamilies) {
    if (name == family.name) return family.family;
  }
  throw ConfigError(
      concat(where, " ", name, " has no counterpart here; known are gpt2, llama, mistral, qwen2 and qwen3"));
}

HfConfig read_hf_config(const fs::path& folder) {
  const std::string path = (folder / "config.json").string();
  std::ifstream in(path);
  PGPT_CHECK(DataError, in.good(), "cannot read ", path,
             "; give the folder of a Hugging Face model, with config.json and model.safetensors");
  const Json json = Json::parse(in, nullptr, false);
  PGPT_CHECK(DataError, json.is_object(), path, " is no JSON object");
  const Reader reader(json, path);
  PGPT_CHECK(DataError, !reader.has("quantization_config"), path,
             " has a quantization_config; quantised weights cannot be trained, give the "
             "original model");
  HfConfig result;
  result.family = family_named(reader.get<std::string>("model_type"), path + ": model_type");
  ModelConfig& m = result.model;
  m.vocab_size = m.padded_vocab_size = reader.get<std::int64_t>("vocab_size");
  if (result.family == HfFamily::kGpt2) {
    read_gpt2(reader, m);
  } else {
    read_llama(reader, result);
  }
  PGPT_CHECK(DataError,
             m.num_layers > 0 && m.hidden_size > 0 && m.num_attention_heads > 0 && m.num_query_groups > 0 &&
                 m.ffn_hidden_size > 0 && m.vocab_size > 0 && m.num_attention_heads % m.num_query_groups == 0,
             path, ": sizes must be above 0, and the number of heads a multiple of the number of key and value heads");
  PGPT_CHECK(DataError, reader.has("head_dim") || m.hidden_size % m.num_attention_heads == 0, path, " has hidden size ",
             m.hidden_size, ", which ", m.num_attention_heads, " heads do not divide");
  m.kv_channels = reader.get<std::int64_t>("head_dim", m.hidden_size / m.num_attention_heads);
  return result;
}

HfFamily choose_family(const ModelConfig& model, const std::string& wanted) {
  if (!wanted.empty()) {
    const HfFamily family = family_named(wanted, "--architecture");
    const std::string reason = not_family(family, model);
    PGPT_CHECK(ConfigError, reason.empty(), "--architecture ", wanted, " does not fit this model: ", reason);
    return family;
  }
  for (const Family& family : kFamilies) {
    if (not_family(family.family, model).empty()) return family.family;
  }
  // The reason of the nearest relative.
  const HfFamily nearest = !model.has_rope()    ? HfFamily::kGpt2
                           : model.qk_layernorm ? HfFamily::kQwen3
                                                : HfFamily::kLlama;
  throw ConfigError(
      concat("this model has no counterpart among gpt2, llama, mistral, qwen2 and qwen3 of Hugging Face: ",
             not_family(nearest, model)));
}

std::string hf_config_text(HfFamily family, const ModelConfig& m, std::int64_t vocab_size, at::ScalarType dtype,
                           const SpecialTokens& tokens) {
  Json json = {
      {"architectures", {facts(family).architecture}}, {"model_type", facts(family).name}, {"vocab_size", vocab_size}};
  if (family == HfFamily::kGpt2) {
    json["n_positions"] = m.max_position_embeddings;
    json["n_embd"] = m.hidden_size;
    json["n_layer"] = m.num_layers;
    json["n_head"] = m.num_attention_heads;
    json["n_inner"] = m.ffn_hidden_size;
    json["activation_function"] = m.activation == Activation::kGeluTanh  ? "gelu_new"
                                  : m.activation == Activation::kGeluErf ? "gelu"
                                                                         : "relu2";
    json["layer_norm_epsilon"] = m.norm_epsilon;
    json["attn_pdrop"] = m.attention_dropout;
    json["resid_pdrop"] = m.hidden_dropout;
    json["embd_pdrop"] = m.hidden_dropout;
  } else {
    json["hidden_size"] = m.hidden_size;
    json["intermediate_size"] = m.ffn_hidden_size;
    json["num_hidden_layers"] = m.num_layers;
    json["num_attention_heads"] = m.num_attention_heads;
    json["num_key_value_heads"] = m.num_query_groups;
    json["head_dim"] = m.kv_channels;
    json["hidden_act"] = "silu";
    json["max_position_embeddings"] = m.max_position_embeddings;
    json["rms_norm_eps"] = m.norm_epsilon;
    json["attention_dropout"] = m.attention_dropout;
    json["rope_theta"] = static_cast<double>(m.rotary_base);
    Json scaling;
    if (m.rope_scaling) {
      scaling = {{"rope_type", "llama3"},
                 {"factor", kScalingFactor},
                 {"low_freq_factor", kLowFrequency},
                 {"high_freq_factor", kHighFrequency},
                 {"original_max_position_embeddings", kOriginalContext}};
    } else if (m.rotary_seq_len_interpolation_factor > 0) {
      scaling = {{"rope_type", "linear"}, {"factor", static_cast<double>(m.rotary_seq_len_interpolation_factor)}};
    }
    json["rope_scaling"] = scaling;
    if (family == HfFamily::kLlama) {
      json["attention_bias"] = m.add_bias_linear;
      json["mlp_bias"] = m.add_bias_linear;
    } else if (family == HfFamily::kMistral) {
      json["sliding_window"] = nullptr;
    } else {
      json["use_sliding_window"] = false;
    }
    if (family == HfFamily::kQwen3) json["attention_bias"] = false;
  }
  json["tie_word_embeddings"] = !m.untie_embeddings;
  json["bos_token_id"] = optional_json(tokens.begin);
  json["eos_token_id"] = optional_json(tokens.end);
  json["pad_token_id"] = optional_json(tokens.pad);
  json["torch_dtype"] = torch_name(dtype);
  json["use_cache"] = true;
  return json.dump(2) + "\n";
}

std::string hf_generation_text(const SpecialTokens& tokens) {
  Json json = {{"_from_model_config", true}};
  if (tokens.begin) json["bos_token_id"] = *tokens.begin;
  if (tokens.end) json["eos_token_id"] = *tokens.end;
  if (tokens.pad) json["pad_token_id"] = *tokens.pad;
  return json.dump(2) + "\n";
}

}  // namespace pgpt::checkpoint

// --use-checkpoint-args: options that come from a checkpoint's argument dump.
#include <algorithm>

#include "derive.h"
#include "pgpt/base/error.h"
#include "values.h"

namespace pgpt::config {

namespace {

/// Taken where the command line leaves them out and they have no default.
constexpr const char* kIfUnset[] = {"num_layers",          "hidden_size", "ffn_hidden_size",         "seq_length",
                                    "num_attention_heads", "kv_channels", "max_position_embeddings", "vocab_size"};
/// Taken over whatever the command line says.
constexpr const char* kAlways[] = {"group_query_attention",
                                   "num_query_groups",
                                   "position_embedding_type",
                                   "rotary_base",
                                   "rotary_percent",
                                   "rotary_interleaved",
                                   "rotary_seq_len_interpolation_factor",
                                   "use_rope_scaling",
                                   "rope_scaling_factor",
                                   "add_bias_linear",
                                   "add_qkv_bias",
                                   "squared_relu",
                                   "swiglu",
                                   "quick_geglu",
                                   "openai_gelu",
                                   "untie_embeddings_and_output_weights",
                                   "apply_layernorm_1p",
                                   "normalization",
                                   "norm_epsilon",
                                   "qk_layernorm",
                                   "apply_query_key_layer_scaling",
                                   "transformer_impl",
                                   "attention_dropout",
                                   "hidden_dropout",
                                   "mtp_num_layers",
                                   "tokenizer_type"};
constexpr const char* kTokenizer[] = {"tokenizer_model", "tiktoken_pattern"};

Value parse_printed(const Option& option, const std::string& text) {
  if (option.type != OptionType::kSwitch) return convert_value(option, option.names.front(), {text});
  PGPT_CHECK(DataError, text == "True" || text == "False", "--use-checkpoint-args: the checkpoint has ",
             option.destination, " '", text, "', which is neither True nor False");
  return text == "True";
}

}  // namespace

void take_checkpoint_arguments(Values& values, const ParseContext& context, std::vector<std::string>& notices) {
  if (!values.flag("use_checkpoint_args")) return;
  PGPT_ASSERT(context.checkpoint_arguments, "--use-checkpoint-args without a reader of checkpoints");
  if (!values.is_set("load")) {
    notices.emplace_back("No load directory specified, using provided arguments.");
    return;
  }
  const auto stored = context.checkpoint_arguments(values.text("load"), values.maybe_integer("ckpt_step"));
  if (!stored) {
    notices.emplace_back("Checkpoint not found to provide arguments, using provided arguments.");
    return;
  }
  const auto take = [&](const char* name, bool always) {
    const Option* option = find_destination(name);
    PGPT_ASSERT(option != nullptr && !option->is_list(), name);
    if (!always && values.is_set(name)) return;
    const auto found = stored->find(name);
    if (found == stored->end() || found->second == "None") {
      notices.push_back(concat("Checkpoint did not provide arguments ", name));
      return;
    }
    values.give(name, parse_printed(*option, found->second));
    notices.push_back(concat("Setting ", name, " to ", found->second, " from checkpoint"));
  };
  for (const char* name : kIfUnset) take(name, false);
  for (const char* name : kAlways) take(name, true);
  if (!values.flag("use_tokenizer_model_from_checkpoint_args")) return;
  for (const char* name : kTokenizer) take(name, true);
}

}  // namespace pgpt::config

// --use-checkpoint-args: options that come from a checkpoint's argument dump.
#include "derive.h"
#include "pgpt/base/error.h"
#include "values.h"

namespace pgpt::config {

namespace {

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
  const bool with_tokenizer = values.flag("use_tokenizer_model_from_checkpoint_args");
  for (const Option& option : option_table()) {
    const std::string& name = option.destination;
    const bool wanted = option.taken == Taken::kAlways || (option.taken == Taken::kIfUnset && !values.is_set(name)) ||
                        (option.taken == Taken::kWithTokenizer && with_tokenizer);
    if (!wanted) continue;
    const auto found = stored->find(name);
    if (found == stored->end() || found->second == "None") {
      notices.push_back(concat("Checkpoint did not provide arguments ", name));
      continue;
    }
    values.give(name, parse_printed(option, found->second));
    notices.push_back(concat("Setting ", name, " to ", found->second, " from checkpoint"));
  }
}

}  // namespace pgpt::config

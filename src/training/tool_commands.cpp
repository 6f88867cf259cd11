#include "pgpt/training/tool_commands.h"

#include <algorithm>
#include <cstdio>

#include "pgpt/base/spelling.h"
#include "pgpt/config/parse.h"

namespace pgpt::training {
namespace {

std::string help() {
  std::string text = "usage: gpt_tool COMMAND [ARGUMENTS]\n\n";
  for (const ToolCommand& command : tool_commands()) {
    text += std::string("  ") + command.name + " " + command.synopsis + "\n      " + command.summary + "\n";
  }
  return text;
}

/// Whether the words after a command ask for its help instead.
bool asks_for_help(const std::vector<std::string>& words) {
  return std::any_of(words.begin(), words.end(),
                     [](const std::string& word) { return word == "--help" || word == "-h"; });
}

[[noreturn]] void throw_unknown(const std::string& word) {
  std::vector<std::string> names;
  for (const ToolCommand& command : tool_commands()) names.emplace_back(command.name);
  const std::string near = did_you_mean(word, names);
  throw ConfigError(concat("unknown command '", word, "'", near.empty() ? "; gpt_tool --help lists them" : near));
}

}  // namespace

const std::vector<ToolCommand>& tool_commands() {
  static const std::vector<ToolCommand> all = {
      {"estimate", "[--json] OPTIONS OF pretrain_gpt [--world-size N]",
       "Parameters, memory and operations of a training command for any layout, without a GPU.", tool_estimate},
      {"preprocess",
       "--input FILE --output-prefix PREFIX --tokenizer-type NullTokenizer --vocab-size N [--null-tokenizer-eod-id N]\n"
       "          [--json-keys KEY ...] [--append-eod] [--workers N] [--partitions N] [--keep-sequential-samples] "
       "[--log-interval N]",
       "Makes PREFIX_KEY_document.bin and .idx, for --data-path, of a file with one JSON object a line; its texts are "
       "token ids\n      (scripts/text_to_ids.py makes them of text). --input may be a pattern of several files, in "
       "quotes, or /dev/stdin.",
       tool_preprocess},
      {"inspect", "DIR [--step N] [--verify] [--arguments] [--json]",
       "What a checkpoint holds; --verify checks every byte.", tool_inspect},
      {"compare",
       "A B [--log] [--preset bf16|fp32|exact] [--exact] [--tolerance NAME=BOUND ...] [--iterations N ...] [--kinds "
       "KIND ...]\n"
       "          [--initial FILE] [--iteration N] [--all] [--json] [--plot FILE.svg]",
       "Compares two runs (evidence directories, safetensors files, metrics files, or logs with --log) and names the "
       "first difference;\n"
       "      exit code 1 when they differ.",
       tool_compare},
      {"diff", "A B [--step-a N] [--step-b N]",
       "Compares two checkpoints, whatever layouts saved them; exit code 1 when they differ.", tool_diff},
      {"export",
       "--format hf --load DIR --output FOLDER [--step N] [--architecture NAME] [--dtype float32|bfloat16|float16]\n"
       "          [--max-shard-size 5GB] [--tokenizer-model FOLDER] [--vocab-size N] [--bos-token-id N] "
       "[--eos-token-id N]",
       "Writes the weights of a checkpoint as a Hugging Face model (gpt2, llama, mistral, qwen2 or qwen3).",
       tool_export},
      {"import",
       "--format hf|llmc|state --input PATH --output DIR [--make-vocab-size-divisible-by N] [--dtype "
       "float32|bfloat16|float16]\n"
       "          [--transformer-impl transformer_engine|local]",
       "Makes a checkpoint of weights (for --load or --pretrained-checkpoint) from a Hugging Face folder or an llm.c "
       ".bin\n"
       "      file; format state is what scripts/convert_megatron_checkpoint.py hands over.",
       tool_import},
  };
  return all;
}

ExitCode run_tool(const std::vector<std::string>& arguments) noexcept {
  try {
    if (arguments.empty() || arguments[0] == "--help" || arguments[0] == "-h" || arguments[0] == "help") {
      std::fputs(help().c_str(), arguments.empty() ? stderr : stdout);
      return arguments.empty() ? ExitCode::kConfiguration : ExitCode::kDone;
    }
    if (arguments[0] == "--version") {
      std::printf("gpt_tool %s\n", config::version().c_str());
      return ExitCode::kDone;
    }
    for (const ToolCommand& command : tool_commands()) {
      if (arguments[0] != command.name) continue;
      const std::vector<std::string> rest(arguments.begin() + 1, arguments.end());
      if (asks_for_help(rest)) {
        std::printf("usage: gpt_tool %s %s\n\n%s\n", command.name, command.synopsis, command.summary);
        return ExitCode::kDone;
      }
      return command.run(rest);
    }
    throw_unknown(arguments[0]);
  } catch (const Error& error) {
    std::fprintf(stderr, "gpt_tool: %s\n", error.what());
    return error.code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpt_tool: %s\n", error.what());
    return ExitCode::kConfiguration;
  }
}

}  // namespace pgpt::training

// gpt_tool export: the weights of a checkpoint as a Hugging Face model.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <set>
#include <thread>

#include "conversion.h"
#include "pgpt/checkpoint/architecture.h"
#include "pgpt/checkpoint/directory.h"
#include "pgpt/checkpoint/hugging_face.h"
#include "pgpt/checkpoint/shard.h"
#include "pgpt/data/tokenizer.h"
#include "pgpt/training/tool_commands.h"
#include "tool_arguments.h"

namespace pgpt::training {
namespace {

namespace fs = std::filesystem;
using checkpoint::HfLink;
using checkpoint::SpecialTokens;

/// What a tokenizer of the transformers library is made of.
constexpr const char* kTokenizerFiles[] = {"tokenizer.json",
                                           "tokenizer_config.json",
                                           "special_tokens_map.json",
                                           "added_tokens.json",
                                           "vocab.json",
                                           "merges.txt",
                                           "tokenizer.model",
                                           "spiece.model",
                                           "chat_template.jinja"};

std::uint64_t parse_size(const std::string& text) {
  const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  const std::string unit = text.substr(digits);
  const std::uint64_t factor = unit == "GB"   ? 1'000'000'000
                               : unit == "MB" ? 1'000'000
                               : unit == "KB" ? 1'000
                               : unit.empty() ? 1
                                              : 0;
  const std::uint64_t number = digits != 0 && digits <= 12 ? std::stoull(text) : 0;
  PGPT_CHECK(ConfigError, number > 0 && factor != 0 && number <= UINT64_MAX / factor,
             "export: --max-shard-size takes bytes, or a number with KB, MB or GB such as 5GB, not '", text, "'");
  return number * factor;
}

SpecialTokens special_tokens(const ToolArguments& arguments, const std::map<std::string, std::string>& stored,
                             std::int64_t vocab_size) {
  SpecialTokens tokens;
  if (const auto folder = arguments.text("--tokenizer-model")) {
    PGPT_CHECK(DataError, fs::is_directory(*folder), "export: --tokenizer-model ", *folder,
               " is no folder; give the one with the tokenizer's files (tokenizer.json, ...)");
    const data::TokenizerFileFacts facts = data::read_huggingface_folder(*folder);
    if (facts.eod >= 0) tokens.end = facts.eod;
    if (facts.pad >= 0) tokens.pad = facts.pad;
    PGPT_CHECK(ConfigError, facts.vocab_size <= vocab_size, "export: --tokenizer-model ", *folder, " has ",
               facts.vocab_size, " tokens, the model ", vocab_size,
               "; give the tokenizer that the model was trained with");
  } else if (const auto type = stored.find("tokenizer_type"); type != stored.end() && type->second == "NullTokenizer") {
    tokens.end = vocab_size - 1;
  }
  if (const auto id = arguments.integer("--bos-token-id")) tokens.begin = *id;
  if (const auto id = arguments.integer("--eos-token-id")) tokens.end = *id;
  for (const auto& [option, id] :
       {std::pair("--bos-token-id", tokens.begin), std::pair("--eos-token-id", tokens.end)}) {
    PGPT_CHECK(ConfigError, !id || *id < vocab_size, "export: ", option, " ", *id, " is no token of a vocabulary of ",
               vocab_size);
  }
  return tokens;
}

void copy_tokenizer(const fs::path& from, const fs::path& to) {
  std::size_t copied = 0;
  for (const char* name : kTokenizerFiles) {
    if (!fs::is_regular_file(from / name)) continue;
    checkpoint::write_text_atomically((to / name).string(), read_text(from / name));
    ++copied;
  }
  PGPT_CHECK(DataError, copied > 0, "export: --tokenizer-model ", from.string(),
             " holds no tokenizer files (tokenizer.json, tokenizer.model, ...)");
}

/// Throws DataError unless the checkpoint's weights are exactly those of `links`.
void check_weights(const checkpoint::Checkpoint& source, const std::vector<HfLink>& links) {
  std::set<std::string> known;
  const std::string where = source.directory().string();
  for (const HfLink& link : links) {
    known.insert(link.native);
    PGPT_CHECK(DataError, source.contains(link.native), where, " has no tensor ", link.native);
    const std::vector<std::int64_t>& shape = source.manifest().tensors.at(link.native).shape;
    PGPT_CHECK(DataError, shape == link.native_shape, where, ": tensor ", link.native, " has shape ",
               checkpoint::shape_text(shape), ", by its arguments it should have ",
               checkpoint::shape_text(link.native_shape));
  }
  for (const auto& [name, entry] : source.manifest().tensors) {
    const bool weight = name.rfind("optimizer.state.", 0) != 0 && name.find(".gtp_padding") == std::string::npos;
    PGPT_CHECK(DataError, !weight || known.count(name) != 0, where, " has a tensor ", name,
               ", for which the other format has no place");
  }
}

}  // namespace

ExitCode tool_export(const std::vector<std::string>& words) {
  const ToolArguments arguments(
      "export", words, {},
      {"--format", "--load", "--output", "--step", "--architecture", "--dtype", "--max-shard-size", "--tokenizer-model",
       "--vocab-size", "--bos-token-id", "--eos-token-id"},
      0);
  arguments.require({"--format", "--load", "--output"});
  const std::string format = *arguments.text("--format");
  PGPT_CHECK(ConfigError, format == "hf", "export: --format ", format,
             " is unknown; use hf (for Megatron-LM see scripts/convert_megatron_checkpoint.py)");
  std::optional<at::ScalarType> wanted;
  if (const auto name = arguments.text("--dtype")) wanted = weight_type("export", *name);
  const std::uint64_t shard_bytes = parse_size(arguments.text("--max-shard-size").value_or("5GB"));
  const checkpoint::Checkpoint source(
      checkpoint::find_checkpoint(*arguments.text("--load"), arguments.integer("--step")));
  const std::string where = source.directory().string();
  const std::map<std::string, std::string>& stored = source.manifest().arguments;
  const config::ModelConfig model = checkpoint::model_of_arguments(stored, where);
  const checkpoint::HfFamily family = checkpoint::choose_family(model, arguments.text("--architecture").value_or(""));
  const std::int64_t vocab_size = arguments.integer("--vocab-size").value_or(model.vocab_size);
  PGPT_CHECK(ConfigError, vocab_size > 0 && vocab_size <= model.padded_vocab_size, "export: --vocab-size ", vocab_size,
             " is not between 1 and the ", model.padded_vocab_size, " rows of the checkpoint's embedding");
  const std::vector<HfLink> links = checkpoint::hf_links(family, model, vocab_size);
  check_weights(source, links);
  const at::ScalarType dtype = wanted.value_or(source.manifest().tensors.at(links.front().native).dtype);
  const SpecialTokens tokens = special_tokens(arguments, stored, vocab_size);

  NewFolder output("export", *arguments.text("--output"));
  checkpoint::IoOptions io;
  io.threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 8U));
  const std::size_t files = checkpoint::write_hf_weights(
      output.path(), links, model, dtype, shard_bytes, [&](const std::string& name) { return source.read(name, io); });
  checkpoint::write_text_atomically((output.path() / "config.json").string(),
                                    checkpoint::hf_config_text(family, model, vocab_size, dtype, tokens));
  checkpoint::write_text_atomically((output.path() / "generation_config.json").string(),
                                    checkpoint::hf_generation_text(tokens));
  if (const auto folder = arguments.text("--tokenizer-model")) copy_tokenizer(*folder, output.path());
  output.publish();
  std::printf("exported %s, iteration %lld, as %s to %s: %zu tensors of type %s in %zu file(s), vocabulary %lld\n",
              where.c_str(), static_cast<long long>(source.manifest().state.iteration),
              checkpoint::family_name(family).c_str(), arguments.text("--output")->c_str(), links.size(),
              checkpoint::dtype_name(dtype).c_str(), files, static_cast<long long>(vocab_size));
  return ExitCode::kDone;
}

}  // namespace pgpt::training

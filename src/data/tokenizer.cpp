#include "pgpt/data/tokenizer.h"

#include <array>
#include <charconv>
#include <filesystem>

#include "pgpt/base/error.h"

namespace pgpt::data {
namespace {

bool is_sentencepiece(std::string_view type) {
  return type == "SentencePieceTokenizer" || type == "GPTSentencePieceTokenizer" || type == "Llama2Tokenizer";
}

/// What the files of the configured tokenizer tell, and why not where they tell nothing.
struct FileResult {
  TokenizerFileFacts facts;
  std::string path;
  std::string reason;
};

FileResult read_files(const config::Config& config, const std::string& type) {
  const auto& data = config.data;
  FileResult result;
  const bool gpt2 = type == "GPT2BPETokenizer";
  const bool known = gpt2 || is_sentencepiece(type) || type == "HuggingFaceTokenizer" || type == "TikTokenizer";
  const char* option = gpt2 ? "--vocab-file" : "--tokenizer-model";
  result.path = gpt2 ? data.vocab_file : data.tokenizer_model;
  if (!known) {
    result.reason = "files of this type are not read";
  } else if (result.path.empty()) {
    result.reason = concat(option, " is not given");
  } else if (!std::filesystem::exists(result.path)) {
    result.reason = concat(option, " ", result.path, " does not exist on this machine");
  } else if (gpt2) {
    result.facts = read_gpt2_vocab(result.path);
  } else if (is_sentencepiece(type)) {
    result.facts = read_sentencepiece_model(result.path);
  } else if (type == "TikTokenizer") {
    result.facts = read_tiktoken_json(result.path, data.tiktoken_num_special_tokens, config.model.vocab_size);
  } else {
    result.facts = read_huggingface_folder(result.path);
  }
  if (result.reason.empty() && result.facts.eod < 0) result.reason = concat(result.path, " names no end-of-text token");
  return result;
}

TokenizerFacts null_facts(const config::Config& config, const std::string& type) {
  TokenizerFacts facts;
  facts.vocab_size = config.model.vocab_size;
  PGPT_CHECK(ConfigError, facts.vocab_size > 0, "--tokenizer-type ", type, " needs --vocab-size");
  const std::int64_t last = facts.vocab_size - 1;
  facts.eod = config.data.eod_id >= 0 ? config.data.eod_id : last;
  facts.pad = config.data.pad_id;
  facts.description = {{"class", "megatron.core.tokenizers.text.models.default_tokenizer.DefaultTokenizerText"},
                       {"tokenizer_path", std::nullopt},
                       {"vocab_size", std::to_string(facts.vocab_size)}};
  if (facts.eod != last) facts.description.emplace_back("eod_id", std::to_string(facts.eod));
  facts.description.emplace_back("pad_id", std::to_string(facts.pad));
  return facts;
}

/// A number known from files, from flags, or from both (then they must agree).
std::int64_t agree(const char* what, const char* option, std::int64_t from_flag, const FileResult& files,
                   std::int64_t from_file) {
  PGPT_CHECK(ConfigError, from_flag < 0 || from_file < 0 || from_flag == from_file, option, " ", from_flag,
             " contradicts ", files.path, ", whose ", what, " is ", from_file, "; leave the option out");
  return from_flag >= 0 ? from_flag : from_file;
}

}  // namespace

TokenizerFacts resolve_tokenizer(const config::Config& config) {
  const auto& data = config.data;
  const std::string type = data.tokenizer_type.empty() ? "GPT2BPETokenizer" : data.tokenizer_type;
  const bool needs_eod = data.eod_mask_loss || data.reset_position_ids ||
                         (data.reset_attention_mask && data.create_attention_mask) || data.mock;
  TokenizerFacts facts;
  if (type == "NullTokenizer" || type == "NullMultimodalTokenizer") {
    facts = null_facts(config, type);
  } else {
    const FileResult files = read_files(config, type);
    const std::int64_t flag_vocab = config.model.vocab_size > 0 ? config.model.vocab_size : -1;
    facts.vocab_size = agree("vocabulary size", "--vocab-size", flag_vocab, files, files.facts.vocab_size);
    if (facts.vocab_size < 0 && config.model.padded_vocab_size > 0) facts.vocab_size = config.model.padded_vocab_size;
    PGPT_CHECK(ConfigError, facts.vocab_size > 0, "--tokenizer-type ", type, ": the vocabulary size is unknown (",
               files.reason, "); add --vocab-size or --padded-vocab-size",
               needs_eod ? ", and --null-tokenizer-eod-id for the end-of-document id" : "");
    facts.eod = agree("end-of-text id", "--null-tokenizer-eod-id", data.eod_id, files, files.facts.eod);
    facts.pad = data.pad_id >= 0 ? data.pad_id : files.facts.pad;
    PGPT_CHECK(ConfigError, facts.eod >= 0 || !needs_eod, "--tokenizer-type ", type,
               ": the end-of-document id is unknown (", files.reason,
               ") and --eod-mask-loss, --reset-position-ids, --reset-attention-mask or --mock-data need it; add "
               "--null-tokenizer-eod-id");
    facts.description = {{"class", type},
                         {"tokenizer_path", files.path.empty() ? std::nullopt : std::optional(files.path)},
                         {"vocab_size", std::to_string(facts.vocab_size)},
                         {"eod_id", std::to_string(facts.eod)},
                         {"pad_id", std::to_string(facts.pad)}};
  }
  PGPT_CHECK(ConfigError, facts.eod < facts.vocab_size, "the end-of-document id ", facts.eod,
             " must be below the vocabulary size ", facts.vocab_size,
             "; correct --null-tokenizer-eod-id or --vocab-size");
  PGPT_CHECK(ConfigError, config.model.padded_vocab_size == 0 || config.model.padded_vocab_size >= facts.vocab_size,
             "the padded vocabulary ", config.model.padded_vocab_size, " is smaller than the tokenizer's ",
             facts.vocab_size, "; correct --padded-vocab-size or --vocab-size");
  return facts;
}

std::vector<std::int64_t> null_tokenize(std::string_view text, std::int64_t vocab_size) {
  std::vector<std::int64_t> ids;
  std::size_t begin = 0;
  while (true) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::string_view piece = text.substr(begin, end - begin);
    std::int64_t id = 0;
    const auto parsed = std::from_chars(piece.data(), piece.data() + piece.size(), id);
    PGPT_CHECK(DataError, parsed.ec == std::errc() && parsed.ptr == piece.data() + piece.size(), "'",
               std::string(piece), "' is not an integer; NullTokenizer reads integers separated by single blanks");
    PGPT_CHECK(DataError, id >= 0 && id < vocab_size, "token id ", id, " does not lie in [0, ", vocab_size,
               "); give the right --vocab-size");
    ids.push_back(id);
    if (end == text.size()) return ids;
    begin = end + 1;
  }
}

}  // namespace pgpt::data

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pgpt/config/config.h"

namespace pgpt::data {

/// The three numbers that training on .bin/.idx data needs from a tokenizer.
struct TokenizerFacts {
  std::int64_t vocab_size = 0;
  std::int64_t eod = -1;  ///< -1 = unknown; resolve_tokenizer() then made sure that nothing needs it
  std::int64_t pad = -1;  ///< -1 = none
  /// Entries of the tokenizer object in cache descriptions, in order; an absent value prints null.
  std::vector<std::pair<std::string, std::optional<std::string>>> description;

  /// The pad id that samples are masked with: none when it equals EOD, unless ambiguous ids are allowed.
  [[nodiscard]] std::int64_t effective_pad(bool allow_ambiguous) const {
    return pad == eod && !allow_ambiguous ? -1 : pad;
  }
};

/// Facts that could be read from a tokenizer's files; -1 = not there.
struct TokenizerFileFacts {
  std::int64_t vocab_size = -1;
  std::int64_t eod = -1;
  std::int64_t pad = -1;
};

/// GPT-2 BPE: entries of vocab.json and the id of <|endoftext|>.
[[nodiscard]] TokenizerFileFacts read_gpt2_vocab(const std::string& path);
/// Hugging Face folder: tokenizer.json (or vocab.json), added tokens, and the EOS and pad tokens of its configuration.
[[nodiscard]] TokenizerFileFacts read_huggingface_folder(const std::string& path);
/// SentencePiece .model: number of pieces, EOS and pad ids.
[[nodiscard]] TokenizerFileFacts read_sentencepiece_model(const std::string& path);
/// Tik JSON: a list of ranked tokens that follow `special_tokens` special ones.
[[nodiscard]] TokenizerFileFacts read_tiktoken_json(const std::string& path, std::int64_t special_tokens,
                                                    std::int64_t vocab_size);

/// Vocabulary size, EOD and pad of the configured tokenizer, from its files and the flags. Throws ConfigError naming
/// the flag to add or the contradiction found.
[[nodiscard]] TokenizerFacts resolve_tokenizer(const config::Config& config);

/// NullTokenizer's text to ids: integers separated by single blanks. Throws DataError for anything else and for ids
/// outside [0, vocab_size).
[[nodiscard]] std::vector<std::int64_t> null_tokenize(std::string_view text, std::int64_t vocab_size);

}  // namespace pgpt::data

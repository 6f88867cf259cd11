#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace pgpt::data {

/// What preprocess_jsonl() reads and writes.
struct PreprocessOptions {
  std::string input;          ///< one JSON object a line
  std::string output_prefix;  ///< files PREFIX_KEY_document.bin/.idx
  std::vector<std::string> keys = {"text"};
  bool append_eod = false;
  std::int64_t eod = -1;
  std::int64_t vocab_size = 0;           ///< fixes the element type; ids must be below it
  std::int64_t partitions = 1;           ///< lines go round and are merged part by part, as the reference does
  bool keep_sequential_samples = false;  ///< contiguous blocks instead, so that the order is kept
};

/// Counts of a preprocessing run, over all keys.
struct PreprocessResult {
  std::int64_t lines = 0, sequences = 0, tokens = 0;
  std::vector<std::string> prefixes;  ///< one a key
};

/// Turns text into ids.
using TextToIds = std::function<std::vector<std::int64_t>(std::string_view)>;

/// Writes a .bin/.idx pair per key. Throws DataError naming file and line; nothing is left behind then.
PreprocessResult preprocess_jsonl(const PreprocessOptions& options, const TextToIds& tokenize);

}  // namespace pgpt::data

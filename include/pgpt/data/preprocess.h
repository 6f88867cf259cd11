#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace pgpt::data {

/// What preprocess_jsonl() reads and writes.
struct PreprocessOptions {
  std::vector<std::string> inputs;  ///< files of one JSON object a line, read one after the other
  std::string output_prefix;        ///< files PREFIX_KEY_document.bin/.idx
  std::vector<std::string> keys = {"text"};
  bool append_eod = false;
  std::int64_t eod = -1;
  std::int64_t vocab_size = 0;           ///< fixes the element type; ids must be below it
  std::int64_t partitions = 1;           ///< lines go round and are merged part by part, as the reference does
  bool keep_sequential_samples = false;  ///< contiguous blocks instead, so that the order is kept
  std::int64_t workers = 1;              ///< threads that turn text into ids; the files do not depend on it
};

/// One written pair of files.
struct PreprocessedPair {
  std::string prefix;
  std::int64_t sequences = 0, tokens = 0;
};

/// Counts of a preprocessing run.
struct PreprocessResult {
  std::int64_t documents = 0;           ///< lines
  std::int64_t input_bytes = 0;         ///< of those lines
  std::vector<PreprocessedPair> pairs;  ///< one a key, in the order of the keys

  [[nodiscard]] std::int64_t tokens() const;
};

/// Turns text into ids; several threads call it at once.
using TextToIds = std::function<std::vector<std::int64_t>(std::string_view)>;

/// Gets the counts so far every few thousand lines, in the calling thread; what it throws ends the run.
using PreprocessProgress = std::function<void(const PreprocessResult&)>;

/// Writes a .bin/.idx pair per key; all pairs appear together, at the end. Throws DataError naming file and line, or
/// ConfigError; then files that were there stay as they were, and nothing is left behind.
PreprocessResult preprocess_jsonl(const PreprocessOptions& options, const TextToIds& tokenize,
                                  const PreprocessProgress& progress = nullptr);

}  // namespace pgpt::data

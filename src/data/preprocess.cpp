#include "pgpt/data/preprocess.h"

#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "pgpt/base/error.h"
#include "pgpt/data/indexed_dataset.h"

namespace pgpt::data {
namespace {

/// Appends one line's text under one key as one document; returns its sequences and tokens through `result`.
void add_document(const nlohmann::json& value, const PreprocessOptions& options, const TextToIds& tokenize,
                  IndexedDatasetWriter& writer, PreprocessResult& result) {
  std::vector<std::vector<std::int64_t>> sequences;
  const auto add_text = [&](const nlohmann::json& text) {
    PGPT_CHECK(DataError, text.is_string(), "expected a string or a list of strings, found ", text.type_name());
    auto ids = tokenize(text.get_ref<const std::string&>());
    if (!ids.empty()) sequences.push_back(std::move(ids));
  };
  if (value.is_array()) {
    for (const auto& item : value) add_text(item);
  } else {
    add_text(value);
  }
  if (options.append_eod && !sequences.empty()) sequences.back().push_back(options.eod);
  for (const auto& sequence : sequences) {
    for (const std::int64_t id : sequence) {
      PGPT_CHECK(DataError, id >= 0 && id < options.vocab_size, "token id ", id, " does not lie in [0, ",
                 options.vocab_size, "); give the right --vocab-size");
    }
    writer.add_sequence(sequence);
    ++result.sequences;
    result.tokens += static_cast<std::int64_t>(sequence.size());
  }
  writer.end_document();
}

}  // namespace

PreprocessResult preprocess_jsonl(const PreprocessOptions& options, const TextToIds& tokenize) {
  PGPT_CHECK(ConfigError, options.vocab_size > 0, "preprocessing needs the vocabulary size; add --vocab-size");
  PGPT_CHECK(ConfigError, options.partitions >= 1, "--partitions ", options.partitions, " must be at least 1");
  PGPT_CHECK(ConfigError, !options.keys.empty(), "--json-keys names no key");
  PGPT_CHECK(ConfigError, !options.append_eod || (options.eod >= 0 && options.eod < options.vocab_size),
             "--append-eod needs an end-of-document id in [0, ", options.vocab_size, "), found ", options.eod);
  PreprocessResult result;
  std::vector<std::unique_ptr<IndexedDatasetWriter>> writers;
  for (const auto& key : options.keys) {
    result.prefixes.push_back(options.output_prefix + "_" + key + "_document");
    writers.push_back(
        std::make_unique<IndexedDatasetWriter>(result.prefixes.back(), token_type_for_vocab(options.vocab_size)));
  }
  // Contiguous partitions joined in order are the original order, so only the round-robin kind needs several passes.
  const std::int64_t passes = options.keep_sequential_samples ? 1 : options.partitions;
  for (std::int64_t pass = 0; pass < passes; ++pass) {
    std::ifstream input(options.input);
    PGPT_CHECK(DataError, input.good(), "cannot open ", options.input);
    std::string line;
    for (std::int64_t number = 0; std::getline(input, line); ++number) {
      if (number % passes != pass) continue;
      ++result.lines;
      try {
        const auto json = nlohmann::json::parse(line);
        for (std::size_t k = 0; k < options.keys.size(); ++k) {
          PGPT_CHECK(DataError, json.is_object() && json.contains(options.keys[k]), "there is no key '",
                     options.keys[k], "'; name the right one with --json-keys");
          add_document(json[options.keys[k]], options, tokenize, *writers[k], result);
        }
      } catch (const nlohmann::json::exception& problem) {
        throw DataError(concat(options.input, " line ", number + 1, ": not a JSON object: ", problem.what()));
      } catch (const Error& problem) {
        throw DataError(concat(options.input, " line ", number + 1, ": ", problem.what()));
      }
    }
    PGPT_CHECK(DataError, input.eof(), "cannot read ", options.input, " to its end");
  }
  for (auto& writer : writers) writer->finish();
  return result;
}

}  // namespace pgpt::data

#pragma once

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "pgpt/base/error.h"
#include "pgpt/config/config.h"
#include "pgpt/data/checksum.h"
#include "pgpt/data/datasets.h"
#include "pgpt/data/indexed_dataset.h"
#include "support/json.h"
#include "support/temporary_folder.h"
#include "support/text.h"

namespace pgpt::data::test {

using nlohmann::json;

inline std::string golden_path(const std::string& name) { return std::string(PGPT_TEST_DATA) + "/golden_data/" + name; }

/// A golden file, read once and kept: tests loop over parts of it.
inline const json& golden(const std::string& name) {
  static std::map<std::string, json> files;
  const auto [found, fresh] = files.try_emplace(name);
  if (fresh) found->second = pgpt::test::read_json(golden_path(name));
  return found->second;
}

using pgpt::test::contains;
using pgpt::test::error_of;
using pgpt::test::read_text;
using pgpt::test::TemporaryFolder;
using pgpt::test::write_text;

inline std::uint32_t crc_of(const std::string& text) {
  return crc32({reinterpret_cast<const std::byte*>(text.data()), text.size()});
}

template <class T>
std::uint32_t crc_of(const std::vector<T>& values) {
  return crc32({reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(T)});
}

/// Writes a corpus of one-sequence documents.
inline void write_corpus(const std::string& prefix, const std::vector<std::vector<std::int64_t>>& documents,
                         TokenType type = TokenType::kUint16) {
  IndexedDatasetWriter writer(prefix, type);
  for (const auto& document : documents) {
    writer.add_sequence(document);
    writer.end_document();
  }
  writer.finish();
}

/// A small run on `prefix` (mock data when empty) with NullTokenizer and 128 ids.
inline config::Config small_config(const std::string& prefix, const std::string& split = "1,0,0") {
  config::Config config;
  config.model.seq_length = 8;
  config.model.vocab_size = 128;
  config.model.padded_vocab_size = 128;
  config.training.micro_batch_size = 1;
  config.training.global_batch_size = 1;
  config.training.train_iters = 5;
  config.training.seed = 1234;
  config.data.mock = prefix.empty();
  if (!prefix.empty()) config.data.data_path = {prefix};
  config.data.split = split;
  config.data.tokenizer_type = "NullTokenizer";
  config.data.num_workers = 0;
  return config;
}

/// Collects what is printed.
struct Lines {
  std::vector<std::string> lines;
  [[nodiscard]] LineSink sink() {
    return [this](const std::string& line) { lines.push_back(line); };
  }
  [[nodiscard]] bool has(const std::string& part) const { return pgpt::test::has_line(lines, part); }
};

inline Datasets build(const config::Config& config, const LineSink& print = {}) {
  return build_datasets(config, resolve_tokenizer(config), requested_samples(config), print);
}

/// Tokens of all samples in order.
inline std::vector<std::vector<std::int64_t>> all_tokens(const Dataset& dataset) {
  std::vector<std::vector<std::int64_t>> tokens;
  for (std::int64_t i = 0; i < dataset.size(); ++i) tokens.push_back(dataset.sample(i).tokens);
  return tokens;
}

}  // namespace pgpt::data::test

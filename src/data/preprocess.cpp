#include "pgpt/data/preprocess.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "pgpt/base/error.h"
#include "pgpt/data/indexed_dataset.h"

namespace pgpt::data {
namespace {

namespace fs = std::filesystem;

/// What is on hand at a time for each worker; bounds memory and the interval of progress reports.
constexpr std::size_t kBatchBytes = std::size_t{1} << 20;
constexpr std::size_t kBatchLines = 8192;
/// Lines that a worker takes at once.
constexpr std::size_t kChunkLines = 16;
constexpr std::int64_t kMaxWorkers = 1024;

/// A document under one key: its sequences, none of them empty.
using Document = std::vector<std::vector<std::int64_t>>;

struct Line {
  std::int64_t number = 0;  ///< from 1
  std::string text;
  std::vector<Document> documents;  ///< one a key, once encoded
  std::string problem;              ///< why it could not be encoded
};

Document encode_value(const nlohmann::json& value, const PreprocessOptions& options, const TextToIds& tokenize) {
  Document document;
  const auto add_text = [&](const nlohmann::json& text) {
    PGPT_CHECK(DataError, text.is_string(), "expected a string or a list of strings, found ", text.type_name());
    std::vector<std::int64_t> ids = tokenize(text.get_ref<const std::string&>());
    if (!ids.empty()) document.push_back(std::move(ids));
  };
  if (value.is_array()) {
    for (const auto& item : value) add_text(item);
  } else {
    add_text(value);
  }
  if (options.append_eod && !document.empty()) document.back().push_back(options.eod);
  for (const auto& sequence : document) {
    for (const std::int64_t id : sequence) {
      PGPT_CHECK(DataError, id >= 0 && id < options.vocab_size, "token id ", id, " does not lie in [0, ",
                 options.vocab_size, "); give the right --vocab-size");
    }
  }
  return document;
}

void encode(Line& line, const PreprocessOptions& options, const TextToIds& tokenize) {
  try {
    const auto json = nlohmann::json::parse(line.text);
    for (const std::string& key : options.keys) {
      PGPT_CHECK(DataError, json.is_object() && json.contains(key), "there is no key '", key,
                 "'; name the right one with --json-keys");
      line.documents.push_back(encode_value(json[key], options, tokenize));
    }
  } catch (const nlohmann::json::exception& problem) {
    line.problem = concat("not a JSON object: ", problem.what());
  } catch (const std::exception& problem) {
    line.problem = problem.what();
  }
}

/// Encodes all lines, with as many threads as are useful.
void encode_batch(std::vector<Line>& lines, const PreprocessOptions& options, const TextToIds& tokenize) {
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t begin; (begin = next.fetch_add(kChunkLines)) < lines.size();) {
      const std::size_t end = std::min(begin + kChunkLines, lines.size());
      for (std::size_t i = begin; i < end; ++i) encode(lines[i], options, tokenize);
    }
  };
  std::vector<std::jthread> threads;
  const std::size_t chunks = (lines.size() + kChunkLines - 1) / kChunkLines;
  const std::size_t workers = std::min(static_cast<std::size_t>(options.workers), chunks);
  for (std::size_t i = 1; i < workers; ++i) threads.emplace_back(work);
  work();
}

void check_options(const PreprocessOptions& options) {
  PGPT_CHECK(ConfigError, options.vocab_size > 0, "preprocessing needs the vocabulary size; add --vocab-size");
  PGPT_CHECK(ConfigError, options.partitions >= 1, "--partitions ", options.partitions, " must be at least 1");
  PGPT_CHECK(ConfigError, options.workers >= 1 && options.workers <= kMaxWorkers, "--workers ", options.workers,
             " must lie between 1 and ", kMaxWorkers);
  PGPT_CHECK(ConfigError, !options.inputs.empty(), "--input names no file");
  PGPT_CHECK(ConfigError, !options.keys.empty(), "--json-keys names no key");
  const std::set<std::string> different(options.keys.begin(), options.keys.end());
  PGPT_CHECK(ConfigError, different.size() == options.keys.size(), "--json-keys names a key twice; name each once");
  PGPT_CHECK(ConfigError, !options.append_eod || (options.eod >= 0 && options.eod < options.vocab_size),
             "--append-eod needs an end-of-document id in [0, ", options.vocab_size, "), found ", options.eod);
}

/// Contiguous partitions joined in order are the original order, so only the round-robin kind needs several passes.
std::int64_t passes_of(const PreprocessOptions& options) {
  return options.keep_sequential_samples ? 1 : options.partitions;
}

void check_inputs(const PreprocessOptions& options) {
  for (const std::string& path : options.inputs) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    PGPT_CHECK(DataError, fs::exists(status), "--input: cannot open ", path, ": ",
               error ? error.message() : std::string("No such file or directory"), "; check the path");
    PGPT_CHECK(DataError, !fs::is_directory(status), "--input ", path, " is a folder; name a file in it");
    PGPT_CHECK(ConfigError, fs::is_regular_file(status) || passes_of(options) == 1, "--input ", path,
               " can be read only once and --partitions ", options.partitions, " reads it ", options.partitions,
               " times; leave --partitions out");
    for (const char* ending : {".gz", ".bz2", ".xz", ".zst"}) {
      PGPT_CHECK(DataError, fs::path(path).extension() != ending, "--input ", path,
                 " is compressed; unpack it into a pipe and use --input /dev/stdin");
    }
  }
}

/// One run: reads batches of lines, has them encoded, and writes them in order.
class Run {
 public:
  Run(const PreprocessOptions& options, const TextToIds& tokenize, const PreprocessProgress& progress)
      : options_(options), tokenize_(tokenize), progress_(progress) {
    const TokenType type = token_type_for_vocab(options.vocab_size);
    for (const std::string& key : options.keys) {
      result_.pairs.push_back({options.output_prefix + "_" + key + "_document", 0, 0});
      writers_.push_back(std::make_unique<IndexedDatasetWriter>(result_.pairs.back().prefix, type));
    }
  }

  /// Reads the lines of all files whose running number leaves the rest `pass` when divided by `passes`.
  void read_pass(std::int64_t pass, std::int64_t passes) {
    const auto workers = static_cast<std::size_t>(options_.workers);
    std::int64_t running = 0;
    for (const std::string& path : options_.inputs) {
      errno = 0;
      std::ifstream input(path, std::ios::binary);
      PGPT_CHECK(DataError, input.good(), "cannot open ", path, ": ", std::strerror(errno));
      std::string text;
      for (std::int64_t number = 1; std::getline(input, text); ++number) {
        if (running++ % passes != pass) continue;
        batch_bytes_ += text.size() + 1;
        batch_.push_back({number, std::move(text), {}, {}});
        if (batch_.size() >= kBatchLines * workers || batch_bytes_ >= kBatchBytes * workers) write_batch(path);
      }
      PGPT_CHECK(DataError, input.eof(), "cannot read ", path, " to its end: ", std::strerror(errno));
      write_batch(path);
    }
  }

  PreprocessResult finish() {
    for (const PreprocessedPair& pair : result_.pairs) {
      PGPT_CHECK(DataError, pair.tokens > 0, "no token goes into ", pair.prefix, ": the input has ", result_.documents,
                 " line(s) and no text in them; nothing was written");
    }
    for (auto& writer : writers_) writer->seal();
    for (auto& writer : writers_) writer->finish();
    return result_;
  }

 private:
  void write_batch(const std::string& path) {
    encode_batch(batch_, options_, tokenize_);
    for (const Line& line : batch_) {
      PGPT_CHECK(DataError, line.problem.empty(), path, " line ", line.number, ": ", line.problem);
      for (std::size_t k = 0; k < writers_.size(); ++k) {
        for (const auto& sequence : line.documents[k]) {
          writers_[k]->add_sequence(sequence);
          ++result_.pairs[k].sequences;
          result_.pairs[k].tokens += static_cast<std::int64_t>(sequence.size());
        }
        writers_[k]->end_document();
      }
    }
    result_.documents += static_cast<std::int64_t>(batch_.size());
    result_.input_bytes += static_cast<std::int64_t>(batch_bytes_);
    batch_.clear();
    batch_bytes_ = 0;
    if (progress_) progress_(result_);
  }

  const PreprocessOptions& options_;
  const TextToIds& tokenize_;
  const PreprocessProgress& progress_;
  std::vector<std::unique_ptr<IndexedDatasetWriter>> writers_;
  std::vector<Line> batch_;
  std::size_t batch_bytes_ = 0;
  PreprocessResult result_;
};

}  // namespace

std::int64_t PreprocessResult::tokens() const {
  std::int64_t sum = 0;
  for (const PreprocessedPair& pair : pairs) sum += pair.tokens;
  return sum;
}

PreprocessResult preprocess_jsonl(const PreprocessOptions& options, const TextToIds& tokenize,
                                  const PreprocessProgress& progress) {
  check_options(options);
  check_inputs(options);
  Run run(options, tokenize, progress);
  for (std::int64_t pass = 0; pass < passes_of(options); ++pass) run.read_pass(pass, passes_of(options));
  return run.finish();
}

}  // namespace pgpt::data

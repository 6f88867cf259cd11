// gpt_tool preprocess: .bin/.idx data from JSON lines, with the options of Megatron-LM's tools/preprocess_data.py.
#include <glob.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "pgpt/config/config.h"
#include "pgpt/data/indexed_dataset.h"
#include "pgpt/data/preprocess.h"
#include "pgpt/data/tokenizer.h"
#include "pgpt/training/tool_commands.h"
#include "tool_arguments.h"

namespace pgpt::training {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kSecondsBetweenReports = 10.0;

/// Options of the reference that cannot change what is written here.
constexpr const char* kIdleSwitches[] = {"--keep-newlines",
                                         "--trust-remote-code",
                                         "--tokenizer-sentencepiece-legacy",
                                         "--no-tokenizer-sentencepiece-ignore-extra-whitespaces",
                                         "--tokenizer-hf-no-use-fast",
                                         "--tokenizer-hf-no-include-special-tokens"};
constexpr const char* kIdleOptions[] = {"--lang",
                                        "--vocab-file",
                                        "--merge-file",
                                        "--vocab-extra-ids",
                                        "--tokenizer-model",
                                        "--tokenizer-metadata",
                                        "--chat-template",
                                        "--tiktoken-pattern",
                                        "--tiktoken-num-special-tokens",
                                        "--null-tokenizer-pad-id",
                                        "--padded-vocab-size",
                                        "--make-vocab-size-divisible-by"};
constexpr const char* kIdleLists[] = {"--tokenizer-special-tokens"};

ToolArguments parse(const std::vector<std::string>& words) {
  std::set<std::string> switches = {"--append-eod", "--keep-sequential-samples", "--split-sentences",
                                    "--find-optimal-num-workers"};
  std::set<std::string> options = {"--input",   "--output-prefix", "--tokenizer-type", "--vocab-size",
                                   "--workers", "--partitions",    "--log-interval",   "--null-tokenizer-eod-id"};
  std::set<std::string> lists = {"--json-keys"};
  switches.insert(std::begin(kIdleSwitches), std::end(kIdleSwitches));
  options.insert(std::begin(kIdleOptions), std::end(kIdleOptions));
  lists.insert(std::begin(kIdleLists), std::end(kIdleLists));
  ToolArguments arguments("preprocess", words, switches, options, 0, lists);
  const std::string type = arguments.text("--tokenizer-type").value_or("GPT2BPETokenizer");
  PGPT_CHECK(ConfigError, type == "NullTokenizer", "preprocess: --tokenizer-type ", type,
             arguments.has("--tokenizer-type") ? "" : " (the default)",
             ": only texts of token ids are read here, with --tokenizer-type NullTokenizer; scripts/text_to_ids.py "
             "makes them of text with a Hugging Face tokenizer, and data of Megatron-LM's tools/preprocess_data.py "
             "need no further step");
  PGPT_CHECK(
      ConfigError, !arguments.has("--split-sentences"),
      "preprocess: --split-sentences is not supported; give lists of texts in the input, each becomes a sequence "
      "of its own");
  PGPT_CHECK(
      ConfigError, !arguments.has("--find-optimal-num-workers"),
      "preprocess: --find-optimal-num-workers is not supported; the default of --workers is the number of cores");
  arguments.require({"--input", "--output-prefix", "--vocab-size"});
  const auto warn = [&](const char* name) {
    if (!arguments.has(name)) return;
    std::fprintf(stderr, "gpt_tool: WARNING: %s has no effect: token ids are written as they stand in the input\n",
                 name);
  };
  std::for_each(std::begin(kIdleSwitches), std::end(kIdleSwitches), warn);
  std::for_each(std::begin(kIdleOptions), std::end(kIdleOptions), warn);
  std::for_each(std::begin(kIdleLists), std::end(kIdleLists), warn);
  return arguments;
}

/// The file of that name, else all files that match the pattern, sorted.
std::vector<std::string> input_files(const std::string& input) {
  if (std::filesystem::exists(input) || input.find_first_of("*?[") == std::string::npos) return {input};
  glob_t found{};
  const int problem = ::glob(input.c_str(), 0, nullptr, &found);
  std::vector<std::string> files(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  PGPT_CHECK(DataError, problem == 0 && !files.empty(), "preprocess: no file matches --input ", input);
  return files;
}

std::atomic<int> stop_signal{0};
static_assert(std::atomic<int>::is_always_lock_free);

/// While it lives, a first SIGINT, SIGTERM or SIGHUP asks the run to stop and clean up; a second one kills it.
class StopSignals {
 public:
  StopSignals() {
    struct sigaction action{};
    action.sa_handler = [](int number) { stop_signal = number; };
    action.sa_flags = static_cast<int>(SA_RESETHAND) | SA_RESTART;
    sigemptyset(&action.sa_mask);
    for (std::size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &action, &before_[i]);
  }
  ~StopSignals() {
    for (std::size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  static void check() {
    const int number = stop_signal;
    if (number == 0) return;
    throw Error(static_cast<ExitCode>(128 + number),
                concat("preprocess: stopped by signal ", number, "; nothing was written"));
  }

 private:
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
  struct sigaction before_[std::size(kSignals)];
};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

ExitCode tool_preprocess(const std::vector<std::string>& words) {
  const ToolArguments arguments = parse(words);
  config::Config config;
  config.data.tokenizer_type = "NullTokenizer";
  config.model.vocab_size = arguments.integer("--vocab-size").value_or(0);
  config.data.eod_id = arguments.integer("--null-tokenizer-eod-id").value_or(-1);
  const data::TokenizerFacts tokenizer = data::resolve_tokenizer(config);

  data::PreprocessOptions options;
  options.inputs = input_files(*arguments.text("--input"));
  options.output_prefix = *arguments.text("--output-prefix");
  options.keys = arguments.list("--json-keys").value_or(options.keys);
  options.append_eod = arguments.has("--append-eod");
  options.eod = tokenizer.eod;
  options.vocab_size = tokenizer.vocab_size;
  options.partitions = arguments.integer("--partitions").value_or(1);
  options.keep_sequential_samples = arguments.has("--keep-sequential-samples");
  options.workers = arguments.integer("--workers").value_or(std::max(1U, std::thread::hardware_concurrency()));
  const std::optional<std::int64_t> interval = arguments.integer("--log-interval");
  PGPT_CHECK(ConfigError, !interval || *interval > 0, "preprocess: --log-interval is 0; it must be above 0");

  const StopSignals signals;
  const Clock::time_point start = Clock::now();
  double reported = 0;
  std::int64_t reported_documents = 0;
  const auto progress = [&](const data::PreprocessResult& so_far) {
    StopSignals::check();
    const double seconds = seconds_since(start);
    const bool due = interval ? so_far.documents / *interval > reported_documents / *interval
                              : seconds - reported >= kSecondsBetweenReports;
    if (!due) return;
    reported = seconds;
    reported_documents = so_far.documents;
    std::fprintf(stderr, "%lld documents, %lld tokens, %.1f MB of text, %.1f MB/s, %.0f s\n",
                 static_cast<long long>(so_far.documents), static_cast<long long>(so_far.tokens()),
                 static_cast<double>(so_far.input_bytes) / 1e6,
                 static_cast<double>(so_far.input_bytes) / 1e6 / std::max(seconds, 1e-9), seconds);
  };
  const data::PreprocessResult result = data::preprocess_jsonl(
      options, [&](std::string_view text) { return data::null_tokenize(text, tokenizer.vocab_size); }, progress);
  const double seconds = seconds_since(start);

  const std::string type(data::name_of(data::token_type_for_vocab(options.vocab_size)));
  for (const data::PreprocessedPair& pair : result.pairs) {
    std::printf("wrote %s.bin and .idx: %lld sequences, %lld tokens of type %s\n", pair.prefix.c_str(),
                static_cast<long long>(pair.sequences), static_cast<long long>(pair.tokens), type.c_str());
  }
  std::printf("%lld documents, %lld tokens, %.1f s\n", static_cast<long long>(result.documents),
              static_cast<long long>(result.tokens()), seconds);
  if (options.append_eod) {
    std::printf("end of document: id %lld%s\n", static_cast<long long>(options.eod),
                arguments.has("--null-tokenizer-eod-id")
                    ? ""
                    : " (the last one; --null-tokenizer-eod-id names another, where texts use it)");
  }
  std::printf("train on it with: --data-path %s --tokenizer-type NullTokenizer --vocab-size %lld",
              result.pairs.front().prefix.c_str(), static_cast<long long>(options.vocab_size));
  if (options.eod != options.vocab_size - 1) {
    std::printf(" --null-tokenizer-eod-id %lld", static_cast<long long>(options.eod));
  }
  std::printf("\n");
  return ExitCode::kDone;
}

}  // namespace pgpt::training

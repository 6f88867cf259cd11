#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "pgpt/base/error.h"
#include "pgpt/config/config.h"
#include "pgpt/config/parse.h"
#include "values.h"

namespace pgpt::config {

/// One validation: options go in through `values`, the typed configuration comes out. Derived values are stored back,
/// so that the argument dump shows them.
struct Derivation {
  Values& values;
  Config& config;
  std::int64_t world_size;

  void notice(std::string line) { config.notices.push_back(std::move(line)); }
  /// The integer, which must be above 0. Throws ConfigError naming the option.
  [[nodiscard]] std::int64_t positive(const char* destination) const;
  /// The same for a value that may be left out.
  [[nodiscard]] std::optional<std::int64_t> maybe_positive(const char* destination) const;
  /// Warns that the value does nothing without the options `needed`, unless it is the default.
  void warn_unused(const char* destination, const char* needed);
  void warn_unused(std::initializer_list<const char*> destinations, const char* needed);
};

// Each group of checks of spec/flags.md 1, called in that order.
void derive_world(Derivation& d);            // 2, 3, 4
void derive_shorthands(Derivation& d);       // 5, 6, 7
void derive_batches(Derivation& d);          // 8, 9
void derive_pipeline(Derivation& d);         // 11, 12
void derive_overlap(Derivation& d);          // 13
void derive_precision(Derivation& d);        // 14
void derive_run_length(Derivation& d);       // 15, 16
void check_microbatches(Derivation& d);      // spec/training.md 6.1 and 8, once batches and stages are known
void derive_model_sizes(Derivation& d);      // 17, 18, 19
void derive_intervals(Derivation& d);        // 20
void derive_weight_decay(Derivation& d);     // 21
void derive_recompute(Derivation& d);        // 22
void derive_tensor_parallel(Derivation& d);  // 23
void check_gtp(Derivation& d);               // 25
void derive_model_kind(Derivation& d);       // 26, 27, 30
void derive_experts(Derivation& d);          // 28
void derive_data(Derivation& d);             // 29
void derive_checkpoint(Derivation& d);       // 32
void check_heads(Derivation& d);             // 33
void derive_schedules(Derivation& d);        // 35 and spec/training.md 7
void derive_logging(Derivation& d);
void derive_tokenizer(Derivation& d);  // 34, last part

/// Virtual stages of --pipeline-model-parallel-layout as letter strings, e.g. {"Ett", "ttL"}. Throws ConfigError.
[[nodiscard]] std::vector<std::string> expand_pipeline_layout(const std::string& layout);

/// --use-checkpoint-args: puts the checkpoint's model options into `values`, with one notice each. Throws ConfigError
/// or DataError.
void take_checkpoint_arguments(Values& values, const ParseContext& context, std::vector<std::string>& notices);

/// All of them in order; fills `config`, the argument dump included.
void derive_all(Derivation& d);

/// Stores the vocabulary in the configuration, with the padding rules and the start-up line.
void set_vocabulary(Config& config, std::int64_t vocab_size, std::int64_t eod_id, std::int64_t pad_id);

}  // namespace pgpt::config

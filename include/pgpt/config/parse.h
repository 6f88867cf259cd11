#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "pgpt/config/config.h"

namespace pgpt::config {

/// What the caller found out about this process's machine; the configuration itself never touches a device.
struct MachineFacts {
  bool built_with_cuda = false;       ///< this build has CUDA kernels and NCCL
  int visible_gpus = 0;               ///< GPUs this process can use
  std::int64_t local_world_size = 1;  ///< ranks of this job on this machine
};

/// Where the command line is read: the launch environment and the machine.
struct ParseContext {
  std::int64_t world_size = 1;
  int local_rank = 0;
  MachineFacts machine;
  /// Argument dump of the checkpoint in a --load folder (at --ckpt-step, if given), nothing when it holds none; may
  /// throw. Only --use-checkpoint-args calls it.
  std::function<std::optional<std::map<std::string, std::string>>(const std::string& load,
                                                                  std::optional<std::int64_t> step)>
      checkpoint_arguments;
};

/// What the program was asked to do.
struct ParsedCommand {
  enum class Action { kRun, kDryRun, kPrintConfig, kHelp, kVersion, kHelpMarkdown };
  Action action = Action::kRun;
  Config config;     ///< filled for kRun, kDryRun and kPrintConfig
  std::string text;  ///< what to print to stdout for every action but kRun
  /// One line for each option that has no effect here, once each; `config.notices` holds the other lines.
  std::vector<std::string> warnings;
};

/// Reads, validates and derives everything that needs no device and no network. `arguments` lack the program name.
/// Throws ConfigError, and DataError for unreadable files.
/// For kRun it has called check_runnable() and checked the backend against the machine.
[[nodiscard]] ParsedCommand parse_command_line(const std::vector<std::string>& arguments, const ParseContext& context);

/// Throws ConfigError for what parses and validates but cannot be run yet, naming the option and what to do.
void check_runnable(const Config& config);

/// Chooses the backend when none was given, and NCCL for GTP where an automatic transport cannot copy. Throws
/// ConfigError when the backend asked for is missing on this machine; adds a notice when ranks must share a GPU.
void resolve_backend(Config& config, const MachineFacts& machine);

/// Throws ConfigError when backend or machine cannot serve --gtp-transport or --cuda-graph-impl.
void check_devices(const Config& config, const MachineFacts& machine);

/// Rows of the embedding table: `vocab_size` rounded up to a multiple of divisor x tensor parallel size.
[[nodiscard]] std::int64_t padded_vocab_size(std::int64_t vocab_size, std::int64_t divisor, std::int64_t tensor);

/// Stores a tokenizer's vocabulary size, end-of-document and pad ids (-1 = none), pads the vocabulary and adds the line
/// that says so. NullTokenizer is resolved by parsing; for other types call it once with what data::resolve_tokenizer()
/// found. Throws ConfigError on contradictions.
void apply_tokenizer(Config& config, std::int64_t vocab_size, std::int64_t eod_id, std::int64_t pad_id);

/// The argument dump that rank 0 prints at start, without a final newline.
[[nodiscard]] std::string format_arguments(const Config& config);

/// Version of this program, e.g. "0.1.0".
[[nodiscard]] std::string version();

}  // namespace pgpt::config

#pragma once

#include <map>
#include <string>
#include <vector>

#include "pgpt/config/config.h"

// What a model is, as command-line options say it: the common language of runs, checkpoints and other programs' files.
namespace pgpt::checkpoint {

/// One option that decides what the weights mean.
struct Trait {
  std::string option;  ///< e.g. "--num-layers"
  std::string value;   ///< empty for a switch
  bool is_switch = false;
  bool given = true;  ///< of a switch

  /// "--num-layers 4", "--swiglu", or "no --swiglu".
  [[nodiscard]] std::string text() const;
  bool operator==(const Trait&) const = default;
};

/// Every option that decides the architecture of a dense model, in a fixed order; equal lists mean equal models.
[[nodiscard]] std::vector<Trait> traits(const config::ModelConfig& model);

/// The words of a command line that build this model (without training options).
[[nodiscard]] std::vector<std::string> architecture_flags(const config::ModelConfig& model);

/// Throws ConfigError naming the first option in which `mine` (of this run) differs from `theirs` (of `where`), with
/// both values.
void check_same_architecture(const config::ModelConfig& mine, const config::ModelConfig& theirs,
                             const std::string& where);

/// The model that an argument dump describes (architecture, sizes and dropouts). Throws DataError naming a missing or
/// malformed argument.
[[nodiscard]] config::ModelConfig model_of_arguments(const std::map<std::string, std::string>& arguments,
                                                     const std::string& where);

/// The argument dump of a run with this model, cut to what decides the architecture: what an imported checkpoint
/// stores.
[[nodiscard]] std::map<std::string, std::string> arguments_of_model(const config::ModelConfig& model);

/// Shortest text that reads back as the same number.
[[nodiscard]] std::string number_text(double value);

}  // namespace pgpt::checkpoint

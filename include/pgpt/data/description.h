#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pgpt/data/split.h"

namespace pgpt::data {

/// A double as Python prints it: shortest digits that read back equal, always with a point or an exponent.
[[nodiscard]] std::string python_float(double value);

/// The reference's description of one data set: JSON with 4-space indentation, whose MD5 names the cache files.
struct DatasetDescription {
  std::string class_name;
  std::optional<std::string> path;
  std::optional<std::int64_t> num_samples;
  Split split = Split::kTrain;
  std::uint32_t seed = 1234;
  std::int64_t seq_length = 0;
  std::optional<std::string> split_string;
  std::optional<SplitMatrix> matrix;
  std::vector<std::pair<std::string, std::optional<std::string>>>
      tokenizer;  ///< entries of the tokenizer object, in order

  [[nodiscard]] std::string text() const;
};

/// Description of a blend from the descriptions of its parts. `weights` are printed as integers when `integer_weights`.
[[nodiscard]] std::string blend_description(std::span<const std::string> parts, Split split,
                                            std::span<const double> weights, bool integer_weights,
                                            std::optional<std::int64_t> size);

}  // namespace pgpt::data

#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace pgpt::data {

enum class Split : int { kTrain = 0, kValid = 1, kTest = 2 };
/// "train", "valid" or "test".
[[nodiscard]] const char* name_of(Split split);

/// Half-open range of documents.
struct DocumentRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  [[nodiscard]] std::int64_t size() const { return end - begin; }
  bool operator==(const DocumentRange&) const = default;
};

/// Sum in the order of numpy's pairwise summation.
[[nodiscard]] double pairwise_sum(std::span<const double> values);
/// Each value divided by pairwise_sum.
[[nodiscard]] std::vector<double> normalize(std::span<const double> values);

/// Cumulative shares [begin, end) of train, valid and test; a share of zero is absent.
using SplitMatrix = std::array<std::optional<std::pair<double, double>>, 3>;

/// The three normalised shares of a --split string; throws ConfigError naming the string when it is malformed.
[[nodiscard]] std::vector<double> parse_split(const std::string& text);
[[nodiscard]] SplitMatrix split_matrix(std::span<const double> shares);
/// Documents of one split among `count`; empty optional when the split has no share.
[[nodiscard]] std::optional<DocumentRange> split_range(const SplitMatrix& matrix, Split split, std::int64_t count);

}  // namespace pgpt::data

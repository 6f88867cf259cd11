#include "pgpt/data/split.h"

#include <charconv>
#include <cmath>

#include "pgpt/base/error.h"

namespace pgpt::data {

const char* name_of(Split split) {
  switch (split) {
    case Split::kTrain:
      return "train";
    case Split::kValid:
      return "valid";
    default:
      return "test";
  }
}

double pairwise_sum(std::span<const double> values) {
  const std::size_t n = values.size();
  if (n < 8) {
    double sum = 0.0;
    for (const double value : values) sum += value;
    return sum;
  }
  if (n <= 128) {
    std::array<double, 8> r{};
    for (std::size_t k = 0; k < 8; ++k) r[k] = values[k];
    std::size_t i = 8;
    for (; i + 8 <= n; i += 8) {
      for (std::size_t k = 0; k < 8; ++k) r[k] += values[i + k];
    }
    double sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    for (; i < n; ++i) sum += values[i];
    return sum;
  }
  const std::size_t half = n / 2 / 8 * 8;
  return pairwise_sum(values.first(half)) + pairwise_sum(values.subspan(half));
}

std::vector<double> normalize(std::span<const double> values) {
  const double sum = pairwise_sum(values);
  std::vector<double> result(values.begin(), values.end());
  for (double& value : result) value /= sum;
  return result;
}

std::vector<double> parse_split(const std::string& text) {
  std::vector<double> numbers;
  const auto part_of_number = [](char c) { return (c >= '0' && c <= '9') || c == '.'; };
  for (std::size_t i = 0; i < text.size();) {
    if (!part_of_number(text[i])) {
      ++i;
      continue;
    }
    std::size_t end = i;
    while (end < text.size() && part_of_number(text[end])) ++end;
    double value = 0;
    const auto parsed = std::from_chars(text.data() + i, text.data() + end, value);
    PGPT_CHECK(ConfigError, parsed.ec == std::errc() && parsed.ptr == text.data() + end, "--split '", text, "': '",
               text.substr(i, end - i), "' is not a number");
    numbers.push_back(value);
    i = end;
  }
  PGPT_CHECK(ConfigError, numbers.size() <= 3, "--split '", text, "' has ", numbers.size(),
             " numbers; give at most three (train, validation, test)");
  numbers.resize(3, 0.0);
  PGPT_CHECK(ConfigError, pairwise_sum(numbers) > 0, "--split '", text,
             "' gives no share to any split; give weights such as 969,30,1");
  return normalize(numbers);
}

SplitMatrix split_matrix(std::span<const double> shares) {
  SplitMatrix matrix;
  double begin = 0.0;
  for (std::size_t i = 0; i < matrix.size(); ++i) {
    const double end = begin + shares[i];
    if (end > begin) matrix[i] = {begin, end};
    begin = end;
  }
  return matrix;
}

std::optional<DocumentRange> split_range(const SplitMatrix& matrix, Split split, std::int64_t count) {
  const auto& bounds = matrix[static_cast<std::size_t>(split)];
  if (!bounds) return std::nullopt;
  const auto position = [count](double share) {
    return static_cast<std::int64_t>(std::nearbyint(share * static_cast<double>(count)));
  };
  return DocumentRange{position(bounds->first), position(bounds->second)};
}

}  // namespace pgpt::data

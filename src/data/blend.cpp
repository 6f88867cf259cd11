#include "pgpt/data/blend.h"

#include <charconv>
#include <cmath>
#include <limits>

#include "pgpt/base/error.h"
#include "pgpt/data/split.h"

namespace pgpt::data {
namespace {

std::string strip(const std::string& text) {
  const char* blanks = " \t\n\r\f\v";
  const auto begin = text.find_first_not_of(blanks);
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(blanks) - begin + 1);
}

/// A number as Python's float() reads it: surrounding blanks, a sign, and single underscores between digits are
/// allowed.
std::optional<double> python_number(const std::string& text) {
  const std::string stripped = strip(text);
  std::string plain;
  const auto digit = [&](std::size_t i) { return i < stripped.size() && stripped[i] >= '0' && stripped[i] <= '9'; };
  for (std::size_t i = 0; i < stripped.size(); ++i) {
    if (stripped[i] == '_') {
      if (i == 0 || !digit(i - 1) || !digit(i + 1)) return std::nullopt;
    } else if (!(i == 0 && stripped[i] == '+' && stripped.size() > 1 && stripped[1] != '-')) {
      plain += stripped[i];
    }
  }
  double value = 0;
  const auto parsed = std::from_chars(plain.data(), plain.data() + plain.size(), value);
  if (plain.empty() || parsed.ptr != plain.data() + plain.size()) return std::nullopt;
  if (parsed.ec == std::errc::result_out_of_range) return std::numeric_limits<double>::infinity();
  if (parsed.ec != std::errc()) return std::nullopt;
  return value;
}

/// Position of the largest weight * factor - used; the first wins a tie.
std::size_t most_behind(std::span<const double> weights, std::span<const std::int64_t> used, double factor,
                        std::span<const std::int64_t> limits) {
  std::size_t best = weights.size();
  double best_error = 0;
  for (std::size_t d = 0; d < weights.size(); ++d) {
    if (!limits.empty() && used[d] >= limits[d]) continue;
    // The build forbids fusing these two roundings (-ffp-contract=off).
    const double wanted = weights[d] * factor;
    const double error = wanted - static_cast<double>(used[d]);
    if (best == weights.size() || error > best_error) best = d, best_error = error;
  }
  return best;
}

BlendIndex interleave(std::span<const double> weights, std::int64_t size, std::span<const std::int64_t> limits) {
  PGPT_CHECK(ConfigError, weights.size() < 32767, "a blend may have at most 32766 data sets, found ", weights.size());
  BlendIndex index{IntArray(IntType::kInt16, size), IntArray(IntType::kInt64, size)};
  const auto dataset = index.dataset.fill<std::int16_t>();
  const auto sample = index.dataset_sample.fill<std::int64_t>();
  std::vector<std::int64_t> used(weights.size(), 0);
  for (std::size_t s = 0; s < dataset.size(); ++s) {
    const double factor = std::max(static_cast<double>(s), 1.0);
    const std::size_t d = most_behind(weights, used, factor, limits);
    dataset[s] = static_cast<std::int16_t>(d);
    sample[s] = used[d]++;
  }
  return index;
}

}  // namespace

BlendList parse_blend_list(std::span<const std::string> entries, const std::string& option) {
  PGPT_CHECK(ConfigError, !entries.empty(), option, " needs at least one data prefix");
  BlendList list;
  std::vector<double> weights;
  std::size_t numbers = 0;
  if (entries.size() % 2 == 0) {
    for (std::size_t i = 0; i < entries.size(); i += 2) {
      const auto value = python_number(entries[i]);
      if (!value) continue;
      ++numbers;
      weights.push_back(*value);
    }
  }
  const bool weighted = numbers > 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::string entry = strip(entries[i]);
    PGPT_CHECK(ConfigError, !entry.empty(), option, ": entry ", i + 1, " is empty");
    if (weighted && i % 2 == 0) {
      const auto value = python_number(entry);
      PGPT_CHECK(ConfigError, value, option, ": '", entry, "' stands where a weight is expected (", numbers, " of ",
                 entries.size() / 2, " pairs start with a number); give a weight for every prefix or for none");
      PGPT_CHECK(ConfigError, std::isfinite(*value) && *value > 0, option, ": the weight '", entry,
                 "' must be a positive number");
    } else {
      list.prefixes.push_back(entry);
    }
  }
  if (weighted) list.weights = weights;
  return list;
}

BlendSizes blend_sizes(std::span<const double> weights, std::int64_t num_samples, double surplus) {
  BlendSizes sizes;
  for (const double share : normalize(weights)) {
    const double target = std::ceil(static_cast<double>(num_samples) * share);
    sizes.target.push_back(static_cast<std::int64_t>(target));
    sizes.built.push_back(static_cast<std::int64_t>(std::ceil(target * (1.0 + surplus))));
  }
  return sizes;
}

BlendIndex blend_by_weight(std::span<const double> weights, std::int64_t size) {
  return interleave(normalize(weights), size, {});
}

BlendIndex blend_all(std::span<const std::int64_t> sizes) {
  std::int64_t total = 0;
  for (const std::int64_t size : sizes) total += size;
  std::vector<double> weights;
  for (const std::int64_t size : sizes) weights.push_back(static_cast<double>(size) / static_cast<double>(total));
  return interleave(weights, total, sizes);
}

BlendedDataset::BlendedDataset(std::vector<std::shared_ptr<const Dataset>> parts, std::span<const std::string> names,
                               BlendIndex index)
    : parts_(std::move(parts)), index_(std::move(index)) {
  PGPT_ASSERT(!parts_.empty() && names.size() == parts_.size());
  std::vector<std::int64_t> asked(parts_.size(), 0);
  for (std::int64_t s = 0; s < size(); ++s) ++asked[static_cast<std::size_t>(index_.dataset[s])];
  for (std::size_t d = 0; d < parts_.size(); ++d) {
    PGPT_CHECK(DataError, asked[d] <= parts_[d]->size(), "the blend asks ", names[d], " for ", asked[d],
               " samples, but it was built with ", parts_[d]->size(), "; raise --mid-level-dataset-surplus");
  }
}

Sample BlendedDataset::sample(std::int64_t index) const {
  PGPT_ASSERT(index >= 0 && index < size());
  return parts_[static_cast<std::size_t>(index_.dataset[index])]->sample(index_.dataset_sample[index]);
}

}  // namespace pgpt::data

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pgpt/data/gpt_dataset.h"
#include "pgpt/data/int_array.h"

namespace pgpt::data {

/// Prefixes of a data-path list and their weights, if it has any.
struct BlendList {
  std::vector<std::string> prefixes;
  std::optional<std::vector<double>> weights;
};

/// Reads `A`, `A B C` or `w1 A w2 B`; `option` names the flag in messages. Throws ConfigError for mixed lists and for
/// weights that are not positive finite numbers.
[[nodiscard]] BlendList parse_blend_list(std::span<const std::string> entries, const std::string& option);

/// Samples each part of a weighted blend contributes, and how many it is built with (surplus included).
struct BlendSizes {
  std::vector<std::int64_t> target, built;
};
[[nodiscard]] BlendSizes blend_sizes(std::span<const double> weights, std::int64_t num_samples, double surplus);

/// Which part gives sample s of a blend, and which of that part's samples it is.
struct BlendIndex {
  IntArray dataset;         ///< int16 [size]
  IntArray dataset_sample;  ///< int64 [size]
};
/// Greedy interleaving by weight; weights are normalised here (again).
[[nodiscard]] BlendIndex blend_by_weight(std::span<const double> weights, std::int64_t size);
/// Interleaving that uses every sample of every part exactly once.
[[nodiscard]] BlendIndex blend_all(std::span<const std::int64_t> sizes);

/// Several data sets mixed sample by sample.
class BlendedDataset : public Dataset {
 public:
  /// Throws DataError when the index asks a part for more samples than it has; `names` are for that message.
  BlendedDataset(std::vector<std::shared_ptr<const Dataset>> parts, std::span<const std::string> names,
                 BlendIndex index);
  [[nodiscard]] std::int64_t size() const override { return index_.dataset.rows(); }
  [[nodiscard]] Sample sample(std::int64_t index) const override;
  [[nodiscard]] std::int64_t seq_length() const override { return parts_.front()->seq_length(); }
  [[nodiscard]] const BlendIndex& index() const { return index_; }
  [[nodiscard]] const Dataset& part(std::size_t i) const { return *parts_[i]; }

 private:
  std::vector<std::shared_ptr<const Dataset>> parts_;
  BlendIndex index_;
};

}  // namespace pgpt::data

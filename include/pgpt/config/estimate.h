#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pgpt/config/config.h"

namespace pgpt::config {

/// Parameters and bytes of one rank; all ranks of a pipeline stage have the same.
struct RankEstimate {
  std::int64_t parameters = 0;  ///< held by the rank, alignment padding of GTP shards included
  std::int64_t weight_bytes = 0;
  std::int64_t gradient_bytes = 0;  ///< main gradients
  std::int64_t master_bytes = 0;    ///< fp32 copies of 16-bit weights
  std::int64_t moment_bytes = 0;    ///< m and v, or the momentum
  double activation_bytes = 0;      ///< approximate
  [[nodiscard]] std::int64_t state_bytes() const { return weight_bytes + gradient_bytes + master_bytes + moment_bytes; }
};

/// Sizes of the whole job.
struct Estimate {
  std::int64_t total_parameters = 0;  ///< of the model itself: no padding of shards, nothing counted twice
  std::vector<RankEstimate> stages;   ///< by pipeline rank
  double step_flops = 0;              ///< floating-point operations of one global batch (spec/training.md 11)
};

/// Computes the sizes. Throws ConfigError when `model.padded_vocab_size` is not known yet.
[[nodiscard]] Estimate estimate(const Config& config);

/// What --dry-run prints: sizes, memory of a rank, mesh and groups.
[[nodiscard]] std::string describe_dry_run(const Config& config);

}  // namespace pgpt::config

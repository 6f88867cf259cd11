#pragma once

#include <cstdint>
#include <vector>

#include "pgpt/config/config.h"
#include "pgpt/config/estimate.h"

namespace pgpt::config {

/// Where a rank stands in the pipeline and what it runs.
struct StagePlace {
  std::int64_t layers = 0;  ///< transformer layers of all its virtual stages
  std::int64_t index = 0;   ///< pipeline rank
  bool first = true;        ///< holds the embedding
  bool last = true;         ///< holds the output layer and the loss
};

/// Rows of one GTP shard: `rows` padded so that each of `gtp` shards is a multiple of 16 rows.
[[nodiscard]] std::int64_t shard_rows(std::int64_t rows, std::int64_t gtp);

/// The moments of a training step that can need most memory, in their order. They follow what the model's layers keep
/// and free in backward; parts that only dry runs know (experts, pipelines, prediction layers) are approximate.
[[nodiscard]] std::vector<MemoryMoment> memory_moments(const Config& config, const StagePlace& place);

/// Buffers that live as long as the run.
[[nodiscard]] double buffer_bytes(const Config& config, const StagePlace& place);

}  // namespace pgpt::config

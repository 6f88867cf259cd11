#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>

#include "pgpt/kernels/kernels.h"

namespace pgpt::parameter {

/// Named random streams of initialisation and dropout (spec/model.md 9.1). All depend on the seed and the
/// model-parallel ranks only.
struct RandomStreams {
  /// `tensor_rank`, `gtp_rank`, `pipeline_rank` are coordinates of the calling rank; `gtp` the degree.
  /// `data_rank_offset` is 10 * data rank with --data-parallel-random-init, else 0.
  RandomStreams(std::int64_t seed, std::int64_t tensor_rank, std::int64_t gtp_rank, std::int64_t pipeline_rank,
                std::int64_t data_rank_offset = 0);

  kernels::PhiloxState default_device;  ///< hidden dropout
  kernels::PhiloxState model_parallel;  ///< dense weights and attention dropout
  kernels::PhiloxState gtp_shards;      ///< Transformer Engine linears under GTP: a stream of its own for each peer
  at::Generator host;                   ///< CPU mt19937: position table and --use-cpu-initialization
};

}  // namespace pgpt::parameter

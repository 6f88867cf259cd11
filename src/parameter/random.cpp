#include "pgpt/parameter/random.h"

#include <ATen/CPUGeneratorImpl.h>

namespace pgpt::parameter {

RandomStreams::RandomStreams(std::int64_t seed, std::int64_t tensor_rank, std::int64_t gtp_rank,
                             std::int64_t pipeline_rank, std::int64_t data_rank_offset) {
  const auto base = static_cast<std::uint64_t>(seed + 100 * pipeline_rank + data_rank_offset);
  const std::uint64_t model = base + 2718 + static_cast<std::uint64_t>(tensor_rank);
  default_device.seed = base;
  model_parallel.seed = model;
  gtp_shards.seed = model + 65536 * (1 + static_cast<std::uint64_t>(gtp_rank));
  host = at::detail::createCPUGenerator(base);
}

}  // namespace pgpt::parameter

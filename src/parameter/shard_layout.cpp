#include "pgpt/parameter/shard_layout.h"

#include <algorithm>

#include "pgpt/base/error.h"

namespace pgpt::parameter {

std::vector<std::int64_t> ShardLayout::local_shape() const {
  std::vector<std::int64_t> shape = logical_shape;
  for (const Cut& cut : cuts) {
    std::int64_t& size = shape.at(static_cast<std::size_t>(cut.dim));
    PGPT_ASSERT((size + cut.padding) % cut.count == 0, "a cut must divide its dimension");
    size = (size + cut.padding) / cut.count;
  }
  return shape;
}

ShardLayout::Range ShardLayout::local_range(std::int64_t dim) const {
  Range range{0, logical_shape.at(static_cast<std::size_t>(dim))};
  for (const Cut& cut : cuts) {
    if (cut.dim != dim) continue;
    const std::int64_t part = (range.end - range.begin + cut.padding) / cut.count;
    const std::int64_t begin = std::min(range.begin + cut.index * part, range.end);
    range = {begin, std::min(begin + part, range.end)};
  }
  return range;
}

bool ShardLayout::sharded_over(mesh::Axis axis) const {
  return std::any_of(cuts.begin(), cuts.end(), [axis](const Cut& cut) { return cut.axis == axis; });
}

std::int64_t ShardLayout::num_logical_elements() const {
  std::int64_t n = 1;
  for (const std::int64_t size : logical_shape) n *= size;
  return n;
}

std::int64_t gtp_padding(std::int64_t rows, std::int64_t gtp, std::int64_t alignment) {
  if (gtp == 1) return 0;
  const std::int64_t unit = alignment * gtp;
  return (unit - rows % unit) % unit;
}

}  // namespace pgpt::parameter

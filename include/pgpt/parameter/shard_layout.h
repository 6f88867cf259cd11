#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pgpt/mesh/mesh.h"

namespace pgpt::parameter {

/// One cut of a tensor along one dimension into equal parts, of which this rank holds part `index`.
struct Cut {
  mesh::Axis axis = mesh::Axis::kGtp;
  std::int64_t dim = 0;
  std::int64_t index = 0;
  std::int64_t count = 1;
  std::int64_t padding = 0;  ///< rows appended to the dimension before cutting, so that the parts are equal and aligned
};

/// Where a rank's part of a parameter lies in the whole: logical shape and an ordered list of cuts (TP first, then GTP
/// rows).
struct ShardLayout {
  std::vector<std::int64_t> logical_shape;
  std::vector<Cut> cuts;

  /// Shape of the local part, padding included.
  [[nodiscard]] std::vector<std::int64_t> local_shape() const;
  /// Half-open range of the logical dimension that the local part holds, padding excluded (it may be empty).
  struct Range {
    std::int64_t begin = 0, end = 0;
  };
  [[nodiscard]] Range local_range(std::int64_t dim) const;
  [[nodiscard]] bool sharded_over(mesh::Axis axis) const;
  [[nodiscard]] std::int64_t num_logical_elements() const;
};

/// Rows that a matrix of `rows` rows is padded by so that `gtp` equal shards are multiples of `alignment` rows
/// (spec/gtp.md 7).
[[nodiscard]] std::int64_t gtp_padding(std::int64_t rows, std::int64_t gtp, std::int64_t alignment = 16);

}  // namespace pgpt::parameter

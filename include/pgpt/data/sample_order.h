#pragma once

#include <cstdint>
#include <optional>

#include "pgpt/data/documents.h"
#include "pgpt/data/int_array.h"
#include "pgpt/data/split.h"

namespace pgpt::data {

/// What fixes the order of a data set's samples.
struct OrderRequest {
  DocumentRange documents;
  std::optional<std::int64_t> num_samples;  ///< empty = exactly one epoch
  std::int64_t seq_length = 0;
  std::uint32_t seed = 1234;
  std::int64_t extra_token = 1;    ///< tokens that neighbouring samples share: 1, or 0 when labels are rolled
  bool keep_last_partial = false;  ///< only for a validation set: the last sample may be shorter than the sequence
};

/// Epoch arithmetic of an order, known before anything is shuffled.
struct OrderPlan {
  std::int64_t tokens_per_epoch = 0;
  std::int64_t epochs = 1;
  std::int64_t samples = 0;
  bool separate_last_epoch = false;
  std::int64_t samples_before_last_epoch = 0;  ///< meaningful when epochs > 1
  bool wide_sample_index = false;              ///< int64 instead of int32
};

/// The three index arrays: sample i starts at (position, token offset) row shuffle[i] and ends in the row after it,
/// positions pointing into the document index.
struct SampleOrder {
  OrderPlan plan;
  IntArray document_index;  ///< int32 [epochs * documents]
  IntArray sample_index;    ///< int32 or int64 [samples + 1, 2]
  IntArray shuffle_index;   ///< uint32 or int64 [samples]
};

/// Throws DataError when the range holds no token.
[[nodiscard]] OrderPlan plan_order(const DocumentSource& source, const OrderRequest& request);
/// Builds the arrays; deterministic in (lengths, request).
[[nodiscard]] SampleOrder build_order(const DocumentSource& source, const OrderRequest& request);

}  // namespace pgpt::data

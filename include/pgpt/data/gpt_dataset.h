#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pgpt/data/documents.h"
#include "pgpt/data/index_cache.h"
#include "pgpt/data/sample_order.h"

namespace pgpt::data {

/// One training sequence of S tokens.
struct Sample {
  std::vector<std::int64_t> tokens, labels, position_ids;  ///< [S]
  std::vector<float> loss_mask;                            ///< [S], 0 or 1
  /// Lengths of the document pieces that were joined (sum S, no zeros).
  std::vector<std::int32_t> document_lengths;
  /// First positions of the attention segments (starts with 0); empty = causal over the whole sequence.
  std::vector<std::int32_t> segment_starts;
};

/// A finite sequence of samples in a fixed order; safe to read from several threads.
class Dataset {
 public:
  virtual ~Dataset() = default;
  [[nodiscard]] virtual std::int64_t size() const = 0;
  /// Sample `index` in training order, 0 <= index < size(); throws DataError on a token id outside the vocabulary.
  [[nodiscard]] virtual Sample sample(std::int64_t index) const = 0;
  [[nodiscard]] virtual std::int64_t seq_length() const = 0;
};

/// How samples are cut and masked.
struct SampleOptions {
  std::int64_t eod = -1;  ///< needed by the three flags below
  std::int64_t pad = -1;  ///< labels equal to it get no loss; it becomes id 0 in tokens and labels
  bool eod_mask_loss = false;
  bool reset_position_ids = false;
  bool reset_attention_mask = false;
  bool inter_document_masking = false;  ///< documents as joined are attention segments and position ids restart in each
  std::int64_t vocab_limit = 0;         ///< ids must be below it; 0 = not checked
};

/// Samples of S tokens cut from shuffled documents, in the reference's order.
class GptDataset : public Dataset {
 public:
  GptDataset(std::shared_ptr<const DocumentSource> documents, const OrderRequest& request, const SampleOptions& options,
             SampleOrder order);

  [[nodiscard]] std::int64_t size() const override { return order_.plan.samples; }
  [[nodiscard]] Sample sample(std::int64_t index) const override;
  [[nodiscard]] std::int64_t seq_length() const override { return request_.seq_length; }
  [[nodiscard]] const SampleOrder& order() const { return order_; }
  [[nodiscard]] const OrderRequest& request() const { return request_; }
  [[nodiscard]] const DocumentSource& documents() const { return *documents_; }

 private:
  void check_ids(const std::vector<std::int64_t>& text, std::int64_t sample, std::int64_t p0, std::int64_t o0) const;

  std::shared_ptr<const DocumentSource> documents_;
  OrderRequest request_;
  SampleOptions options_;
  SampleOrder order_;
};

}  // namespace pgpt::data

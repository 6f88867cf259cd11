#include "pgpt/data/gpt_dataset.h"

#include <algorithm>

#include "pgpt/base/error.h"

namespace pgpt::data {

GptDataset::GptDataset(std::shared_ptr<const DocumentSource> documents, const OrderRequest& request,
                       const SampleOptions& options, SampleOrder order)
    : documents_(std::move(documents)), request_(request), options_(options), order_(std::move(order)) {
  const bool needs_eod = options.eod_mask_loss || options.reset_position_ids || options.reset_attention_mask;
  PGPT_CHECK(ConfigError, !needs_eod || options.eod >= 0,
             "--eod-mask-loss, --reset-position-ids and --reset-attention-mask need the tokenizer's EOD id; add "
             "--null-tokenizer-eod-id");
}

void GptDataset::check_ids(const std::vector<std::int64_t>& text, std::int64_t sample, std::int64_t p0,
                           std::int64_t o0) const {
  const auto bad = std::find_if(text.begin(), text.end(), [&](std::int64_t id) {
    return id != options_.pad && (id < 0 || id >= options_.vocab_limit);
  });
  if (bad == text.end()) return;
  // Finds the document again; only the error pays for it.
  std::int64_t left = o0 + (bad - text.begin());
  std::int64_t position = p0;
  while (left >= documents_->length(order_.document_index[position])) {
    left -= documents_->length(order_.document_index[position]);
    ++position;
  }
  throw DataError(concat(documents_->name(), ": document ", order_.document_index[position], " holds token id ", *bad,
                         " at position ", left, " (training sample ", sample, "), but ids must lie in [0, ",
                         options_.vocab_limit,
                         "); the data was made with another tokenizer, or --vocab-size is too small"));
}

Sample GptDataset::sample(std::int64_t index) const {
  PGPT_ASSERT(index >= 0 && index < size());
  const std::int64_t row = order_.shuffle_index[index];
  const std::int64_t p0 = order_.sample_index.at(row, 0);
  const std::int64_t o0 = order_.sample_index.at(row, 1);
  const std::int64_t p1 = order_.sample_index.at(row + 1, 0);
  const std::int64_t o1 = order_.sample_index.at(row + 1, 1);
  const std::int64_t extra = request_.extra_token;
  const auto s = static_cast<std::size_t>(request_.seq_length);
  const std::size_t wanted = s + static_cast<std::size_t>(extra);

  Sample result;
  std::vector<std::int64_t> text;
  text.reserve(wanted);
  for (std::int64_t position = p0; position <= p1; ++position) {
    const std::int64_t document = order_.document_index[position];
    const std::int64_t begin = position == p0 ? o0 : 0;
    const std::int64_t end = position == p1 ? o1 + extra : documents_->length(document);
    const std::size_t at = text.size();
    text.resize(at + static_cast<std::size_t>(end - begin));
    documents_->read(document, begin, end - begin, text.data() + at);
    // The shared token belongs to the next sample.
    const std::int64_t own = end - begin - (position == p1 ? extra : 0);
    if (own > 0) result.document_lengths.push_back(static_cast<std::int32_t>(own));
  }
  PGPT_ASSERT(text.size() <= wanted);
  if (options_.vocab_limit > 0) check_ids(text, index, p0, o0);
  if (text.size() < wanted) {
    const auto missing = static_cast<std::int32_t>(wanted - text.size());
    if (result.document_lengths.empty()) result.document_lengths.push_back(0);
    result.document_lengths.back() += missing;
    text.resize(wanted, options_.pad);
  }

  const auto end = static_cast<std::ptrdiff_t>(s);
  result.tokens.assign(text.begin(), text.begin() + end);
  result.labels.assign(text.begin() + 1, text.end());
  if (extra == 0) result.labels.push_back(options_.pad);
  result.loss_mask.assign(s, 1.0F);
  result.position_ids.resize(s);
  if (options_.reset_attention_mask || options_.inter_document_masking) result.segment_starts.push_back(0);

  std::int64_t position_id = 0;
  std::size_t piece = 0;
  std::int64_t piece_end = result.document_lengths[0];
  for (std::size_t i = 0; i < s; ++i) {
    const auto here = static_cast<std::int64_t>(i);
    if (options_.inter_document_masking && here == piece_end) {
      position_id = 0;
      result.segment_starts.push_back(static_cast<std::int32_t>(i));
      piece_end += result.document_lengths[++piece];
    }
    result.position_ids[i] = position_id++;
    if (result.tokens[i] == options_.eod) {
      // The documents' EOD counts, before the pad id (which may equal it) is replaced.
      if (options_.eod_mask_loss) result.loss_mask[i] = 0.0F;
      if (options_.reset_position_ids) position_id = 0;
      if (options_.reset_attention_mask && !options_.inter_document_masking && i + 1 < s) {
        result.segment_starts.push_back(static_cast<std::int32_t>(i + 1));
      }
    }
    if (result.labels[i] == options_.pad) {
      result.loss_mask[i] = 0.0F;
      result.labels[i] = 0;
    }
    if (result.tokens[i] == options_.pad) result.tokens[i] = 0;
  }
  return result;
}

}  // namespace pgpt::data

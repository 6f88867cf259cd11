#include "pgpt/data/sample_order.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "pgpt/base/error.h"
#include "pgpt/data/random.h"

namespace pgpt::data {
namespace {

constexpr std::int64_t kInt32Max = std::numeric_limits<std::int32_t>::max();

std::int64_t longest_document(const DocumentSource& source) {
  std::int64_t longest = 0;
  for (std::int64_t i = 0; i < source.size(); ++i) longest = std::max(longest, source.length(i));
  return longest;
}

/// Fills positions [begin, begin + repeats * range) with the range, `repeats` times, and shuffles them.
void fill_documents(std::span<std::int32_t> out, const DocumentRange& range, NumpyRandomState& random) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<std::int32_t>(range.begin + static_cast<std::int64_t>(i) % range.size());
  }
  random.shuffle(out);
}

template <class T>
void fill_sample_index(std::span<T> rows, const std::vector<std::int32_t>& lengths, std::int64_t first_document,
                       std::span<const std::int32_t> documents, std::int64_t sequence, std::int64_t extra) {
  const auto last = static_cast<std::int64_t>(documents.size()) - 1;
  const auto length = [&](std::int64_t p) -> std::int64_t {
    return lengths[static_cast<std::size_t>(documents[static_cast<std::size_t>(p)] - first_document)];
  };
  std::int64_t position = 0;
  std::int64_t offset = 0;
  rows[0] = rows[1] = 0;
  for (std::size_t row = 2; row < rows.size(); row += 2) {
    std::int64_t needed = sequence + extra;
    while (true) {
      const std::int64_t available = length(position) - offset;
      needed -= available;
      if (needed <= 0) {
        offset += available + needed - extra;
        break;
      }
      if (position == last) {
        offset = length(position) - extra;
        break;
      }
      ++position;
      offset = 0;
    }
    rows[row] = static_cast<T>(position);
    rows[row + 1] = static_cast<T>(offset);
  }
}

template <class T>
void fill_shuffle(std::span<T> out, std::int64_t before_last, bool separate, NumpyRandomState& random) {
  std::iota(out.begin(), out.end(), T{0});
  const std::size_t first = separate ? static_cast<std::size_t>(before_last) : out.size();
  random.shuffle(out.first(first));
  random.shuffle(out.subspan(first));
}

}  // namespace

OrderPlan plan_order(const DocumentSource& source, const OrderRequest& request) {
  const DocumentRange& range = request.documents;
  const std::int64_t sequence = request.seq_length;
  const std::int64_t extra = request.extra_token;
  PGPT_CHECK(ConfigError, sequence >= 1, "--seq-length ", sequence, " must be at least 1");
  PGPT_CHECK(DataError, range.begin >= 0 && range.end <= source.size(), source.name(), ": documents [", range.begin,
             ", ", range.end, ") were asked of ", source.size());
  PGPT_CHECK(DataError, source.size() <= kInt32Max, source.name(), " has ", source.size(),
             " sequences; the index format allows ", kInt32Max, ". Split the corpus");
  OrderPlan plan;
  for (std::int64_t i = range.begin; i < range.end; ++i) plan.tokens_per_epoch += source.length(i);
  const std::int64_t tokens = plan.tokens_per_epoch;
  PGPT_CHECK(DataError, tokens > 0, source.name(), ": documents [", range.begin, ", ", range.end,
             ") of this split hold no tokens; change --split or give a larger corpus");

  using Wide = __int128;
  if (request.num_samples) {
    const Wide needed = static_cast<Wide>(*request.num_samples) * sequence + extra;
    const Wide epochs = std::max<Wide>(1, (needed + tokens - 1) / tokens);
    PGPT_CHECK(DataError, epochs * std::max<Wide>(tokens, range.size()) < (static_cast<Wide>(1) << 62), source.name(),
               ": ", *request.num_samples, " samples of ", sequence, " tokens need more epochs of ", tokens,
               " tokens than can be indexed; lower --train-iters or --train-samples");
    plan.epochs = static_cast<std::int64_t>(epochs);
  }
  const std::int64_t total = plan.epochs * tokens - extra;
  plan.samples = total / sequence;
  if (request.keep_last_partial) {
    // The reference divides in single precision here.
    plan.samples = static_cast<std::int64_t>(std::ceil(static_cast<float>(total) / static_cast<float>(sequence)));
  }
  plan.samples_before_last_epoch = plan.samples;
  if (plan.epochs > 1) {
    const std::int64_t before = ((plan.epochs - 1) * tokens - extra) / sequence;
    const std::int64_t last = *request.num_samples - before;
    const std::int64_t per_epoch = (tokens - extra) / sequence;
    PGPT_ASSERT(last >= 0 && last <= per_epoch + 1);
    plan.separate_last_epoch = last < static_cast<std::int64_t>(0.80 * static_cast<double>(per_epoch));
    plan.samples_before_last_epoch = before;
  }
  plan.wide_sample_index = std::max(plan.epochs * range.size(), longest_document(source)) > kInt32Max;
  return plan;
}

SampleOrder build_order(const DocumentSource& source, const OrderRequest& request) {
  SampleOrder order;
  order.plan = plan_order(source, request);
  const OrderPlan& plan = order.plan;
  const DocumentRange& range = request.documents;
  NumpyRandomState random(request.seed);

  order.document_index = IntArray(IntType::kInt32, plan.epochs * range.size());
  const auto documents = order.document_index.fill<std::int32_t>();
  const std::size_t joint = documents.size() - (plan.separate_last_epoch ? static_cast<std::size_t>(range.size()) : 0);
  fill_documents(documents.first(joint), range, random);
  fill_documents(documents.subspan(joint), range, random);

  // A plain array: the walk below looks up lengths in random order.
  std::vector<std::int32_t> lengths;
  lengths.reserve(static_cast<std::size_t>(range.size()));
  for (std::int64_t i = range.begin; i < range.end; ++i) lengths.push_back(static_cast<std::int32_t>(source.length(i)));

  order.sample_index = IntArray(plan.wide_sample_index ? IntType::kInt64 : IntType::kInt32, plan.samples + 1, 2);
  if (plan.wide_sample_index) {
    fill_sample_index(order.sample_index.fill<std::int64_t>(), lengths, range.begin, documents, request.seq_length,
                      request.extra_token);
  } else {
    fill_sample_index(order.sample_index.fill<std::int32_t>(), lengths, range.begin, documents, request.seq_length,
                      request.extra_token);
  }

  const bool wide_shuffle = plan.samples >= std::int64_t{std::numeric_limits<std::uint32_t>::max()} - 1;
  order.shuffle_index = IntArray(wide_shuffle ? IntType::kInt64 : IntType::kUint32, plan.samples);
  if (wide_shuffle) {
    fill_shuffle(order.shuffle_index.fill<std::int64_t>(), plan.samples_before_last_epoch, plan.separate_last_epoch,
                 random);
  } else {
    fill_shuffle(order.shuffle_index.fill<std::uint32_t>(), plan.samples_before_last_epoch, plan.separate_last_epoch,
                 random);
  }
  return order;
}

}  // namespace pgpt::data

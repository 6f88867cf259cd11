#include "pgpt/data/sampler.h"

#include <algorithm>

#include "pgpt/base/error.h"
#include "pgpt/data/random.h"

namespace pgpt::data {
namespace {

void check(const SamplerRequest& request) {
  PGPT_ASSERT(request.micro_batch >= 1 && request.size >= 1 && request.rank >= 0 && request.rank < request.size &&
              request.consumed >= 0);
  PGPT_CHECK(DataError, request.total > 0, "the ", request.name,
             " data set has no full sample; give more data, or a smaller --seq-length");
}

}  // namespace

SingleSampler::SingleSampler(const SamplerRequest& request, bool drop_last)
    : request_(request), drop_last_(drop_last), position_(request.consumed) {
  check(request);
  PGPT_CHECK(DataError, request.consumed < request.total, exhausted());
}

std::optional<std::vector<std::int64_t>> SingleSampler::next() {
  const std::int64_t group = request_.micro_batch * request_.size;
  const std::int64_t end = std::min(position_ + group, request_.total);
  if (position_ >= request_.total || (drop_last_ && end - position_ < group)) return std::nullopt;
  std::vector<std::int64_t> batch;
  const std::int64_t first = position_ + request_.rank * request_.micro_batch;
  for (std::int64_t i = first; i < std::min(first + request_.micro_batch, end); ++i) batch.push_back(i);
  position_ += group;
  return batch;
}

std::string SingleSampler::exhausted() const {
  return concat(
      "the ", request_.name, " data set gives ", request_.total, " samples and ", std::min(position_, request_.total),
      " are consumed; the next micro-batch of all data ranks needs ", request_.micro_batch * request_.size,
      " more. Ask for as many samples as the run uses (--train-samples, or --train-iters with the global batch "
      "size), give more data, or use --dataloader-type cyclic");
}

CyclicSampler::CyclicSampler(const SamplerRequest& request, bool data_sharding)
    : request_(request), data_sharding_(data_sharding), consumed_(request.consumed) {
  check(request);
  const std::int64_t group = request.micro_batch * request.size;
  active_ = request.total - request.total % group;
  PGPT_CHECK(DataError, active_ > 0, "the ", request.name, " data set has ", request.total,
             " samples, but one micro-batch of all data ranks needs ", group, " (micro batch ", request.micro_batch,
             " x ", request.size, " data ranks)");
  PGPT_CHECK(DataError, consumed_ % active_ % group == 0, "the ", request.name, " data set was left after ", consumed_,
             " samples, ", consumed_ % active_, " into its epoch of ", active_,
             ": not a multiple of micro batch x data ranks = ", group,
             "; resume with the batch shape of the saved run, or start a new epoch");
}

std::optional<std::vector<std::int64_t>> CyclicSampler::next() {
  if (!started_ || cursor_ == pending_.size()) start_epoch();
  const auto begin = pending_.begin() + static_cast<std::ptrdiff_t>(cursor_);
  std::vector<std::int64_t> batch(begin, begin + static_cast<std::ptrdiff_t>(request_.micro_batch));
  cursor_ += static_cast<std::size_t>(request_.micro_batch);
  consumed_ += request_.micro_batch * request_.size;
  return batch;
}

void CyclicSampler::start_epoch() {
  const std::int64_t epoch = consumed_ / active_;
  const std::int64_t inside = consumed_ % active_;
  // Every rank gets the same number of micro-batches; the reference's unsharded order may give low ranks one more.
  const auto count = static_cast<std::size_t>((active_ - inside) / request_.size);
  std::int64_t range = request_.total / request_.micro_batch * request_.micro_batch;
  std::int64_t first = inside + request_.rank;
  std::int64_t stride = request_.size;
  std::int64_t shift = 0;
  if (data_sharding_) {
    range = active_ / request_.size;
    first = inside / request_.size;
    stride = 1;
    shift = request_.rank * range;
  }
  const std::vector<std::int64_t> order = torch_randperm(range, static_cast<std::uint64_t>(epoch));
  pending_.clear();
  for (std::int64_t i = first; pending_.size() < count; i += stride) {
    pending_.push_back(order[static_cast<std::size_t>(i)] + shift);
  }
  cursor_ = 0;
  started_ = true;
}

std::string CyclicSampler::exhausted() const { return concat("the ", request_.name, " data set is empty"); }

FullValidationSampler::FullValidationSampler(const SamplerRequest& request)
    : request_(request), position_(request.rank) {
  check(request);
  PGPT_CHECK(DataError, request.total >= request.size, "--full-validation: the ", request.name, " data set has ",
             request.total, " samples for ", request.size,
             " data ranks, so that some ranks would have none; use --eval-iters instead or give more validation data");
}

std::optional<std::vector<std::int64_t>> FullValidationSampler::next() {
  if (position_ >= request_.total) position_ = request_.rank;
  std::vector<std::int64_t> batch = {position_};
  position_ += request_.size;
  return batch;
}

std::string FullValidationSampler::exhausted() const { return concat("the ", request_.name, " data set is empty"); }

}  // namespace pgpt::data

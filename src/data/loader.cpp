#include "pgpt/data/loader.h"

#include <pthread.h>

#include <algorithm>
#include <csignal>

#include "pgpt/base/error.h"

namespace pgpt::data {
namespace {

template <class T>
void append(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

}  // namespace

PackedStatistics& PackedStatistics::operator+=(const PackedStatistics& other) {
  tokens += other.tokens;
  valid_tokens += other.valid_tokens;
  documents += other.documents;
  squared_document_lengths += other.squared_document_lengths;
  segments += other.segments;
  squared_segment_lengths += other.squared_segment_lengths;
  return *this;
}

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, std::unique_ptr<Sampler> sampler,
                       const LoaderOptions& options)
    : dataset_(std::move(dataset)), sampler_(std::move(sampler)), options_(options) {
  options_.depth = std::max<std::size_t>(options_.depth, 1);
}

DataLoader::~DataLoader() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

MicroBatch DataLoader::make() {
  auto ids = sampler_->next();
  PGPT_CHECK(DataError, ids, sampler_->exhausted());
  const std::int64_t s = dataset_->seq_length();
  MicroBatch batch;
  batch.micro_batch = static_cast<std::int64_t>(ids->size());
  batch.seq_length = s;
  batch.sample_ids = std::move(*ids);
  const auto elements = static_cast<std::size_t>(batch.micro_batch * s);
  batch.tokens.reserve(elements);
  batch.labels.reserve(elements);
  batch.position_ids.reserve(elements);
  batch.loss_mask.reserve(elements);
  batch.restart_positions = options_.restart_positions;

  PackedStatistics& statistics = batch.statistics;
  std::int64_t sample_begin = 0;  // in the micro-batch seen as one sequence
  for (const std::int64_t id : batch.sample_ids) {
    const Sample sample = dataset_->sample(id);
    append(batch.tokens, sample.tokens);
    append(batch.labels, sample.labels);
    append(batch.position_ids, sample.position_ids);
    append(batch.loss_mask, sample.loss_mask);
    statistics.tokens += s;
    for (const float weight : sample.loss_mask) statistics.valid_tokens += weight != 0.0F ? 1 : 0;
    for (const std::int64_t length : sample.document_lengths) {
      ++statistics.documents;
      statistics.squared_document_lengths += length * length;
    }
    const std::vector<std::int32_t>& starts = sample.segment_starts;
    const bool segmented = !starts.empty();
    if (segmented && batch.cu_seqlens.empty()) batch.cu_seqlens.push_back(0);
    for (std::size_t k = 0; k < std::max<std::size_t>(starts.size(), 1); ++k) {
      const std::int64_t begin = segmented ? starts[k] : 0;
      const std::int64_t end = k + 1 < starts.size() ? starts[k + 1] : s;
      ++statistics.segments;
      statistics.squared_segment_lengths += (end - begin) * (end - begin);
      if (segmented) batch.cu_seqlens.push_back(static_cast<std::int32_t>(sample_begin + end));
    }
    sample_begin += s;
  }
  return batch;
}

MicroBatch DataLoader::next() {
  if (!options_.background) {
    if (failure_) std::rethrow_exception(failure_);
    try {
      return make();
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
  }
  if (!thread_.joinable()) {
    // Signals are for the training thread.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      thread_ = std::thread([this] { run(); });
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !ready_.empty() || failure_; });
  if (ready_.empty()) std::rethrow_exception(failure_);
  MicroBatch batch = std::move(ready_.front());
  ready_.pop_front();
  lock.unlock();
  changed_.notify_all();
  return batch;
}

void DataLoader::run() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || ready_.size() < options_.depth; });
      if (stop_) return;
    }
    try {
      MicroBatch batch = make();
      const std::lock_guard lock(mutex_);
      ready_.push_back(std::move(batch));
    } catch (...) {
      const std::lock_guard lock(mutex_);
      failure_ = std::current_exception();
    }
    changed_.notify_all();
    const std::lock_guard lock(mutex_);
    if (failure_) return;
  }
}

}  // namespace pgpt::data

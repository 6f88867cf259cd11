#include "pgpt/config/batch_calculator.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>

#include "pgpt/base/error.h"

namespace pgpt::config {
namespace {

/// "1.5K" -> 1500: a decimal number, an optional suffix, truncated.
std::int64_t parse_count(std::string_view text, const std::string& entry) {
  double scale = 1;
  std::string_view digits = text;
  if (!digits.empty()) {
    switch (std::toupper(static_cast<unsigned char>(digits.back()))) {
      case 'K':
        scale = 1e3;
        break;
      case 'M':
        scale = 1e6;
        break;
      case 'B':
        scale = 1e9;
        break;
      case 'T':
        scale = 1e12;
        break;
      default:
        break;
    }
    if (scale != 1) digits.remove_suffix(1);
  }
  double value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  PGPT_CHECK(ConfigError,
             error == std::errc() && end == digits.data() + digits.size() && std::isfinite(value) &&
                 std::abs(value * scale) < 9e18,
             "--step-batch-size-schedule: '", entry,
             "' is not THRESHOLD:BATCH with numbers that may end in K, M, B or T, e.g. 0:256 1B:512");
  return static_cast<std::int64_t>(value * scale);
}

}  // namespace

std::vector<std::pair<std::int64_t, std::int64_t>> parse_batch_size_schedule(const std::string& text,
                                                                             std::optional<std::int64_t> seq_length) {
  std::vector<std::pair<std::int64_t, std::int64_t>> schedule;
  std::size_t at = 0;
  const auto separates = [](char c) { return c == ',' || std::isspace(static_cast<unsigned char>(c)) != 0; };
  while (at < text.size()) {
    if (separates(text[at])) {
      ++at;
      continue;
    }
    std::size_t end = at;
    while (end < text.size() && !separates(text[end])) ++end;
    const std::string entry = text.substr(at, end - at);
    at = end;
    const std::size_t colon = entry.find(':');
    PGPT_CHECK(ConfigError, colon != std::string::npos && entry.find(':', colon + 1) == std::string::npos,
               "--step-batch-size-schedule: '", entry, "' is not THRESHOLD:BATCH, e.g. 0:256 1B:512");
    std::int64_t threshold = parse_count(std::string_view(entry).substr(0, colon), entry);
    const std::int64_t batch = parse_count(std::string_view(entry).substr(colon + 1), entry);
    PGPT_CHECK(ConfigError, threshold >= 0 && batch > 0, "--step-batch-size-schedule: '", entry,
               "' needs a threshold of 0 or more and a positive batch size");
    if (seq_length) threshold /= *seq_length;
    schedule.emplace_back(threshold, batch);
  }
  PGPT_CHECK(ConfigError, !schedule.empty(), "--step-batch-size-schedule is empty; give e.g. '0:256 1B:512'");
  std::sort(schedule.begin(), schedule.end());
  PGPT_CHECK(ConfigError, schedule.front().first == 0, "--step-batch-size-schedule starts at sample ",
             schedule.front().first, "; its first threshold must be 0");
  for (std::size_t i = 1; i < schedule.size(); ++i) {
    PGPT_CHECK(ConfigError, schedule[i].first > schedule[i - 1].first,
               "--step-batch-size-schedule: two entries begin at ", "sample ", schedule[i].first,
               " (thresholds are tokens, divided by the sequence length); move one of them");
  }
  return schedule;
}

BatchCalculator::BatchCalculator(const TrainingConfig& training, std::int64_t data_ranks)
    : schedule_(training.batch_size_schedule),
      micro_batch_size_(training.micro_batch_size),
      data_ranks_(data_ranks),
      samples_per_microbatch_(training.micro_batch_size * data_ranks),
      decrease_if_needed_(training.decrease_batch_size_if_needed) {
  PGPT_CHECK(ConfigError, micro_batch_size_ > 0, "--micro-batch-size is ", micro_batch_size_, "; it must be positive");
  PGPT_ASSERT(data_ranks_ > 0, data_ranks_);
  PGPT_CHECK(ConfigError, schedule_.empty() || !decrease_if_needed_,
             "--step-batch-size-schedule and --decrease-batch-size-if-needed exclude each other; drop one");
  if (schedule_.empty()) schedule_.emplace_back(0, training.global_batch_size);
  set(schedule_.front().second);
}

void BatchCalculator::set(std::int64_t global_batch_size) {
  const std::int64_t microbatches = global_batch_size / samples_per_microbatch_;
  PGPT_CHECK(ConfigError, decrease_if_needed_ || global_batch_size % samples_per_microbatch_ == 0, "global batch size ",
             global_batch_size, " is not divisible by micro batch size ", micro_batch_size_, " x data ranks ",
             data_ranks_, " (data parallel size including GTP) = ", samples_per_microbatch_,
             "; change --global-batch-size or --micro-batch-size, or give --decrease-batch-size-if-needed");
  PGPT_CHECK(ConfigError, microbatches >= 1, "global batch size ", global_batch_size,
             " gives fewer than one microbatch of micro batch size ", micro_batch_size_, " x data ranks ", data_ranks_,
             " (data parallel size including GTP) = ", samples_per_microbatch_, "; raise --global-batch-size");
  global_batch_size_ = global_batch_size;
  num_microbatches_ = microbatches;
}

bool BatchCalculator::update(std::int64_t consumed_samples) {
  PGPT_ASSERT(consumed_samples >= 0, consumed_samples);
  std::int64_t batch = schedule_.front().second;
  for (const auto& [threshold, size] : schedule_) {
    if (threshold <= consumed_samples) batch = size;
  }
  const std::int64_t before = num_microbatches_;
  const std::int64_t before_batch = global_batch_size_;
  set(batch);
  PGPT_CHECK(ConfigError, num_microbatches_ >= before, "--step-batch-size-schedule lowers the batch from ",
             before_batch, " to ", batch, " at sample ", consumed_samples, " (", before, " to ", num_microbatches_,
             " microbatches); batch sizes may only grow");
  return num_microbatches_ > before;
}

std::int64_t iterations_for_samples(const TrainingConfig& training) {
  if (training.batch_size_schedule.empty()) {
    PGPT_ASSERT(training.global_batch_size > 0, training.global_batch_size);
    return training.train_samples / training.global_batch_size;
  }
  std::int64_t iterations = 0;
  std::int64_t consumed = 0;
  const auto& schedule = training.batch_size_schedule;
  for (std::size_t i = 0; i < schedule.size(); ++i) {
    const std::int64_t batch = schedule[i].second;
    // Whole batches, the last of a stretch may run over its end.
    std::int64_t steps = (training.train_samples - consumed) / batch;
    if (i + 1 < schedule.size()) {
      const std::int64_t stretch = std::max<std::int64_t>(0, schedule[i + 1].first - consumed);
      steps = std::min(steps, (stretch + batch - 1) / batch);
    }
    iterations += steps;
    consumed += steps * batch;
  }
  return iterations;
}

RequestedSamples requested_samples(const TrainingConfig& t) {
  RequestedSamples requested;
  requested.train = t.train_samples > 0 ? t.train_samples : t.train_iters * t.global_batch_size;
  const std::int64_t per_evaluation = t.eval_iters * t.eval_global_batch_size;
  requested.test = per_evaluation;
  if (t.full_validation) return requested;
  std::int64_t evaluations = 1;
  if (!t.skip_train && t.eval_interval > 0) {
    evaluations = t.train_iters / t.eval_interval + 1;
    if (t.start_eval_at_iter > 0) {
      evaluations = std::max<std::int64_t>(0, evaluations - t.start_eval_at_iter / t.eval_interval);
    }
  }
  requested.validation = evaluations * per_evaluation;
  return requested;
}

}  // namespace pgpt::config

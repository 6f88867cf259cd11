#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pgpt/config/config.h"

namespace pgpt::config {

/// Sorted (first sample, global batch size) pairs of --step-batch-size-schedule "0:B0 1M:B1": thresholds are tokens and
/// are floor-divided by `seq_length`; without one they are samples. Blanks or commas separate entries; K, M, B and T
/// multiply either number by 10^3, 10^6, 10^9 and 10^12. Throws ConfigError.
[[nodiscard]] std::vector<std::pair<std::int64_t, std::int64_t>> parse_batch_size_schedule(
    const std::string& text, std::optional<std::int64_t> seq_length);

/// Batch size and microbatches of each step as a function of the consumed samples. Not thread-safe.
class BatchCalculator {
 public:
  /// `data_ranks` counts the ranks that read different samples: replicate data parallel size x GTP. Throws ConfigError
  /// with all factors when the first batch does not divide into microbatches.
  BatchCalculator(const TrainingConfig& training, std::int64_t data_ranks);

  /// Looks up the batch in force after `consumed_samples`; true when the number of microbatches rose, at which the
  /// reference saves a checkpoint. Throws ConfigError when it fell or when the new batch does not divide.
  bool update(std::int64_t consumed_samples);

  /// Microbatches each rank runs in one step.
  [[nodiscard]] std::int64_t num_microbatches() const { return num_microbatches_; }
  /// Batch size asked for at this point of the run.
  [[nodiscard]] std::int64_t global_batch_size() const { return global_batch_size_; }
  /// Samples that one step really consumes; smaller than asked for only with --decrease-batch-size-if-needed.
  [[nodiscard]] std::int64_t samples_per_step() const { return num_microbatches_ * samples_per_microbatch_; }
  /// Samples a step adds to the skipped counter.
  [[nodiscard]] std::int64_t skipped_per_step() const { return global_batch_size_ - samples_per_step(); }

 private:
  void set(std::int64_t global_batch_size);

  std::vector<std::pair<std::int64_t, std::int64_t>> schedule_;
  std::int64_t micro_batch_size_;
  std::int64_t data_ranks_;
  std::int64_t samples_per_microbatch_;
  bool decrease_if_needed_;
  std::int64_t global_batch_size_ = 0;
  std::int64_t num_microbatches_ = 0;
};

/// Iterations that --train-samples allows: whole batches of the constant size or of the schedule, the rest is dropped.
[[nodiscard]] std::int64_t iterations_for_samples(const TrainingConfig& training);

/// Samples asked of each data set (spec/data.md 5.1). Validation has none with --full-validation: the whole set is
/// read.
struct RequestedSamples {
  std::int64_t train = 0;
  std::optional<std::int64_t> validation;
  std::int64_t test = 0;
};
[[nodiscard]] RequestedSamples requested_samples(const TrainingConfig& training);

}  // namespace pgpt::config

#pragma once

#include <cstdint>
#include <ctime>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "pgpt/training/training_log.h"

namespace pgpt::training {

/// Whether standard output is a terminal; decides --log-progress-line when the option is not given.
[[nodiscard]] bool stdout_is_terminal();

/// An additional line for people: " progress: 120/1000 (12.0 %) | 812.4 ms/step | 2.5k tokens/s | ETA 0:11:55". Times
/// and tokens are means since the previous progress line.
class ProgressLine {
 public:
  explicit ProgressLine(std::int64_t train_iters) : train_iters_(train_iters) {}
  /// Accounts every step.
  void add(const StepReport& step);
  /// The line, and a fresh window. Throws std::logic_error without a step in the window.
  [[nodiscard]] std::string take();

 private:
  std::int64_t train_iters_;
  std::int64_t iteration_ = 0;
  std::int64_t steps_ = 0;
  double elapsed_ms_ = 0;
  double tokens_ = 0;
};

/// progress.txt in the save folder (--log-progress, spec/training.md 14); rank 0 owns it.
class ProgressFile {
 public:
  /// `job_id` is SLURM_JOB_ID or empty; `now` is the wall clock in seconds. Throws DataError when the folder cannot be
  /// made.
  ProgressFile(
      std::filesystem::path save_folder, std::int64_t world_size, std::string job_id,
      std::function<std::time_t()> now = [] { return std::time(nullptr); });

  /// "Starting job". `flops_so_far` are those of the loaded checkpoint, 0 for a fresh run.
  void start(double flops_so_far);
  /// A finished save; `asynchronous` prints the short form.
  void saved(std::int64_t iteration, double flops_so_far, double tokens_so_far, bool asynchronous = false);
  /// "Saving async checkpoint" with the throughputs, when an asynchronous save begins.
  void saving_async(std::int64_t iteration, double flops_so_far, double tokens_so_far);
  /// A save that retention removed.
  void deleted(std::int64_t iteration);

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  /// Start of the first job of this world size without a job of another size after it, and the FLOPs saved before it.
  struct FirstJob {
    std::time_t time = 0;
    double flops = 0;
  };
  [[nodiscard]] FirstJob first_job() const;
  [[nodiscard]] std::string throughput_fields(std::int64_t iteration, double flops, double tokens) const;
  void append(const std::string& message) const;

  std::filesystem::path path_;
  std::int64_t world_size_;
  std::string job_id_;
  std::function<std::time_t()> now_;
  std::time_t started_ = 0;
  double flops_at_start_ = 0;
};

}  // namespace pgpt::training

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pgpt/config/config.h"

namespace pgpt::training {

/// Receives one line without its newline; multi-line blocks come as several calls.
using LineSink = std::function<void(const std::string&)>;

/// Local time as "YYYY-mm-dd HH:MM:SS.ffffff".
[[nodiscard]] std::string timestamp();

/// Everything one finished training step tells its logs and metrics. Losses are means over the step and all data ranks.
struct StepReport {
  std::int64_t iteration = 0;         ///< finished iterations, this one included
  std::int64_t consumed_samples = 0;  ///< after this step
  std::int64_t skipped_samples = 0;   ///< so far
  /// By key in the order of the line, "lm loss" first; float32 as it was reduced.
  std::vector<std::pair<std::string, float>> losses;
  /// MoE and MTP losses: they join the averages on skipped steps too.
  std::vector<std::pair<std::string, float>> auxiliary_losses;
  double applied_learning_rate = 0;   ///< what this step's update used
  double learning_rate = 0;           ///< after the schedule advanced: what the log prints
  std::int64_t batch_size = 0;        ///< samples of this step
  double applied_loss_scale = 1;      ///< what this step's loss was multiplied by
  double loss_scale = 1;              ///< after the scaler saw this step: what the log prints
  std::optional<double> grad_norm;    ///< absent on a skipped step
  std::optional<double> num_zeros;    ///< with --log-num-zeros-in-grad
  std::optional<double> params_norm;  ///< with --log-params-norm
  bool skipped = false;               ///< the optimizer took no step because of Inf or NaN
  double elapsed_ms = 0;              ///< since the previous report, without evaluation and saving
  double flops = 0;                   ///< of this step over all ranks (config::training_flops)
  double tokens = 0;                  ///< of this step over all ranks; real tokens of packed samples
  double documents = 0;               ///< of this step over all ranks
  std::int64_t memory_allocated_bytes = 0;
  std::int64_t memory_reserved_bytes = 0;
  std::int64_t memory_max_allocated_bytes = 0;
  std::int64_t memory_allocated_count = 0;

  /// A skipped step whose loss is Inf or NaN.
  [[nodiscard]] bool is_nan_iteration() const;
};

/// What one printed training line averaged, for metrics that follow the lines.
struct PrintedLine {
  std::int64_t iteration = 0;
  bool first = false;                   ///< first line of this process
  double elapsed_ms_per_iteration = 0;  ///< mean over the window
  double tflops_per_gpu = 0;            ///< of the last step at the mean time
  std::int64_t iterations = 0;          ///< steps in the window
  std::string line;
};

/// The training line: when it is printed, what it averages and how it looks (spec/training.md 10.1 and 10.2).
///
/// LossWindow::kStep averages over the steps since the last printed line. LossWindow::kMegatron reproduces the
/// reference: the first line of a process does not reset the sums, so its second line contains the first step again.
/// Current values that are never averaged: learning rate, batch size, grad norm, loss scale, params norm, zeros.
class TrainingLog {
 public:
  struct Options {
    std::int64_t log_interval = 100;
    std::int64_t train_iters = 0;
    std::int64_t world_size = 1;
    config::LossWindow loss_window = config::LossWindow::kStep;
    bool throughput = false;  ///< --log-throughput
  };
  /// The options of a run.
  [[nodiscard]] static Options options(const config::Config& config);

  /// `sink` gets the lines; `now` gives the time that a line starts with.
  TrainingLog(Options options, LineSink sink, std::function<std::string()> now = timestamp);

  /// Accounts one step and prints when due. Steps of --iterations-to-skip are not reported.
  std::optional<PrintedLine> report(const StepReport& step);

 private:
  void add(const StepReport& step);
  [[nodiscard]] std::string format(const StepReport& step, double elapsed_ms, double tflops) const;
  void reset();

  Options options_;
  LineSink sink_;
  std::function<std::string()> now_;
  bool first_ = true;
  std::vector<std::pair<std::string, float>> loss_sums_;
  std::int64_t advanced_ = 0;
  std::int64_t skipped_ = 0;
  std::int64_t nan_ = 0;
  double elapsed_ms_ = 0;
};

/// One evaluated data set. `losses` are means over its tokens.
struct EvaluationReport {
  std::int64_t iteration = 0;
  std::int64_t consumed_samples = 0;
  std::string set = "validation";  ///< "validation" or "test"
  std::string suffix;              ///< "-0" or "-name" where several validation sets exist
  std::vector<std::pair<std::string, float>> losses;
  bool final = false;  ///< after training: the line says which set it was
};

/// exp(loss), its argument limited to 20 so that a diverged model prints a number.
[[nodiscard]] double perplexity(double loss);

/// Dashes, the result, dashes (last rank).
[[nodiscard]] std::vector<std::string> evaluation_lines(const EvaluationReport& report);
/// Rank 0, before a final evaluation.
[[nodiscard]] std::string evaluating_line(std::int64_t samples);
/// Rank 0, before each iteration of a final evaluation; `index` counts from 1.
[[nodiscard]] std::string evaluating_iteration_line(std::int64_t index, std::int64_t count);

/// Memory of one process in bytes.
struct MemoryStats {
  double allocated = 0, max_allocated = 0, reserved = 0, max_reserved = 0;
  std::optional<double> device_used;  ///< with --log-device-memory-used
};

/// "[Rank 0] (after 2 iterations) memory (MB) | ..."; `when` without its parentheses.
[[nodiscard]] std::string memory_line(std::int64_t rank, const std::string& when, const MemoryStats& memory);

/// Decides after which printed lines memory is reported.
class MemoryReportSchedule {
 public:
  enum class Report { kNone, kMemory, kMemoryAndTheory };
  /// `loaded_iteration` is 0 for a fresh run; `interval` is --log-memory-interval, 0 = off.
  MemoryReportSchedule(std::int64_t loaded_iteration, std::int64_t interval)
      : loaded_iteration_(loaded_iteration), interval_(interval) {}
  /// Called once after each printed line.
  [[nodiscard]] Report after_line(std::int64_t iteration);

 private:
  std::int64_t loaded_iteration_;
  std::int64_t interval_;
  bool report_ = true;
};

/// The reference's estimate of parameters and memory, line by line (rank 0). It ignores GTP, as the reference does;
/// `gpt_tool estimate` gives this program's own numbers.
[[nodiscard]] std::vector<std::string> theoretical_memory_lines(const config::Config& config,
                                                                std::int64_t num_microbatches);

}  // namespace pgpt::training

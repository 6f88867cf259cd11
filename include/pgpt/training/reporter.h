#pragma once

#include <memory>
#include <optional>

#include "pgpt/training/metrics.h"
#include "pgpt/training/progress.h"
#include "pgpt/training/training_log.h"

namespace pgpt::training {

/// Everything that leaves the program step by step, on the rank that owns the loss (the last one): training line,
/// metrics file, TensorBoard, progress line. On other ranks it does nothing.
class Reporter {
 public:
  /// `loaded_iteration` is 0 for a fresh run; `owner` says whether this rank reports.
  Reporter(const config::Config& config, bool owner, std::int64_t loaded_iteration, LineSink print);

  /// Accounts one step; the printed line, when one was due.
  std::optional<PrintedLine> step(const StepReport& report);
  /// The progress line that belongs under a printed line, when progress lines are on.
  void progress();
  void timers(std::int64_t iteration, const std::vector<std::pair<std::string, double>>& seconds) {
    sink_->timers(iteration, seconds);
  }
  void evaluation(const EvaluationReport& report);
  [[nodiscard]] bool owner() const { return owner_; }

 private:
  bool owner_;
  LineSink print_;
  TrainingLog log_;
  std::unique_ptr<Sink> sink_;
  std::optional<ProgressLine> progress_;
};

}  // namespace pgpt::training

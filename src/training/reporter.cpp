#include "pgpt/training/reporter.h"

namespace pgpt::training {

Reporter::Reporter(const config::Config& config, bool owner, std::int64_t loaded_iteration, LineSink print)
    : owner_(owner), print_(print), log_(TrainingLog::options(config), std::move(print)) {
  if (!owner_) {
    sink_ = std::make_unique<NullSink>();
    return;
  }
  sink_ = make_sink(config, loaded_iteration);
  if (config.logging.progress_line.value_or(stdout_is_terminal())) progress_.emplace(config.training.train_iters);
}

std::optional<PrintedLine> Reporter::step(const StepReport& report) {
  if (!owner_) return std::nullopt;
  sink_->step(report);
  if (progress_) progress_->add(report);
  std::optional<PrintedLine> line = log_.report(report);
  if (line) sink_->line(*line);
  return line;
}

void Reporter::progress() {
  if (progress_) print_(progress_->take());
}

void Reporter::evaluation(const EvaluationReport& report) {
  if (!owner_) return;
  for (const std::string& line : evaluation_lines(report)) print_(line);
  sink_->evaluation(report);
}

}  // namespace pgpt::training

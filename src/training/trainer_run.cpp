// The loop around the steps: evaluation, saving, leaving.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "pgpt/base/error.h"
#include "pgpt/config/estimate.h"
#include "pgpt/training/agreement.h"
#include "pgpt/training/batch.h"
#include "pgpt/training/device.h"
#include "pgpt/training/startup_lines.h"
#include "pgpt/training/trainer.h"

namespace pgpt::training {

void Trainer::skip_iteration() {
  finish_steps(0);
  batches_->update(consumed_samples_);
  for (std::int64_t m = 0; m < batches_->num_microbatches(); ++m) (void)train_loader_->next();
  ++iteration_;
  consumed_samples_ += batches_->samples_per_step();
  skipped_samples_ += batches_->samples_per_step();
}

std::optional<Trainer::Evaluation> Trainer::evaluate(data::Split split, bool announce) {
  data::DataLoader* loader = split == data::Split::kValid ? valid_loader_.get() : test_loader_.get();
  if (loader == nullptr) return std::nullopt;
  at::NoGradGuard no_grad;
  const config::TrainingConfig& training = config_.training;
  const std::int64_t num_microbatches =
      training.eval_global_batch_size / (training.eval_micro_batch_size * config_.parallel.data_ranks());
  if (announce) print_first(evaluating_line(training.eval_iters * training.eval_global_batch_size));
  const model::StepContext context = step_context(false);
  at::Tensor loss_sum = at::zeros({}, at::TensorOptions(device_).dtype(at::kFloat));
  data::PackedStatistics statistics;
  for (std::int64_t i = 0; i < training.eval_iters; ++i) {
    if (announce) print_first(evaluating_iteration_line(i + 1, training.eval_iters));
    for (std::int64_t m = 0; m < num_microbatches; ++m) {
      const data::MicroBatch micro_batch = loader->next();
      loss_sum.add_(model_->forward(context, to_device(micro_batch, {}, device_)).sum);
      statistics += micro_batch.statistics;
    }
    if (split == data::Split::kValid) consumed_valid_samples_ += training.eval_global_batch_size;
    if (training.exit_duration_minutes > 0 && agree_max(*groups_.data, device_, {out_of_time() ? 1 : 0})[0] != 0) {
      news_.late = true;
      print_first("Exiting during evaluation, timelimit reached");
      return std::nullopt;
    }
  }
  upload_counts(statistics);
  reduce_totals(loss_sum);
  const StepLoss loss = read_totals(HostCopy(totals_).wait().const_data_ptr<double>());
  return Evaluation{loss.loss, loss.statistics.valid_tokens};
}

void Trainer::evaluate_and_report(data::Split split, bool final) {
  finish_steps(0);
  const double started = now_seconds();
  world_.set_activity(concat("evaluation after iteration ", iteration_));
  timers_.start("evaluate", 0);
  const std::optional<Evaluation> result = evaluate(split, final);
  gemm_tuning_.save();
  timers_.stop("evaluate");
  if (result) {
    const char* set = split == data::Split::kValid ? "validation" : "test";
    if (config_.training.check_for_nan && !std::isfinite(result->loss)) {
      throw AgreedError(ExitCode::kNonFinite,
                        concat("the ", set, " loss after iteration ", iteration_,
                               " is NaN or Inf. Load an earlier checkpoint, lower --lr, look at the ", set,
                               " data, or pass --no-check-for-nan-in-loss-and-grad to go on"),
                        world_.rank() == 0);
    }
    EvaluationReport report;
    report.iteration = iteration_;
    report.consumed_samples = consumed_samples_;
    report.set = set;
    report.losses = {{"lm loss", static_cast<float>(result->loss)}};
    report.final = final;
    reporter_->evaluation(report);
    print_timers({"evaluate"}, 1.0);
  }
  interval_start_ += now_seconds() - started;
}

bool Trainer::evaluation_due() const {
  const config::TrainingConfig& training = config_.training;
  return training.eval_iters > 0 && ends_interval(training.eval_interval) && iteration_ >= training.start_eval_at_iter;
}

bool Trainer::out_of_time() const {
  const std::int64_t minutes = config_.training.exit_duration_minutes;
  return minutes > 0 && (now_seconds() - started_) / 60.0 > static_cast<double>(minutes);
}

void Trainer::save_checkpoint(Checkpointer::Kind kind) {
  if (!checkpointer_->enabled(kind)) return;
  finish_steps(0);
  const double started = now_seconds();
  publish_written();
  // The reference reports memory around the first saves of a process.
  const bool report = saves_++ < 3;
  if (report) print_memory_line(concat("before save_checkpoint for iteration ", iteration_));
  timers_.start("save-checkpoint", 0);
  checkpointer_->save(position(), kind);
  if (kind == Checkpointer::Kind::kPersistent) saved_at_ = iteration_;
  timers_.stop("save-checkpoint");
  if (report) print_memory_line(concat("after save_checkpoint for iteration ", iteration_));
  print_timers({"save-checkpoint"}, 1.0);
  interval_start_ += now_seconds() - started;
}

void Trainer::publish_written() {
  if (std::exchange(news_.written, false)) checkpointer_->publish_written();
}

bool Trainer::save_due() const {
  return ends_interval(config_.checkpoint.save_interval) || ends_interval(config_.checkpoint.non_persistent_interval);
}

bool Trainer::may_run_ahead() const {
  // A loss scaler decides on the host, evidence is read between steps, and timers count one step at a time.
  if (!device_.is_cuda() || optimizer_->loss_scaler().enabled() || !config_.logging.evidence_dir.empty() ||
      !timer_names_.empty())
    return false;
  return finished_ > 0 && iteration_ < config_.training.train_iters && !evaluation_due() && !save_due() &&
         !ends_interval(config_.training.exit_interval);
}

void Trainer::finish_steps(std::size_t keep) {
  while (launched_.size() > keep) print_step(finish_step());
}

void Trainer::print_step(const StepReport& report) {
  const bool first = finished_ == 1;
  if (first && config_.parallel.timeout_seconds_after_init) {
    world_.set_timeout(std::chrono::seconds(*config_.parallel.timeout_seconds_after_init));
  }
  const std::optional<PrintedLine> line = reporter_->step(report);
  const bool printed =
      first || report.iteration % config_.logging.log_interval == 0;  // on every rank, though only the last one prints
  if (printed && !timer_names_.empty()) print_timers(timer_names_, static_cast<double>(config_.logging.log_interval));
  if (line) reporter_->progress();
  if (printed) print_memory(memory_schedule_->after_line(report.iteration), report.iteration);
  if (first) print_memory_table();
}

bool Trainer::save_or_leave() {
  using Kind = Checkpointer::Kind;
  const config::TrainingConfig& training = config_.training;
  const config::CheckpointConfig& checkpoints = config_.checkpoint;
  if (news_.exit || news_.save || news_.late) finish_steps(0);  // the step behind may bring more news
  if (news_.exit) {
    save_checkpoint(Kind::kPersistent);
    print_first(datetime_line(exit_signal_label(training.exit_signal), timestamp()));
    return true;
  }
  const bool asked = std::exchange(news_.save, false);
  const bool due = asked || ends_interval(checkpoints.save_interval);
  if (checkpointer_->enabled(Kind::kPersistent) && due) {
    save_checkpoint(Kind::kPersistent);
  } else if (ends_interval(checkpoints.non_persistent_interval)) {
    save_checkpoint(Kind::kNonPersistent);
  }
  const bool at_interval = ends_interval(training.exit_interval);
  if (!news_.late && !at_interval) return false;
  if (saved_at_ != iteration_) save_checkpoint(Kind::kPersistent);
  print_first(datetime_line(
      news_.late ? exit_duration_label((now_seconds() - started_) / 60.0) : exit_iteration_label(iteration_),
      timestamp()));
  return true;
}

void Trainer::run() {
  const config::TrainingConfig& training = config_.training;
  if (training.skip_train) {
    print_first(kTrainingSkipped);
  } else {
    print_first(kTrainingStarts);
    print_first(datetime_line(label::kBeforeTraining, timestamp()));
    interval_start_ = now_seconds();
    memory_schedule_.emplace(iteration_, config_.logging.memory_interval);
    timer_names_ = Timers::training_names(config_.logging.timing_level);
    while (iteration_ < training.train_iters) {
      publish_written();
      const bool more_microbatches = batches_->update(consumed_samples_);
      if (more_microbatches && saved_at_ != iteration_) save_checkpoint(Checkpointer::Kind::kPersistent);
      world_.set_activity(concat("training step ", iteration_ + 1));
      if (std::find(training.iterations_to_skip.begin(), training.iterations_to_skip.end(), iteration_ + 1) !=
          training.iterations_to_skip.end()) {
        skip_iteration();
      } else {
        launch_step();
        gemm_tuning_.save();
        finish_steps(may_run_ahead() ? 1 : 0);
        if (evaluation_due()) evaluate_and_report(data::Split::kValid, false);
      }
      if (save_or_leave()) {
        checkpointer_->finish();
        return;
      }
    }
    finish_steps(0);
    print_first(datetime_line(label::kAfterTraining, timestamp()));
    const std::int64_t interval = config_.checkpoint.save_interval;
    if (iteration_ != 0 && interval > 0 && iteration_ % interval != 0) save_checkpoint(Checkpointer::Kind::kPersistent);
    checkpointer_->finish();
  }
  if (training.eval_iters > 0) {
    evaluate_and_report(data::Split::kValid, true);
    evaluate_and_report(data::Split::kTest, true);
  }
}

void Trainer::print_memory(MemoryReportSchedule::Report report, std::int64_t iteration) {
  if (report == MemoryReportSchedule::Report::kNone || !device_.is_cuda()) return;
  if (report == MemoryReportSchedule::Report::kMemoryAndTheory && world_.rank() == 0) {
    for (const std::string& line : theoretical_memory_lines(config_, batches_->num_microbatches())) print_(line);
  }
  print_memory_line(concat("after ", iteration, " iterations"));
}

void Trainer::print_memory_table() const {
  if (!device_.is_cuda() || world_.rank() != 0) return;
  const MemoryUse use = memory_use(device_);
  const config::MeasuredMemory measured{static_cast<double>(use.allocated), static_cast<double>(use.max_allocated)};
  for (const std::string& line : config::memory_table(config::estimate(config_).stages.front(), measured)) print_(line);
}

void Trainer::print_memory_line(const std::string& when) const {
  if (!device_.is_cuda() || mesh_.data_rank(world_.rank()) != 0) return;
  const MemoryUse use = memory_use(device_);
  MemoryStats stats;
  stats.allocated = static_cast<double>(use.allocated);
  stats.max_allocated = static_cast<double>(use.max_allocated);
  stats.reserved = static_cast<double>(use.reserved);
  stats.max_reserved = static_cast<double>(use.max_reserved);
  print_(memory_line(world_.rank(), when, stats));
}

}  // namespace pgpt::training

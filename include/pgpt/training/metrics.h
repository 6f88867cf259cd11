#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pgpt/config/config.h"
#include "pgpt/training/event_file.h"
#include "pgpt/training/training_log.h"

namespace pgpt::training {

/// Receives the numbers of a run, on the rank that owns the loss.
class Sink {
 public:
  Sink() = default;
  Sink(const Sink&) = delete;
  Sink& operator=(const Sink&) = delete;
  virtual ~Sink() = default;
  /// Every finished step, also skipped ones.
  virtual void step(const StepReport& report) = 0;
  /// Every printed training line, after its step.
  virtual void line(const PrintedLine& line) = 0;
  /// Section timers of a printed line: (name, longest seconds over the ranks).
  virtual void timers(std::int64_t iteration, const std::vector<std::pair<std::string, double>>& seconds) = 0;
  /// Every finished evaluation.
  virtual void evaluation(const EvaluationReport& report) = 0;
};

/// Drops everything.
class NullSink final : public Sink {
 public:
  void step(const StepReport&) override {}
  void line(const PrintedLine&) override {}
  void timers(std::int64_t, const std::vector<std::pair<std::string, double>>&) override {}
  void evaluation(const EvaluationReport&) override {}
};

/// Passes everything on to several sinks.
class SinkList final : public Sink {
 public:
  void add(std::unique_ptr<Sink> sink) { sinks_.push_back(std::move(sink)); }
  void step(const StepReport& report) override;
  void line(const PrintedLine& line) override;
  void timers(std::int64_t iteration, const std::vector<std::pair<std::string, double>>& seconds) override;
  void evaluation(const EvaluationReport& report) override;

 private:
  std::vector<std::unique_ptr<Sink>> sinks_;
};

/// --metrics-file: one JSON object a line, flushed after each.
///
/// {"kind":"step", "iteration", "consumed_samples", "skipped_samples", "lm_loss" and other loss keys with '_' for
/// blanks, "grad_norm", "params_norm", "num_zeros", "learning_rate_applied", "learning_rate_printed", "batch_size",
/// "loss_scale", "skipped", "nan", "step_time_ms", "tokens", "documents", "tokens_per_second", "tflops_per_gpu",
/// "memory_allocated_bytes", "memory_reserved_bytes", "memory_max_allocated_bytes"} for each step, and
/// {"kind":"evaluation", "set", "iteration", "consumed_samples", "validation_lm_loss", "validation_lm_loss_ppl"} (or
/// "test_lm_loss" and so on) for each evaluation. All keys of a kind are always there; what is absent, NaN or Inf is
/// null. Numbers read back to the same bits.
///
/// A resumed run appends. Lines of iterations beyond the loaded one (which that run will write again), and a last line
/// that a crash cut off, are dropped first: the kept lines go to a temporary file that replaces the old one in one
/// step. A fresh run moves an existing file aside to FILE.previous. A file with foreign lines is refused.
class JsonLinesSink final : public Sink {
 public:
  /// `loaded_iteration` is 0 for a fresh run. Throws DataError.
  JsonLinesSink(std::filesystem::path path, std::int64_t loaded_iteration, std::int64_t world_size);
  void step(const StepReport& report) override;
  void line(const PrintedLine&) override {}
  void timers(std::int64_t, const std::vector<std::pair<std::string, double>>&) override {}
  void evaluation(const EvaluationReport& report) override;

 private:
  void write(const std::string& object);

  std::filesystem::path path_;
  std::int64_t world_size_;
  std::ofstream file_;
};

/// --tensorboard-dir: the scalars of spec/training.md 12, and all arguments as texts. Steps beyond a loaded iteration
/// are drawn again by a resumed run, as in the reference. The test set is drawn as "... test", not over the validation
/// curve.
class TensorBoardSink final : public Sink {
 public:
  /// `loaded_iteration` is the step of the argument texts; `wall_time` gives seconds since 1970. Throws DataError.
  TensorBoardSink(const config::Config& config, std::int64_t loaded_iteration, std::function<double()> wall_time = {});
  void step(const StepReport& report) override;
  void line(const PrintedLine& line) override;
  void timers(std::int64_t iteration, const std::vector<std::pair<std::string, double>>& seconds) override;
  void evaluation(const EvaluationReport& report) override;

 private:
  /// A point over iterations and one over samples.
  void both(const std::string& tag, double value, std::int64_t iteration, std::int64_t samples);
  void point(const std::string& tag, double value, std::int64_t step);

  config::LoggingConfig options_;
  std::int64_t world_size_;
  bool skip_train_;
  std::function<double()> wall_time_;
  EventFile file_;
};

/// The sinks that the options ask for.
[[nodiscard]] std::unique_ptr<Sink> make_sink(const config::Config& config, std::int64_t loaded_iteration);

}  // namespace pgpt::training

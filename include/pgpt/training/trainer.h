#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pgpt/comm/world.h"
#include "pgpt/config/batch_calculator.h"
#include "pgpt/config/config.h"
#include "pgpt/data/datasets.h"
#include "pgpt/mesh/mesh.h"
#include "pgpt/model/gpt.h"
#include "pgpt/optim/optimizer.h"
#include "pgpt/optim/schedule.h"
#include "pgpt/training/checkpointing.h"
#include "pgpt/training/evidence.h"
#include "pgpt/training/groups.h"
#include "pgpt/training/reporter.h"
#include "pgpt/training/timers.h"

namespace pgpt::training {

/// One rank of a training run: builds everything in construction order, then steps, evaluates and reports.
class Trainer {
 public:
  /// Collective over the world; `config` is final and valid. `print` receives this rank's lines for standard output.
  Trainer(const config::Config& config, comm::World& world, at::Device device, LineSink print);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Trains to the end (or evaluates only, with --skip-train), with the evaluations asked for.
  void run();

  /// One training step: all micro-batches, reduction, update, report.
  const StepReport& step();
  /// Evaluates `iterations` global batches of a set; collective. Empty when the set does not exist.
  struct Evaluation {
    double loss = 0;
    std::int64_t tokens = 0;
  };
  [[nodiscard]] std::optional<Evaluation> evaluate(data::Split split, bool announce);

  /// Called after each step, before its line is printed (tests).
  std::function<void(const StepReport&)> on_step;

  [[nodiscard]] parameter::ParameterStore& store() { return *store_; }
  [[nodiscard]] optim::Optimizer& optimizer() { return *optimizer_; }
  [[nodiscard]] const gtp::WeightChain& chain() const { return *chain_; }
  [[nodiscard]] std::int64_t iteration() const { return iteration_; }

 private:
  /// Runs `work` on every rank; when it throws anywhere, all ranks throw an AgreedError that the lowest failing rank
  /// prints.
  void together(const std::function<void()>& work);
  void build_model();
  /// Continues from what --load asks for, and opens the logs that need to know from where.
  void load_checkpoint();
  void build_data();
  void print_first(const std::string& line) const;  ///< rank 0
  void print_last(const std::string& line) const;   ///< last rank
  void print_model_summary() const;
  void print_timers(const std::vector<std::string>& names, double normalizer);
  [[nodiscard]] model::StepContext step_context(bool training);
  struct StepLoss {
    double loss = 0;                    ///< mean over all tokens of the step, fp32
    data::PackedStatistics statistics;  ///< over all ranks
  };
  [[nodiscard]] StepLoss reduce_losses(const at::Tensor& local_sum, const data::PackedStatistics& local);
  void stop_on_non_finite_loss(const at::Tensor& local_sum, double reduced_sum);
  void stop_on_non_finite_gradient(double norm);
  void skip_iteration();
  void evaluate_and_report(data::Split split, bool final);
  [[nodiscard]] RunPosition position() const;
  void save_checkpoint(Checkpointer::Kind kind);
  /// The decisions after a step: saves what is due; true when the run ends here.
  [[nodiscard]] bool save_or_leave();
  [[nodiscard]] bool out_of_time() const;
  [[nodiscard]] static double now_seconds();
  [[nodiscard]] bool evaluation_due() const;
  void print_memory(MemoryReportSchedule::Report report);
  void print_memory_line(const std::string& when) const;
  void print_memory_table() const;  ///< estimate and measurement side by side, once, on GPUs

  config::Config config_;
  comm::World& world_;
  at::Device device_;
  LineSink print_;
  mesh::Mesh mesh_;
  Groups groups_;
  kernels::Policy policy_;
  Timers timers_;
  parameter::RandomStreams streams_;
  model::DropoutCursor dropout_;
  std::unique_ptr<parameter::ParameterStore> store_;
  std::unique_ptr<parameter::GradientReducer> reducer_;
  std::unique_ptr<model::GptModel> model_;
  std::unique_ptr<gtp::WeightChain> chain_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::unique_ptr<optim::ParamScheduler> scheduler_;
  std::unique_ptr<config::BatchCalculator> batches_;
  data::Datasets datasets_;
  std::unique_ptr<data::DataLoader> train_loader_, valid_loader_, test_loader_;
  Evidence evidence_;
  std::unique_ptr<Checkpointer> checkpointer_;
  std::optional<Reporter> reporter_;

  double started_;  // seconds, for --exit-duration-in-mins
  std::int64_t iteration_ = 0;
  std::int64_t consumed_samples_ = 0;
  std::int64_t skipped_samples_ = 0;
  std::int64_t consumed_valid_samples_ = 0;
  double floating_point_operations_ = 0;  // of the whole run, over all ranks
  std::int64_t saved_at_ = -1;            // iteration of this process's last persistent save
  std::int64_t saves_ = 0;                // by this process
  StepReport report_;
  double interval_start_ = 0;  // seconds; moved by evaluations so that steps are timed without them
};

}  // namespace pgpt::training

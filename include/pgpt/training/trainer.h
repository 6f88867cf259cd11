#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
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
#include "pgpt/training/batch.h"
#include "pgpt/training/checkpointing.h"
#include "pgpt/training/device.h"
#include "pgpt/training/evidence.h"
#include "pgpt/training/gemm_tuning.h"
#include "pgpt/training/groups.h"
#include "pgpt/training/reporter.h"
#include "pgpt/training/step_graphs.h"
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

  /// One training step, waited for: launch_step, then finish_step.
  const StepReport& step();
  /// Evaluates `iterations` global batches of a set; collective. Empty when the set does not exist.
  struct Evaluation {
    double loss = 0;
    std::int64_t tokens = 0;
  };
  [[nodiscard]] std::optional<Evaluation> evaluate(data::Split split, bool announce);

  /// Called when a step has finished, before its line is printed (tests).
  std::function<void(const StepReport&)> on_step;
  /// Pretends that this rank started so much earlier (tests of --exit-duration-in-mins).
  void add_run_time(std::chrono::duration<double> time) { started_ -= time.count(); }

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
  /// Totals over the ranks, fp64 on the device: the sum of losses, six counts of tokens, and how many ranks have each
  /// piece of news, so that it costs neither a collective nor a wait of its own.
  static constexpr std::int64_t kExit = 7, kSave = 8, kLate = 9, kWritten = 10, kNumTotals = 11;
  /// What some rank has told with totals that were read: all ranks know it at the same step and act alike.
  struct News {
    bool exit = false;     ///< the exit signal has come
    bool save = false;     ///< SIGUSR1 has come
    bool late = false;     ///< --exit-duration-in-mins is over
    bool written = false;  ///< every rank has written its part of the background save
  };
  /// Queues this rank's counts and news for reduce_totals.
  void upload_counts(const data::PackedStatistics& local);
  void reduce_totals(const at::Tensor& loss_sum);
  /// The loss of reduced totals; adds their news to `news_`.
  [[nodiscard]] StepLoss read_totals(const double* totals);

  /// A step whose device work is queued: what the host knows already, and the rest on its way.
  struct LaunchedStep {
    StepReport report;
    HostCopy results;  // fp64 [kNumResults]
    bool overflowed = false;
    bool ran_ahead = false;  ///< queued behind an unfinished step
  };
  /// Results of a step, fp64 on the device: the totals, then these.
  static constexpr std::int64_t kLocalLoss = kNumTotals, kGradNorm = kNumTotals + 1, kRefused = kNumTotals + 2,
                                kProduced = kNumTotals + 3, kNumZeros = kNumTotals + 4, kParamsNorm = kNumTotals + 5,
                                kNumResults = kNumTotals + 6;
  /// Queues one step: all micro-batches, reduction, update. Counters and schedules advance here. The host
  /// waits for a loss scaler, for the timing of new products (--gemm-algorithms) and for the capture of a graph.
  void launch_step();
  /// Waits for the oldest launched step, checks it and makes its report.
  const StepReport& finish_step();
  /// Finishes and prints launched steps until `keep` are left.
  void finish_steps(std::size_t keep);
  void print_step(const StepReport& report);
  /// Whether the step after this one may be launched before this one has finished.
  [[nodiscard]] bool may_run_ahead() const;
  void run_microbatches(std::int64_t num_microbatches, const std::function<model::Batch(std::int64_t)>& next_batch);
  void finish_gradients();
  void scale_gradients(const at::Tensor& factor);  ///< fp32 scalar on the device
  void reduce_and_update(bool update);
  [[nodiscard]] bool launch_eager(const LossScaling& scaling, const optim::StepInputs& inputs);
  void launch_graph(const LossScaling& scaling, const optim::StepInputs& inputs);
  void stop_on_non_finite_loss(std::int64_t iteration, double local_sum, double reduced_sum);
  /// `mine`: this rank's own backward pass produced it.
  void stop_on_non_finite_gradient(std::int64_t iteration, double norm, bool mine);
  void skip_iteration();
  void evaluate_and_report(data::Split split, bool final);
  [[nodiscard]] RunPosition position() const;
  void save_checkpoint(Checkpointer::Kind kind);
  /// Publishes the background save when the news is that all have written it.
  void publish_written();
  /// The decisions after a step: saves what is due; true when the run ends here.
  [[nodiscard]] bool save_or_leave();
  [[nodiscard]] bool out_of_time() const;
  [[nodiscard]] static double now_seconds();
  [[nodiscard]] bool evaluation_due() const;
  [[nodiscard]] bool save_due() const;
  /// Whether the last launched iteration ends an interval; 0 = never.
  [[nodiscard]] bool ends_interval(std::int64_t interval) const { return interval > 0 && iteration_ % interval == 0; }
  void print_memory(MemoryReportSchedule::Report report, std::int64_t iteration);
  void print_memory_line(const std::string& when) const;
  void print_memory_table() const;  ///< estimate and measurement side by side, once, on GPUs

  config::Config config_;
  comm::World& world_;
  at::Device device_;
  std::unique_ptr<StepGraphs> graphs_;  // with --cuda-graph-impl; first, since it chooses the stream
  LineSink print_;
  mesh::Mesh mesh_;
  Groups groups_;
  GemmTuning gemm_tuning_;
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

  at::Tensor totals_;                        // [kNumTotals] fp64 on the device
  at::Tensor results_;                       // [kNumResults] fp64 on the device
  at::Tensor loss_sum_;                      // fp32 scalar on the device: this rank's sum of the step
  at::Tensor dropout_base_;                  // int64 [2] on the device: where dropout streams stand, for graphs
  std::vector<model::Batch> graph_batches_;  // inputs of the captured steps, one a micro-batch
  std::map<std::int64_t, model::DropoutCursor> drawn_;  // dropout calls of one captured step, by micro-batches
  std::deque<LaunchedStep> launched_;
  std::optional<HostCopy> last_results_;  // of the last finished step
  News news_;

  double started_;  // seconds, for --exit-duration-in-mins
  std::int64_t iteration_ = 0;
  std::int64_t consumed_samples_ = 0;
  std::int64_t skipped_samples_ = 0;
  std::int64_t consumed_valid_samples_ = 0;
  double floating_point_operations_ = 0;  // of the whole run, over all ranks
  std::int64_t saved_at_ = -1;            // iteration of this process's last persistent save
  std::int64_t saves_ = 0;                // by this process
  StepReport report_;                     // of the last finished step
  std::int64_t finished_ = 0;             // steps of this process
  std::optional<MemoryReportSchedule> memory_schedule_;
  std::vector<std::string> timer_names_;
  double interval_start_ = 0;  // seconds; moved by evaluations so that steps are timed without them
};

}  // namespace pgpt::training

#include "pgpt/training/trainer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "pgpt/base/error.h"
#include "pgpt/config/flops.h"
#include "pgpt/training/agreement.h"
#include "pgpt/training/batch.h"
#include "pgpt/training/device.h"
#include "pgpt/training/exit_signals.h"

namespace pgpt::training {

double Trainer::now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Trainer::together(const std::function<void()>& work) { training::together(*groups_.data, device_, work); }

void Trainer::print_first(const std::string& line) const {
  if (world_.rank() == 0) print_(line);
}

void Trainer::print_last(const std::string& line) const {
  if (world_.rank() == world_.size() - 1) print_(line);
}

void Trainer::print_timers(const std::vector<std::string>& names, double normalizer) {
  // The data group is the whole world while T = P = 1, the layouts that run today.
  const std::vector<double> mine = timers_.elapsed_ms(names);
  const auto count = static_cast<std::int64_t>(names.size());
  const std::int64_t ranks = groups_.data->size();
  at::Tensor input = at::empty({count}, at::kDouble);
  std::copy(mine.begin(), mine.end(), input.data_ptr<double>());
  input = input.to(device_);
  at::Tensor all = at::empty({ranks, count}, input.options());
  groups_.data->all_gather(all, input).wait();
  timers_.reset(names);
  if (!reporter_->owner()) return;
  const at::Tensor host = all.to(at::kCPU);
  std::vector<std::vector<double>> per_rank;
  std::vector<std::pair<std::string, double>> longest;
  for (std::int64_t r = 0; r < ranks; ++r) {
    const double* row = host.data_ptr<double>() + r * count;
    per_rank.emplace_back(row, row + count);
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    double milliseconds = 0;
    for (const auto& row : per_rank) milliseconds = std::max(milliseconds, row[i]);
    longest.emplace_back(names[i], milliseconds / 1000.0 / normalizer);
  }
  for (const std::string& line :
       timer_lines(parse_timer_option(config_.logging.timing_option), names, per_rank, normalizer))
    print_(line);
  reporter_->timers(iteration_, longest);
}

model::StepContext Trainer::step_context(bool training) {
  model::StepContext context;
  context.config = &config_.model;
  context.policy = policy_;
  context.chain = chain_.get();
  context.reducer = training ? reducer_.get() : nullptr;
  context.training = training;
  context.dropout = &dropout_;
  return context;
}

void Trainer::upload_counts(const data::PackedStatistics& local) {
  at::Tensor counts = at::empty({kNumTotals}, at::TensorOptions().dtype(at::kDouble).pinned_memory(device_.is_cuda()));
  double* c = counts.data_ptr<double>();
  c[0] = 0;
  c[1] = static_cast<double>(local.tokens);
  c[2] = static_cast<double>(local.valid_tokens);
  c[3] = static_cast<double>(local.documents);
  c[4] = static_cast<double>(local.squared_document_lengths);
  c[5] = static_cast<double>(local.segments);
  c[6] = static_cast<double>(local.squared_segment_lengths);
  const config::TrainingConfig& training = config_.training;
  c[kExit] = training.exit_signal_handler && ExitSignals::exit_requested() ? 1 : 0;
  c[kSave] = training.exit_signal_handler && ExitSignals::save_requested() ? 1 : 0;
  c[kLate] = out_of_time() ? 1 : 0;
  c[kWritten] = checkpointer_->part_written() ? 1 : 0;
  totals_.copy_(counts, /*non_blocking=*/true);
}

void Trainer::reduce_totals(const at::Tensor& loss_sum) {
  totals_.select(0, 0).copy_(loss_sum);
  groups_.data->all_reduce(totals_, comm::ReduceOp::kSum).wait();
}

Trainer::StepLoss Trainer::read_totals(const double* totals) {
  StepLoss result;
  result.statistics.tokens = static_cast<std::int64_t>(totals[1]);
  result.statistics.valid_tokens = static_cast<std::int64_t>(totals[2]);
  result.statistics.documents = static_cast<std::int64_t>(totals[3]);
  result.statistics.squared_document_lengths = static_cast<std::int64_t>(totals[4]);
  result.statistics.segments = static_cast<std::int64_t>(totals[5]);
  result.statistics.squared_segment_lengths = static_cast<std::int64_t>(totals[6]);
  // A signal reaches some ranks and not others, and clocks differ: every rank does what any of them must.
  news_.exit |= totals[kExit] > 0;
  news_.save |= totals[kSave] > 0;
  news_.late |= totals[kLate] > 0;
  news_.written |= totals[kWritten] == world_.size();
  // Losses are reported in fp32, as the reference does.
  result.loss =
      static_cast<float>(totals[0]) / static_cast<float>(std::max<std::int64_t>(result.statistics.valid_tokens, 1));
  return result;
}

void Trainer::stop_on_non_finite_loss(std::int64_t iteration, double local_sum, double reduced_sum) {
  if (std::isfinite(reduced_sum)) return;
  // Every rank is here, since all see the same sum: find the first one whose own loss is bad.
  at::Tensor culprit = at::full({1}, std::isfinite(local_sum) ? world_.size() : world_.rank(),
                                at::TensorOptions(device_).dtype(at::kLong));
  groups_.data->all_reduce(culprit, comm::ReduceOp::kMin).wait();
  const auto rank = culprit.item<std::int64_t>();
  throw AgreedError(ExitCode::kNonFinite,
                    concat("iteration ", iteration, ": the loss of rank ", rank,
                           " is NaN or Inf; no weights were changed. Lower --lr, ",
                           "look at this step's data, or pass --no-check-for-nan-in-loss-and-grad to go on"),
                    rank == world_.rank());
}

void Trainer::stop_on_non_finite_gradient(std::int64_t iteration, double norm, bool mine) {
  const std::optional<std::string> name = optimizer_->first_non_finite();
  // The lowest rank whose own gradients were bad before any reduction speaks; rank 0 when none knows (GTP mixes
  // gradients earlier).
  mine = mine || world_.size() == 1;
  at::Tensor culprit = at::full({1}, mine ? world_.rank() : world_.size(), at::TensorOptions(device_).dtype(at::kLong));
  groups_.data->all_reduce(culprit, comm::ReduceOp::kMin).wait();
  const auto rank = culprit.item<std::int64_t>();
  const bool known = rank < world_.size();
  throw AgreedError(ExitCode::kNonFinite,
                    concat("iteration ", iteration, ": the gradient norm is ", norm,
                           name ? concat(", first in ", *name) : std::string(),
                           known ? concat(", produced by rank ", rank) : std::string(),
                           "; no weights were changed. Lower --lr, look at this step's data, or pass "
                           "--no-check-for-nan-in-loss-and-grad to go on"),
                    world_.rank() == (known ? rank : 0));
}

void Trainer::run_microbatches(std::int64_t num_microbatches,
                               const std::function<model::Batch(std::int64_t)>& next_batch) {
  timers_.start("forward-backward", 1);
  reducer_->begin_step();
  model::StepContext context = step_context(true);
  loss_sum_.zero_();
  for (std::int64_t m = 0; m < num_microbatches; ++m) {
    if (m + 1 == num_microbatches) reducer_->begin_last_microbatch();
    const model::Batch batch = next_batch(m);
    context.observer = evidence_.observer(m);
    evidence_.add_inputs(m, batch);
    const model::LossSum loss = model_->forward_backward(context, batch);
    evidence_.add_token_losses(m, loss.token_losses);
    loss_sum_.add_(loss.sum);
  }
  timers_.stop("forward-backward");
}

void Trainer::scale_gradients(const at::Tensor& factor) {
  at::Tensor& gradients = store_->gradients();
  if (gradients.scalar_type() == at::kFloat) {
    gradients.mul_(factor);
    return;
  }
  // A product with a scalar tensor would round the factor to the gradients' type first.
  constexpr std::int64_t kPiece = std::int64_t{1} << 26;
  for (std::int64_t first = 0; first < gradients.numel(); first += kPiece) {
    at::Tensor piece = gradients.narrow(0, first, std::min(kPiece, gradients.numel() - first));
    piece.copy_(piece.to(at::kFloat).mul_(factor));
  }
}

void Trainer::finish_gradients() {
  timers_.start("all-grads-sync", 1);
  chain_->finish_gradients();
  reducer_->finish();
  timers_.stop("all-grads-sync");
  reduce_totals(loss_sum_);
  if (config_.training.per_token_loss) {
    scale_gradients(totals_.select(0, 2).clamp_min(1.0).reciprocal().to(at::kFloat));
  }
  evidence_.add_main_gradients(*store_);
}

void Trainer::reduce_and_update(bool update) {
  // With a loss scaler bad gradients were handled before; without the check the run goes on with what it has.
  const bool guarded = config_.training.check_for_nan && !optimizer_->loss_scaler().enabled();
  if (update) {
    chain_->release_weights();
    optimizer_->update(guarded ? totals_.select(0, 0) : at::Tensor());
  }
  results_.narrow(0, 0, kNumTotals).copy_(totals_);
  results_.select(0, kLocalLoss).copy_(loss_sum_);
  results_.select(0, kGradNorm).copy_(optimizer_->gradient_norm());
  results_.select(0, kRefused).copy_(optimizer_->refused());
  if (reducer_->non_finite().defined()) results_.select(0, kProduced).copy_(reducer_->non_finite());
  if (optimizer_->num_zeros().defined()) results_.select(0, kNumZeros).copy_(optimizer_->num_zeros());
  if (config_.logging.params_norm) results_.select(0, kParamsNorm).copy_(optimizer_->params_norm());
}

bool Trainer::launch_eager(const LossScaling& scaling, const optim::StepInputs& inputs) {
  data::PackedStatistics statistics;
  run_microbatches(scaling.num_microbatches, [&](std::int64_t /*index*/) {
    timers_.start("batch-generator", 2);
    const data::MicroBatch micro_batch = train_loader_->next();
    model::Batch batch = to_device(micro_batch, scaling, device_);
    timers_.stop("batch-generator");
    statistics += micro_batch.statistics;
    return batch;
  });
  upload_counts(statistics);
  finish_gradients();
  timers_.start("optimizer", 1);
  const bool overflowed = optimizer_->gradients_overflow();
  if (!overflowed) optimizer_->prepare(inputs);
  reduce_and_update(!overflowed);
  timers_.stop("optimizer");
  return !overflowed;
}

void Trainer::launch_graph(const LossScaling& scaling, const optim::StepInputs& inputs) {
  const std::int64_t count = scaling.num_microbatches;
  data::PackedStatistics statistics;
  for (std::int64_t m = 0; m < count; ++m) {
    const data::MicroBatch micro_batch = train_loader_->next();
    statistics += micro_batch.statistics;
    if (static_cast<std::size_t>(m) < graph_batches_.size()) {
      to_device(micro_batch, scaling, graph_batches_[static_cast<std::size_t>(m)]);
    } else {
      graph_batches_.push_back(to_device(micro_batch, scaling, device_));
    }
  }
  upload_counts(statistics);
  optimizer_->prepare(inputs);
  // A graph repeats the arguments of its kernels, so dropout offsets inside it count from a base on the device.
  at::Tensor base = at::empty({2}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
  base.data_ptr<std::int64_t>()[0] = static_cast<std::int64_t>(dropout_.hidden_offset);
  base.data_ptr<std::int64_t>()[1] = static_cast<std::int64_t>(dropout_.attention_offset);
  dropout_base_.copy_(base, /*non_blocking=*/true);
  const model::DropoutCursor before = dropout_;
  chain_->release_weights();  // a graph gathers what it reads
  graphs_->run(count, [&] {
    dropout_ = {before.hidden_seed,        0, before.attention_seed, 0, dropout_base_.select(0, 0),
                dropout_base_.select(0, 1)};
    run_microbatches(count, [&](std::int64_t m) { return graph_batches_[static_cast<std::size_t>(m)]; });
    finish_gradients();
    reduce_and_update(true);
    drawn_[count] = dropout_;
  });
  dropout_ = before;
  dropout_.hidden_offset += drawn_[count].hidden_offset;
  dropout_.attention_offset += drawn_[count].attention_offset;
  // Collectives inside a graph are out of the watchdog's sight: this one carries the deadline of the whole step.
  if (world_.size() > 1) groups_.data->all_reduce(at::zeros({1}, totals_.options()), comm::ReduceOp::kSum).wait();
}

void Trainer::launch_step() {
  at::NoGradGuard no_grad;
  const config::TrainingConfig& training = config_.training;
  batches_->update(consumed_samples_);
  LossScaling scaling;
  scaling.per_token = training.per_token_loss;
  scaling.num_microbatches = batches_->num_microbatches();
  scaling.loss_scale = optimizer_->loss_scaler().scale();
  optim::StepInputs inputs;
  inputs.learning_rate = scheduler_->learning_rate();
  inputs.decoupled_learning_rate =
      scheduler_->learning_rate(config_.optimizer.decoupled_lr.value_or(config_.optimizer.lr),
                                config_.optimizer.decoupled_min_lr.value_or(config_.optimizer.min_lr));
  inputs.weight_decay = scheduler_->weight_decay();
  evidence_.begin_iteration(iteration_ + 1, scaling, *store_);

  bool updated = true;
  const std::int64_t before = finished_ + static_cast<std::int64_t>(launched_.size());  // steps of this process
  if (graphs_ && before >= training.cuda_graph_warmup_steps) {
    launch_graph(scaling, inputs);
  } else {
    updated = launch_eager(scaling, inputs);
  }
  const std::int64_t samples = batches_->samples_per_step();
  if (updated) scheduler_->step(samples);
  ++iteration_;
  consumed_samples_ += samples;
  skipped_samples_ += batches_->skipped_per_step();

  LaunchedStep launched{{}, HostCopy(results_), !updated, !launched_.empty()};
  StepReport& report = launched.report;
  report.iteration = iteration_;
  report.consumed_samples = consumed_samples_;
  report.skipped_samples = skipped_samples_;
  report.applied_learning_rate = inputs.learning_rate;
  report.learning_rate = scheduler_->learning_rate();
  report.batch_size = samples;
  report.applied_loss_scale = scaling.loss_scale;
  report.loss_scale = optimizer_->loss_scaler().scale();
  report.skipped = !updated;
  launched_.push_back(std::move(launched));
}

const StepReport& Trainer::finish_step() {
  at::NoGradGuard no_grad;
  PGPT_ASSERT(!launched_.empty(), "no step was launched");
  LaunchedStep launched = std::move(launched_.front());
  launched_.pop_front();
  const double* results = launched.results.wait().const_data_ptr<double>();
  report_ = std::move(launched.report);
  const StepLoss loss = read_totals(results);
  // Dynamic loss scales turn the check off; a constant one cannot answer to a loss that stays bad.
  if (config_.training.check_for_nan) {
    stop_on_non_finite_loss(report_.iteration, results[kLocalLoss], loss.loss);
  }
  if (!launched.overflowed) report_.grad_norm = results[kGradNorm];
  if (evidence_.active()) {
    together([&] { evidence_.finish_iteration(*store_, *optimizer_, report_.grad_norm); });
  }
  if (results[kRefused] != 0.0) {
    stop_on_non_finite_gradient(report_.iteration, results[kGradNorm], results[kProduced] != 0.0);
  }
  report_.losses = {{"lm loss", static_cast<float>(loss.loss)}};
  if (!launched.overflowed && optimizer_->num_zeros().defined()) report_.num_zeros = results[kNumZeros];
  if (config_.logging.params_norm) report_.params_norm = results[kParamsNorm];
  report_.tokens = static_cast<double>(loss.statistics.tokens);
  report_.documents = static_cast<double>(loss.statistics.documents);
  report_.flops = config::training_flops(config_.model, report_.tokens,
                                         static_cast<double>(loss.statistics.squared_segment_lengths));
  const MemoryUse memory = memory_use(device_);
  report_.memory_allocated_bytes = memory.allocated;
  report_.memory_max_allocated_bytes = memory.max_allocated;
  report_.memory_reserved_bytes = memory.reserved;
  report_.memory_allocated_count = memory.allocations;
  floating_point_operations_ += report_.flops;
  const double now = now_seconds();
  report_.elapsed_ms = (now - interval_start_) * 1000.0;
  // The host is late for steps that ran one after the other; the device knows when they ended.
  if (launched.ran_ahead && last_results_) {
    report_.elapsed_ms = launched.results.milliseconds_since(*last_results_).value_or(report_.elapsed_ms);
  }
  last_results_ = std::move(launched.results);
  interval_start_ = now;
  ++finished_;
  if (on_step) on_step(report_);
  return report_;
}

const StepReport& Trainer::step() {
  launch_step();
  return finish_step();
}

}  // namespace pgpt::training

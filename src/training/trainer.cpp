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
  context.fuse_gradient_accumulation = config_.training.gradient_accumulation_fusion;
  context.dropout = &dropout_;
  return context;
}

Trainer::StepLoss Trainer::reduce_losses(const at::Tensor& local_sum, const data::PackedStatistics& local) {
  // Sums in fp32 as the reference reports them; counts in fp64, exact for any batch.
  const at::TensorOptions fp64 = at::TensorOptions(device_).dtype(at::kDouble);
  at::Tensor counts = at::empty({6}, at::kDouble);
  double* c = counts.data_ptr<double>();
  c[0] = static_cast<double>(local.tokens);
  c[1] = static_cast<double>(local.valid_tokens);
  c[2] = static_cast<double>(local.documents);
  c[3] = static_cast<double>(local.squared_document_lengths);
  c[4] = static_cast<double>(local.segments);
  c[5] = static_cast<double>(local.squared_segment_lengths);
  counts = counts.to(fp64.device());
  at::Tensor sum = local_sum.reshape({1}).clone();
  comm::Pending first = groups_.data->all_reduce(sum, comm::ReduceOp::kSum);
  first.wait();
  comm::Pending second = groups_.data->all_reduce(counts, comm::ReduceOp::kSum);
  second.wait();
  const at::Tensor host_counts = counts.to(at::kCPU);
  const double* total = host_counts.data_ptr<double>();
  StepLoss result;
  result.statistics.tokens = static_cast<std::int64_t>(total[0]);
  result.statistics.valid_tokens = static_cast<std::int64_t>(total[1]);
  result.statistics.documents = static_cast<std::int64_t>(total[2]);
  result.statistics.squared_document_lengths = static_cast<std::int64_t>(total[3]);
  result.statistics.segments = static_cast<std::int64_t>(total[4]);
  result.statistics.squared_segment_lengths = static_cast<std::int64_t>(total[5]);
  const auto reduced = sum.item<float>();
  result.loss = reduced / static_cast<float>(std::max<std::int64_t>(result.statistics.valid_tokens, 1));
  return result;
}

void Trainer::stop_on_non_finite_loss(const at::Tensor& local_sum, double reduced_sum) {
  if (std::isfinite(reduced_sum)) return;
  // Every rank is here, since all see the same sum: find the first one whose own loss is bad.
  at::Tensor culprit = at::full({1}, std::isfinite(local_sum.item<float>()) ? world_.size() : world_.rank(),
                                at::TensorOptions(device_).dtype(at::kLong));
  groups_.data->all_reduce(culprit, comm::ReduceOp::kMin).wait();
  const auto rank = culprit.item<std::int64_t>();
  throw AgreedError(ExitCode::kNonFinite,
                    concat("iteration ", iteration_ + 1, ": the loss of rank ", rank,
                           " is NaN or Inf; no weights were changed. Lower --lr, ",
                           "look at this step's data, or pass --no-check-for-nan-in-loss-and-grad to go on"),
                    rank == world_.rank());
}

void Trainer::stop_on_non_finite_gradient(double norm) {
  std::string names;
  for (const parameter::Parameter& parameter : store_->parameters()) {
    if (at::isfinite(parameter.main_gradient).all().item<bool>()) continue;
    names = parameter.spec.name;
    break;
  }
  // The lowest rank whose own gradients were bad before any reduction speaks; rank 0 when none knows (GTP mixes
  // gradients earlier).
  const bool mine = world_.size() == 1 || reducer_->produced_non_finite();
  at::Tensor culprit = at::full({1}, mine ? world_.rank() : world_.size(), at::TensorOptions(device_).dtype(at::kLong));
  groups_.data->all_reduce(culprit, comm::ReduceOp::kMin).wait();
  const auto rank = culprit.item<std::int64_t>();
  const bool known = rank < world_.size();
  throw AgreedError(ExitCode::kNonFinite,
                    concat("iteration ", iteration_ + 1, ": the gradient norm is ", norm,
                           names.empty() ? "" : concat(", first in ", names),
                           known ? concat(", produced by rank ", rank) : std::string(),
                           "; no weights were changed. Lower --lr, look at this step's data, or pass "
                           "--no-check-for-nan-in-loss-and-grad to go on"),
                    world_.rank() == (known ? rank : 0));
}

const StepReport& Trainer::step() {
  at::NoGradGuard no_grad;
  const config::TrainingConfig& training = config_.training;
  batches_->update(consumed_samples_);
  const std::int64_t num_microbatches = batches_->num_microbatches();
  LossScaling scaling;
  scaling.per_token = training.per_token_loss;
  scaling.num_microbatches = num_microbatches;
  scaling.loss_scale = optimizer_->loss_scaler().scale();

  evidence_.begin_iteration(iteration_ + 1, scaling, *store_);
  timers_.start("forward-backward", 1);
  reducer_->begin_step();
  model::StepContext context = step_context(true);
  at::Tensor loss_sum = at::zeros({}, at::TensorOptions(device_).dtype(at::kFloat));
  data::PackedStatistics statistics;
  for (std::int64_t m = 0; m < num_microbatches; ++m) {
    if (m + 1 == num_microbatches) reducer_->begin_last_microbatch();
    timers_.start("batch-generator", 2);
    const data::MicroBatch micro_batch = train_loader_->next();
    const model::Batch batch = to_device(micro_batch, scaling, device_);
    timers_.stop("batch-generator");
    statistics += micro_batch.statistics;
    context.observer = evidence_.observer(m);
    evidence_.add_inputs(m, batch);
    const model::LossSum loss = model_->forward_backward(context, batch);
    evidence_.add_token_losses(m, loss.token_losses);
    loss_sum.add_(loss.sum);
  }
  timers_.stop("forward-backward");
  timers_.start("all-grads-sync", 1);
  chain_->finish_gradients();
  reducer_->finish();
  timers_.stop("all-grads-sync");

  const StepLoss loss = reduce_losses(loss_sum, statistics);
  if (training.check_for_nan && !optimizer_->loss_scaler().enabled()) stop_on_non_finite_loss(loss_sum, loss.loss);
  if (training.per_token_loss) {
    store_->gradients().mul_(1.0 / static_cast<double>(std::max<std::int64_t>(loss.statistics.valid_tokens, 1)));
  }
  evidence_.add_main_gradients(*store_);

  const double applied = scheduler_->learning_rate();
  optim::StepInputs inputs;
  inputs.learning_rate = applied;
  inputs.decoupled_learning_rate =
      scheduler_->learning_rate(config_.optimizer.decoupled_lr.value_or(config_.optimizer.lr),
                                config_.optimizer.decoupled_min_lr.value_or(config_.optimizer.min_lr));
  inputs.weight_decay = scheduler_->weight_decay();
  inputs.refuse_non_finite = training.check_for_nan;
  timers_.start("optimizer", 1);
  const optim::StepOutcome outcome = optimizer_->step(inputs);
  timers_.stop("optimizer");
  if (evidence_.active()) together([&] { evidence_.finish_iteration(*store_, *optimizer_, outcome); });
  if (outcome.non_finite) stop_on_non_finite_gradient(*outcome.gradient_norm);
  const std::int64_t samples = batches_->samples_per_step();
  if (outcome.updated) scheduler_->step(samples);

  ++iteration_;
  consumed_samples_ += samples;
  skipped_samples_ += batches_->skipped_per_step();
  report_ = {};
  report_.iteration = iteration_;
  report_.consumed_samples = consumed_samples_;
  report_.skipped_samples = skipped_samples_;
  report_.losses = {{"lm loss", static_cast<float>(loss.loss)}};
  report_.applied_learning_rate = applied;
  report_.learning_rate = scheduler_->learning_rate();
  report_.batch_size = samples;
  report_.loss_scale = scaling.loss_scale;
  report_.grad_norm = outcome.gradient_norm;
  if (outcome.num_zeros) report_.num_zeros = static_cast<double>(*outcome.num_zeros);
  if (config_.logging.params_norm) report_.params_norm = optimizer_->params_norm();
  report_.skipped = !outcome.updated;
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
  interval_start_ = now;
  if (on_step) on_step(report_);
  return report_;
}

}  // namespace pgpt::training

#include "pgpt/training/trainer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <chrono>
#include <algorithm>
#include <cmath>

#include "pgpt/base/error.h"
#include "pgpt/config/flops.h"
#include "pgpt/training/batch.h"
#include "pgpt/training/device.h"
#include "pgpt/training/startup_lines.h"

namespace pgpt::training {
namespace {

double now_seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

at::ScalarType scalar_type(config::Dtype dtype) {
  switch (dtype) {
    case config::Dtype::kBFloat16: return at::kBFloat16;
    case config::Dtype::kFloat16: return at::kHalf;
    case config::Dtype::kFloat32: return at::kFloat;
  }
  return at::kFloat;
}

mesh::Degrees degrees(const config::ParallelConfig& p) {
  return {p.world_size, p.tensor,        p.pipeline,  p.context,           p.gtp,
          p.expert,     p.expert_tensor, p.expert_gtp, p.pipeline_before_data};
}

parameter::RandomStreams make_streams(const config::Config& config, const mesh::Mesh& mesh, int rank) {
  const mesh::Grid& grid = mesh.dense();
  return {config.training.seed, grid.coordinate(rank, mesh::Axis::kTensor), grid.coordinate(rank, mesh::Axis::kGtp),
          grid.coordinate(rank, mesh::Axis::kPipeline), config.training.data_parallel_random_init ? 10 * mesh.data_rank(rank) : 0};
}

}  // namespace

Trainer::Trainer(const config::Config& config, comm::World& world, at::Device device, LineSink print)
    : config_(config),
      world_(world),
      device_(device),
      print_(std::move(print)),
      mesh_(degrees(config.parallel)),
      groups_(create_groups(world, mesh_)),
      policy_{config.training.kernels == config::KernelSet::kFast, config.training.deterministic},
      timers_(config.logging.timing_level, [device] { synchronize(device); }),
      streams_(make_streams(config, mesh_, world.rank())),
      evidence_(config, world.rank(), world.size()),
      reporter_(config, world.rank() == world.size() - 1, 0, print_) {
  at::NoGradGuard no_grad;
  timers_.start("model-and-optimizer-setup", 0);
  build_model();
  timers_.stop("model-and-optimizer-setup");
  print_first(datetime_line(label::kModelBuilt, timestamp()));
  timers_.start("train/valid/test-data-iterators-setup", 0);
  together([this] { build_data(); });
  timers_.stop("train/valid/test-data-iterators-setup");
  print_first(datetime_line(label::kDataBuilt, timestamp()));
  print_first(kSetupDone);
  print_timers({"model-and-optimizer-setup", "train/valid/test-data-iterators-setup"}, 1.0);
}

Trainer::~Trainer() = default;

void Trainer::together(const std::function<void()>& work) {
  std::optional<std::string> failure;
  auto code = ExitCode::kDone;
  try {
    work();
  } catch (const Error& error) {
    failure = error.what();
    code = error.code();
  }
  // Lowest failing rank and its exit code in one number, so that every rank ends alike.
  constexpr std::int64_t kCodes = 16;
  const std::int64_t none = world_.size() * kCodes;
  at::Tensor first = at::full({1}, failure ? world_.rank() * kCodes + static_cast<std::int64_t>(code) : none,
                              at::TensorOptions(device_).dtype(at::kLong));
  groups_.data->all_reduce(first, comm::ReduceOp::kMin).wait();
  const auto found = first.item<std::int64_t>();
  if (found == none) return;
  const std::int64_t rank = found / kCodes;
  throw AgreedError(static_cast<ExitCode>(found % kCodes), failure.value_or(concat("rank ", rank, " failed")), rank == world_.rank());
}

void Trainer::print_first(const std::string& line) const {
  if (world_.rank() == 0) print_(line);
}

void Trainer::print_last(const std::string& line) const {
  if (world_.rank() == world_.size() - 1) print_(line);
}

void Trainer::build_model() {
  const config::TrainingConfig& training = config_.training;
  const config::ParallelConfig& parallel = config_.parallel;
  parameter::StoreOptions options;
  options.weight_dtype = scalar_type(training.params_dtype);
  options.gradient_dtype = training.grad_reduce_in_bf16 ? options.weight_dtype : at::kFloat;
  options.device = device_;
  options.gtp_rank = groups_.gtp_gather->rank();
  options.gtp_size = groups_.gtp_gather->size();
  options.data_shards = groups_.replicate_data->size();
  std::vector<parameter::ParameterSpec> specs = model::GptModel::parameter_specs(config_.model);
  if (parallel.overlap_grad_reduce) {
    // The reference's default (spec/training.md 6.1).
    options.bucket_elements = std::max<std::int64_t>(40'000'000, 1'000'000 * options.data_shards);
    if (parallel.ddp_bucket_size > 0) options.bucket_elements = parallel.ddp_bucket_size;
    if (parallel.ddp_bucket_size == 0 && parallel.ddp_num_buckets > 0) {
      std::int64_t elements = 0;
      for (const parameter::ParameterSpec& spec : specs) {
        std::int64_t size = 1;
        for (const std::int64_t n : spec.shape) size *= n;
        elements += spec.gtp_sharded ? size / options.gtp_size : size;
      }
      options.bucket_elements = std::max<std::int64_t>(1, elements / parallel.ddp_num_buckets);
    }
  }
  options.layout_invariant = config_.model.weight_init == config::WeightInit::kLayoutInvariant;
  options.host_initialization = config_.model.use_cpu_initialization;
  options.initialize = config_.model.perform_initialization;
  options.sm_count = config_.model.init_sm_count;
  store_ = std::make_unique<parameter::ParameterStore>(std::move(specs), options);
  store_->initialize(streams_);
  if (training.data_parallel_random_init) groups_.replicate_data->broadcast(store_->weights(), 0).wait();
  dropout_ = {streams_.default_device.seed, 0, streams_.model_parallel.seed, streams_.model_parallel.offset};

  parameter::ReducerOptions reducer_options;
  reducer_options.overlap = parallel.overlap_grad_reduce;
  reducer_options.per_token_loss = training.per_token_loss;
  reducer_options.check_non_finite = training.check_for_nan && world_.size() > 1;
  reducer_ = std::make_unique<parameter::GradientReducer>(*store_, *groups_.replicate_data, *groups_.gtp_scatter, reducer_options);
  model_ = std::make_unique<model::GptModel>(config_.model, training, *store_, device_);
  gtp::ChainOptions chain_options;
  chain_options.prefetch = parallel.gtp_prefetch;
  chain_options.async_scatter = parallel.gtp_async_reduce_scatter;
  chain_options.fp32_accumulation = parallel.gtp_fp32_accumulation;
  chain_options.mean = !training.per_token_loss;
  chain_ = std::make_unique<gtp::WeightChain>(model_->chain_uses(), *groups_.gtp_gather, *groups_.gtp_scatter, chain_options,
                                              [this](parameter::Parameter& parameter) { reducer_->parameter_ready(parameter); });
  optimizer_ = std::make_unique<optim::Optimizer>(*store_, config_.optimizer, training, config_.logging.num_zeros_in_grad, *groups_.model,
                                                  policy_);
  scheduler_ = std::make_unique<optim::ParamScheduler>(config_.optimizer);
  batches_ = std::make_unique<config::BatchCalculator>(training, config_.parallel.data_ranks());
  print_model_summary();
}

void Trainer::print_model_summary() const {
  const mesh::Grid& grid = mesh_.dense();
  const std::int64_t rank = world_.rank();
  if (grid.coordinate(rank, mesh::Axis::kData) == 0 && grid.coordinate(rank, mesh::Axis::kContext) == 0) {
    print_(parameters_line(grid.coordinate(rank, mesh::Axis::kTensor), grid.coordinate(rank, mesh::Axis::kGtp),
                           grid.coordinate(rank, mesh::Axis::kPipeline), store_->num_local_parameters()));
  }
  std::size_t sharded = 0;
  std::size_t chained = 0;
  for (const parameter::Parameter& parameter : store_->parameters()) {
    if (!parameter.sharded()) continue;
    ++sharded;
    for (const gtp::UseSpec& use : chain_->uses()) {
      if (use.weight == &parameter) {
        ++chained;
        break;
      }
    }
  }
  PGPT_ASSERT(chained == sharded, "a sharded parameter is in no chain");
  print_first(concat("> topology: world ", world_.size(), ", GTP ", config_.parallel.gtp, ", data-parallel ", config_.parallel.data_ranks(),
                     ", replicate data-parallel ", config_.parallel.replicate_data, ", tensor ", config_.parallel.tensor, ", pipeline ",
                     config_.parallel.pipeline));
  print_first(sharded == 0
                  ? std::string("> GTP parameters: none")
                  : concat("> GTP parameters: ", sharded, " sharded, ", chained, " classified into a chain of ", chain_->uses().size(), " uses, ",
                           store_->parameters().size() - sharded, " replicated"));
}

void Trainer::build_data() {
  const data::TokenizerFacts tokenizer = data::resolve_tokenizer(config_);
  const data::LineSink print = [this](const std::string& line) { print_first(line); };
  datasets_ = data::build_datasets(config_, tokenizer, data::requested_samples(config_), print);
  const std::int64_t data_rank = mesh_.data_rank(world_.rank());
  const std::int64_t data_size = config_.parallel.data_ranks();
  if (!config_.training.skip_train) {
    train_loader_ = data::make_loader(config_, datasets_.train, data::Split::kTrain, data_rank, data_size, consumed_samples_);
  }
  valid_loader_ = data::make_loader(config_, datasets_.valid, data::Split::kValid, data_rank, data_size, consumed_valid_samples_);
  test_loader_ = data::make_loader(config_, datasets_.test, data::Split::kTest, data_rank, data_size, 0);
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
  if (!reporter_.owner()) return;
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
  for (const std::string& line : timer_lines(parse_timer_option(config_.logging.timing_option), names, per_rank, normalizer)) print_(line);
  reporter_.timers(iteration_, longest);
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

void Trainer::stop_on_non_finite_loss(double local_sum, double reduced_sum) {
  if (std::isfinite(reduced_sum)) return;
  // Every rank is here, since all see the same sum: find the first one whose own loss is bad.
  at::Tensor culprit = at::full({1}, std::isfinite(local_sum) ? world_.size() : world_.rank(), at::TensorOptions(device_).dtype(at::kLong));
  groups_.data->all_reduce(culprit, comm::ReduceOp::kMin).wait();
  const auto rank = culprit.item<std::int64_t>();
  throw AgreedError(ExitCode::kNonFinite,
                    concat("iteration ", iteration_ + 1, ": the loss of rank ", rank, " is NaN or Inf; no weights were changed. Lower --lr, ",
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
  // The lowest rank whose own gradients were bad before any reduction speaks; rank 0 when none knows (GTP mixes gradients earlier).
  const bool mine = world_.size() == 1 || reducer_->produced_non_finite();
  at::Tensor culprit = at::full({1}, mine ? world_.rank() : world_.size(), at::TensorOptions(device_).dtype(at::kLong));
  groups_.data->all_reduce(culprit, comm::ReduceOp::kMin).wait();
  const auto rank = culprit.item<std::int64_t>();
  const bool known = rank < world_.size();
  throw AgreedError(
      ExitCode::kNonFinite,
      concat("iteration ", iteration_ + 1, ": the gradient norm is ", norm, names.empty() ? "" : concat(", first in ", names),
             known ? concat(", produced by rank ", rank) : std::string(),
             "; no weights were changed. Lower --lr, look at this step's data, or pass --no-check-for-nan-in-loss-and-grad to go on"),
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

  evidence_.begin_iteration(iteration_ + 1, *store_);
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
    evidence_.add_input(m, "tokens", batch.tokens);
    evidence_.add_input(m, "labels", batch.labels);
    evidence_.add_input(m, "loss_mask", batch.loss_mask);
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
  if (training.check_for_nan && !optimizer_->loss_scaler().enabled()) stop_on_non_finite_loss(loss_sum.item<float>(), loss.loss);
  if (training.per_token_loss) {
    store_->gradients().mul_(1.0 / static_cast<double>(std::max<std::int64_t>(loss.statistics.valid_tokens, 1)));
  }
  evidence_.add_main_gradients(*store_);

  const double applied = scheduler_->learning_rate();
  optim::StepInputs inputs;
  inputs.learning_rate = applied;
  inputs.decoupled_learning_rate = scheduler_->learning_rate(config_.optimizer.decoupled_lr.value_or(config_.optimizer.lr),
                                                             config_.optimizer.decoupled_min_lr.value_or(config_.optimizer.min_lr));
  inputs.weight_decay = scheduler_->weight_decay();
  inputs.refuse_non_finite = training.check_for_nan;
  timers_.start("optimizer", 1);
  const optim::StepOutcome outcome = optimizer_->step(inputs);
  timers_.stop("optimizer");
  if (outcome.non_finite) stop_on_non_finite_gradient(*outcome.gradient_norm);
  const std::int64_t samples = batches_->samples_per_step();
  if (outcome.updated) scheduler_->step(samples);
  evidence_.finish_iteration(*store_, *optimizer_);

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
  report_.flops =
      config::training_flops(config_.model, report_.tokens, static_cast<double>(loss.statistics.squared_segment_lengths));
  const MemoryUse memory = memory_use(device_);
  report_.memory_allocated_bytes = memory.allocated;
  report_.memory_max_allocated_bytes = memory.max_allocated;
  report_.memory_reserved_bytes = memory.reserved;
  report_.memory_allocated_count = memory.allocations;
  const double now = now_seconds();
  report_.elapsed_ms = (now - interval_start_) * 1000.0;
  interval_start_ = now;
  if (on_step) on_step(report_);
  return report_;
}

void Trainer::skip_iteration() {
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
  }
  const StepLoss loss = reduce_losses(loss_sum, statistics);
  return Evaluation{loss.loss, loss.statistics.valid_tokens};
}

void Trainer::evaluate_and_report(data::Split split, bool final) {
  const double started = now_seconds();
  world_.set_activity(concat("evaluation after iteration ", iteration_));
  timers_.start("evaluate", 0);
  const std::optional<Evaluation> result = evaluate(split, final);
  timers_.stop("evaluate");
  if (result) {
    EvaluationReport report;
    report.iteration = iteration_;
    report.consumed_samples = consumed_samples_;
    report.set = split == data::Split::kValid ? "validation" : "test";
    report.losses = {{"lm loss", static_cast<float>(result->loss)}};
    report.final = final;
    reporter_.evaluation(report);
    print_timers({"evaluate"}, 1.0);
  }
  interval_start_ += now_seconds() - started;
}

bool Trainer::evaluation_due() const {
  const config::TrainingConfig& training = config_.training;
  return training.eval_iters > 0 && training.eval_interval > 0 && iteration_ % training.eval_interval == 0 &&
         iteration_ >= training.start_eval_at_iter;
}

void Trainer::run() {
  const config::TrainingConfig& training = config_.training;
  if (training.skip_train) {
    print_first(kTrainingSkipped);
  } else {
    print_first(kTrainingStarts);
    print_first(datetime_line(label::kBeforeTraining, timestamp()));
    interval_start_ = now_seconds();
    MemoryReportSchedule memory_schedule(iteration_, config_.logging.memory_interval);
    const std::vector<std::string> timer_names = Timers::training_names(config_.logging.timing_level);
    while (iteration_ < training.train_iters) {
      world_.set_activity(concat("training step ", iteration_ + 1));
      if (std::find(training.iterations_to_skip.begin(), training.iterations_to_skip.end(), iteration_ + 1) !=
          training.iterations_to_skip.end()) {
        skip_iteration();
        continue;
      }
      const bool first = report_.iteration == 0;
      step();
      if (first && config_.parallel.timeout_seconds_after_init) {
        world_.set_timeout(std::chrono::seconds(*config_.parallel.timeout_seconds_after_init));
      }
      const std::optional<PrintedLine> line = reporter_.step(report_);
      const bool printed = first || iteration_ % config_.logging.log_interval == 0;  // on every rank, though only the last one prints
      if (printed && !timer_names.empty()) print_timers(timer_names, static_cast<double>(config_.logging.log_interval));
      if (line) reporter_.progress();
      if (printed) print_memory(memory_schedule.after_line(iteration_));
      if (evaluation_due()) evaluate_and_report(data::Split::kValid, false);
    }
    print_first(datetime_line(label::kAfterTraining, timestamp()));
  }
  if (training.eval_iters > 0) {
    evaluate_and_report(data::Split::kValid, true);
    evaluate_and_report(data::Split::kTest, true);
  }
}

void Trainer::print_memory(MemoryReportSchedule::Report report) {
  if (report == MemoryReportSchedule::Report::kNone || !device_.is_cuda()) return;
  if (report == MemoryReportSchedule::Report::kMemoryAndTheory && world_.rank() == 0) {
    for (const std::string& line : theoretical_memory_lines(config_, batches_->num_microbatches())) print_(line);
  }
  if (mesh_.data_rank(world_.rank()) != 0) return;
  const MemoryUse use = memory_use(device_);
  MemoryStats stats;
  stats.allocated = static_cast<double>(use.allocated);
  stats.max_allocated = static_cast<double>(use.max_allocated);
  stats.reserved = static_cast<double>(use.reserved);
  stats.max_reserved = static_cast<double>(use.max_reserved);
  print_(memory_line(world_.rank(), concat("after ", iteration_, " iterations"), stats));
}

}  // namespace pgpt::training

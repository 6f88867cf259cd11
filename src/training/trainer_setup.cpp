// Building a run, in the order of its life: model, optimizer, checkpoint, data.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>

#include "pgpt/base/error.h"
#include "pgpt/config/flops.h"
#include "pgpt/training/device.h"
#include "pgpt/training/hugging_face_loading.h"
#include "pgpt/training/startup_lines.h"
#include "pgpt/training/trainer.h"

namespace pgpt::training {
namespace {

at::ScalarType scalar_type(config::Dtype dtype) {
  switch (dtype) {
    case config::Dtype::kBFloat16:
      return at::kBFloat16;
    case config::Dtype::kFloat16:
      return at::kHalf;
    case config::Dtype::kFloat32:
      return at::kFloat;
  }
  return at::kFloat;
}

mesh::Degrees degrees(const config::ParallelConfig& p) {
  return {p.world_size,          p.tensor, p.pipeline, p.context, p.gtp, p.expert, p.expert_tensor, p.expert_gtp,
          p.pipeline_before_data};
}

comm::Transport gtp_transport(const config::Config& config) {
  switch (config.parallel.gtp_transport) {
    case config::GtpTransport::kAutomatic:
      // Waits on memory are not captured into graphs.
      return config.training.cuda_graph ? comm::Transport::kCollective : comm::Transport::kAutomatic;
    case config::GtpTransport::kCopyEngine:
      return comm::Transport::kCopyEngine;
    case config::GtpTransport::kNccl:
      break;
  }
  return comm::Transport::kCollective;
}

parameter::RandomStreams make_streams(const config::Config& config, const mesh::Mesh& mesh, int rank) {
  const mesh::Grid& grid = mesh.dense();
  return {config.training.seed, grid.coordinate(rank, mesh::Axis::kTensor), grid.coordinate(rank, mesh::Axis::kGtp),
          grid.coordinate(rank, mesh::Axis::kPipeline),
          config.training.data_parallel_random_init ? 10 * mesh.data_rank(rank) : 0};
}

/// The schedule of the run, or one that is never asked where no step is made and none is given.
config::OptimizerConfig schedule_options(const config::Config& config) {
  if (config.optimizer.lr_decay_samples > 0) return config.optimizer;
  config::OptimizerConfig options = config.training.skip_train ? config::OptimizerConfig() : config.optimizer;
  options.lr_decay_samples = options.wsd_decay_samples = 1;
  return options;
}

}  // namespace

Trainer::Trainer(const config::Config& config, comm::World& world, at::Device device, LineSink print)
    : config_(config),
      world_(world),
      device_(device),
      graphs_(config.training.cuda_graph ? std::make_unique<StepGraphs>(device) : nullptr),
      print_(std::move(print)),
      mesh_(degrees(config.parallel)),
      groups_(create_groups(world, mesh_, gtp_transport(config), config.parallel.gtp_communicators)),
      gemm_tuning_(config, *groups_.data, device, print_),
      policy_{config.training.kernels == config::KernelSet::kFast, config.training.deterministic,
              gemm_tuning_.algorithms()},
      timers_(config.logging.timing_level, [device] { synchronize(device); }),
      streams_(make_streams(config, mesh_, world.rank())),
      evidence_(config, mesh_, world.rank()),
      started_(now_seconds()) {
  at::NoGradGuard no_grad;
  together([this] {  // now, while no work can be lost
    if (world_.rank() == 0) check_save_folders(config_);
  });
  timers_.start("model-and-optimizer-setup", 0);
  build_model();
  load_checkpoint();
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

void Trainer::build_model() {
  const config::TrainingConfig& training = config_.training;
  const config::ParallelConfig& parallel = config_.parallel;
  parameter::StoreOptions options;
  options.weight_dtype = scalar_type(training.params_dtype);
  options.gradient_dtype = training.gradients_in_fp32 ? at::kFloat : options.weight_dtype;
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
  dropout_ = {streams_.default_device.seed, 0, streams_.model_parallel.seed, streams_.model_parallel.offset, {}, {}};

  parameter::ReducerOptions reducer_options;
  reducer_options.overlap = parallel.overlap_grad_reduce;
  reducer_options.per_token_loss = training.per_token_loss;
  reducer_options.check_non_finite = training.check_for_nan && world_.size() > 1;
  reducer_ = std::make_unique<parameter::GradientReducer>(*store_, *groups_.replicate_data, *groups_.gtp_scatter,
                                                          reducer_options);
  model_ = std::make_unique<model::GptModel>(config_.model, training, *store_, device_);
  gtp::ChainOptions chain_options;
  chain_options.prefetch = parallel.gtp_prefetch;
  chain_options.async_scatter = parallel.gtp_async_reduce_scatter;
  chain_options.split_products = parallel.gtp_split_products;
  chain_options.kept_uses = model_->uses_of_last(parallel.gtp_keep_gathered_layers);
  // The copy engine's sum is in fp32 with one rounding anyway.
  chain_options.fp32_accumulation = parallel.gtp_fp32_accumulation && !groups_.gtp_scatter->copies_shared();
  chain_options.mean = !training.per_token_loss;
  groups_.gtp_gather->share({store_->weights()});
  chain_ = std::make_unique<gtp::WeightChain>(
      model_->chain_uses(), *groups_.gtp_gather, *groups_.gtp_scatter, chain_options,
      [this](parameter::Parameter& parameter) { reducer_->parameter_ready(parameter); });
  optimizer_ = std::make_unique<optim::Optimizer>(*store_, config_.optimizer, training,
                                                  config_.logging.num_zeros_in_grad, *groups_.model, policy_);
  scheduler_ = std::make_unique<optim::ParamScheduler>(schedule_options(config_));
  batches_ = std::make_unique<config::BatchCalculator>(training, config_.parallel.data_ranks());
  checkpointer_ = std::make_unique<Checkpointer>(config_, world_, groups_, device_,
                                                 TrainedState{*store_, *optimizer_, *scheduler_, dropout_}, print_);
  const at::TensorOptions on_device(device_);
  totals_ = at::zeros({kNumTotals}, on_device.dtype(at::kDouble));
  results_ = at::zeros({kNumResults}, on_device.dtype(at::kDouble));
  loss_sum_ = at::zeros({}, on_device.dtype(at::kFloat));
  if (graphs_) dropout_base_ = at::zeros({2}, on_device.dtype(at::kLong));
  print_model_summary();
  if (training.train_samples > 0) print_first(training_iterations_line(training.train_iters));
  print_first(decay_style_line(config_.optimizer.lr_decay_style));
  if (config_.logging.throughput) print_first(config::describe_flops(config_.model));
}

void Trainer::load_checkpoint() {
  timers_.start("load-checkpoint", 0);
  const std::optional<RunPosition> loaded = checkpointer_->load();
  if (!config_.checkpoint.load_hf.empty()) {
    world_.set_activity("loading the weights of " + config_.checkpoint.load_hf);
    world_.set_slow(std::chrono::hours(2));  // other ranks wait while one still reads from a slow disk
    together([this] { load_hugging_face(config_, *store_, *optimizer_); });
    world_.set_slow(std::chrono::milliseconds(0));
    print_first(concat("  successfully loaded the weights of ", config_.checkpoint.load_hf));
  }
  timers_.stop("load-checkpoint");
  if (loaded) {
    iteration_ = loaded->iteration;
    consumed_samples_ = loaded->consumed_samples;
    skipped_samples_ = loaded->skipped_samples;
    consumed_valid_samples_ = loaded->consumed_valid_samples;
    floating_point_operations_ = loaded->floating_point_operations;
  }
  together([this] {
    batches_->update(consumed_samples_);
    reporter_.emplace(config_, world_.rank() == world_.size() - 1, iteration_, print_);
  });
  checkpointer_->start(position());
  if (loaded) print_timers({"load-checkpoint"}, 1.0);
}

RunPosition Trainer::position() const {
  return {iteration_, consumed_samples_, skipped_samples_, consumed_valid_samples_, floating_point_operations_};
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
  print_first(concat("> topology: world ", world_.size(), ", GTP ", config_.parallel.gtp, ", data-parallel ",
                     config_.parallel.data_ranks(), ", replicate data-parallel ", config_.parallel.replicate_data,
                     ", tensor ", config_.parallel.tensor, ", pipeline ", config_.parallel.pipeline));
  print_first(sharded == 0
                  ? std::string("> GTP parameters: none")
                  : concat("> GTP parameters: ", sharded, " sharded, ", chained, " classified into a chain of ",
                           chain_->uses().size(), " uses, ", store_->parameters().size() - sharded, " replicated",
                           groups_.gtp_gather->copies_shared() ? "; moved by copy engine" : ""));
  const bool fast = device_.is_cuda() && policy_.fast;
  print_first(
      concat("> kernels: ", fast ? "fast" : "libtorch", "; attention: ",
             model::attention_implementation(config_.model, store_->options().weight_dtype, device_,
                                             config_.training.micro_batch_size, config_.data.has_segments(), policy_)));
}

void Trainer::build_data() {
  const data::TokenizerFacts tokenizer = data::resolve_tokenizer(config_);
  const data::LineSink print = [this](const std::string& line) { print_first(line); };
  datasets_ = data::build_datasets(config_, tokenizer, data::requested_samples(config_), print);
  const std::int64_t data_rank = mesh_.data_rank(world_.rank());
  const std::int64_t data_size = config_.parallel.data_ranks();
  if (!config_.training.skip_train && iteration_ < config_.training.train_iters) {
    train_loader_ =
        data::make_loader(config_, datasets_.train, data::Split::kTrain, data_rank, data_size, consumed_samples_);
  }
  // A run that only evaluates has no more than the samples of one evaluation, whatever earlier ones consumed.
  valid_loader_ = data::make_loader(config_, datasets_.valid, data::Split::kValid, data_rank, data_size,
                                    config_.training.skip_train ? 0 : consumed_valid_samples_);
  test_loader_ = data::make_loader(config_, datasets_.test, data::Split::kTest, data_rank, data_size, 0);
}

}  // namespace pgpt::training

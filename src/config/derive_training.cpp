// Batches, precision, length of the run, recompute, optimizer and schedules.
#include <cmath>

#include "derive.h"
#include "pgpt/config/batch_calculator.h"

namespace pgpt::config {

namespace {

/// The rule that global and evaluation batches obey, with every factor in the message.
void check_batch(const Derivation& d, const std::string& what, std::int64_t batch, const char* micro_option,
                 std::int64_t micro) {
  const ParallelConfig& p = d.config.parallel;
  const std::int64_t unit = micro * p.data_ranks();
  PGPT_CHECK(ConfigError, batch % unit == 0, what, " ", batch, " is not divisible by ", micro_option, " ", micro,
             " x data parallel size ", p.replicate_data, " x GTP ", p.gtp, " = ", unit, "; give a multiple of ", unit);
}

struct Phase {
  bool samples = false;  ///< sample mode
  double batch = 0;      ///< samples an iteration, in iteration mode
};

/// Length of a schedule part in samples: from its iterations in iteration mode, else its samples as given.
std::optional<double> length(const Derivation& d, const Phase& phase, const char* iters, const char* samples) {
  const std::optional<std::int64_t> value = d.values.maybe_integer(phase.samples ? samples : iters);
  if (!value) return std::nullopt;
  PGPT_CHECK(ConfigError, *value >= 0, option_name(phase.samples ? samples : iters), " is ", *value,
             "; it must not be negative");
  return static_cast<double>(*value) * (phase.samples ? 1.0 : phase.batch);
}

}  // namespace

void derive_batches(Derivation& d) {
  TrainingConfig& t = d.config.training;
  const ParallelConfig& p = d.config.parallel;
  Values& v = d.values;
  PGPT_CHECK(ConfigError, v.is_set("micro_batch_size"),
             "--micro-batch-size is required; give the samples of one forward pass");
  t.micro_batch_size = d.positive("micro_batch_size");
  t.decrease_batch_size_if_needed = v.flag("decrease_batch_size_if_needed");
  const std::string schedule = v.text("step_batch_size_schedule");
  if (!schedule.empty()) {
    PGPT_CHECK(ConfigError, !v.is_set("global_batch_size"),
               "--step-batch-size-schedule and --global-batch-size exclude each other; give one");
    PGPT_CHECK(ConfigError, !t.decrease_batch_size_if_needed,
               "--step-batch-size-schedule and --decrease-batch-size-if-needed exclude each other; give one");
    PGPT_CHECK(
        ConfigError, v.is_set("train_samples"),
        "--step-batch-size-schedule needs --train-samples: with --train-iters the samples of the run are not known");
    std::optional<std::int64_t> seq = d.maybe_positive("seq_length");
    if (!seq) seq = d.maybe_positive("encoder_seq_length");
    PGPT_CHECK(ConfigError, seq.has_value(), "--seq-length is required; give the tokens of a sample");
    t.batch_size_schedule = parse_batch_size_schedule(schedule, seq);
    for (std::size_t i = 0; i < t.batch_size_schedule.size(); ++i) {
      const std::int64_t batch = t.batch_size_schedule[i].second;
      check_batch(d, "--step-batch-size-schedule: batch", batch, "--micro-batch-size", t.micro_batch_size);
      PGPT_CHECK(ConfigError, i == 0 || batch >= t.batch_size_schedule[i - 1].second,
                 "--step-batch-size-schedule lowers the batch from ", t.batch_size_schedule[i == 0 ? 0 : i - 1].second,
                 " to ", batch, "; batch sizes may only grow");
    }
    t.global_batch_size = t.batch_size_schedule.front().second;
  } else if (v.is_set("global_batch_size")) {
    t.global_batch_size = d.positive("global_batch_size");
  } else {
    t.global_batch_size = t.micro_batch_size * p.data_ranks();
    d.notice(concat("setting global batch size to ", t.global_batch_size));
  }
  const std::int64_t unit = t.micro_batch_size * p.data_ranks();
  if (t.decrease_batch_size_if_needed) {
    PGPT_CHECK(ConfigError, t.global_batch_size >= unit, "--global-batch-size ", t.global_batch_size,
               " is below one microbatch on every data rank: --micro-batch-size ", t.micro_batch_size,
               " x data parallel size ", p.replicate_data, " x GTP ", p.gtp, " = ", unit);
  } else {
    check_batch(d, "--global-batch-size", t.global_batch_size, "--micro-batch-size", t.micro_batch_size);
  }
  v.derive("global_batch_size", t.global_batch_size);

  t.eval_micro_batch_size = d.maybe_positive("eval_micro_batch_size").value_or(t.micro_batch_size);
  t.eval_iters = v.integer("eval_iters");
  PGPT_CHECK(ConfigError, t.eval_iters >= 0, "--eval-iters is ", t.eval_iters, "; it must not be negative");
  const std::int64_t usual = t.global_batch_size / unit * unit;
  t.eval_global_batch_size = d.maybe_positive("eval_global_batch_size").value_or(usual);
  const bool eval_given = v.given("eval_global_batch_size") || v.given("eval_micro_batch_size");
  if (t.eval_iters > 0 || eval_given) {
    check_batch(d, "--eval-global-batch-size", t.eval_global_batch_size, "--eval-micro-batch-size",
                t.eval_micro_batch_size);
  }
  v.derive("eval_micro_batch_size", t.eval_micro_batch_size);
  v.derive("eval_global_batch_size", t.eval_global_batch_size);
  t.eval_interval = d.maybe_positive("eval_interval").value_or(0);
  t.start_eval_at_iter = v.maybe_integer("start_eval_at_iter").value_or(0);
  t.skip_train = v.flag("skip_train");
  t.full_validation = v.flag("full_validation");
}

void check_microbatches(Derivation& d) {
  const ParallelConfig& p = d.config.parallel;
  const TrainingConfig& t = d.config.training;
  if (!p.overlap_grad_reduce) {  // then there is one bucket
    d.warn_unused({"ddp_bucket_size", "ddp_num_buckets"}, "--overlap-grad-reduce");
  }
  if (p.virtual_pipeline == 0) {
    if (p.microbatch_group_size != p.pipeline) {
      d.warn_unused("microbatch_group_size_per_virtual_pipeline_stage", "virtual pipeline stages");
    }
    return;
  }
  std::vector<std::int64_t> batches{t.global_batch_size};
  for (const auto& [sample, batch] : t.batch_size_schedule) batches.push_back(batch);
  for (const std::int64_t batch : batches) {
    const std::int64_t count = batch / (t.micro_batch_size * p.data_ranks());
    const std::int64_t rest = count % p.microbatch_group_size;
    PGPT_CHECK(ConfigError, count >= p.microbatch_group_size && (rest == 0 || rest >= p.pipeline),
               "virtual pipeline stages take the ", count, " micro-batch(es) of a global batch of ", batch,
               " in groups of ", p.microbatch_group_size,
               " (--microbatch-group-size-per-virtual-pipeline-stage, else --pipeline-model-parallel-size); give at "
               "least one group, and a last group of at least ",
               p.pipeline);
  }
}

void derive_precision(Derivation& d) {
  TrainingConfig& t = d.config.training;
  Values& v = d.values;
  const bool bf16 = v.flag("bf16"), fp16 = v.flag("fp16");
  PGPT_CHECK(ConfigError, !bf16 || !fp16, "--bf16 and --fp16 exclude each other; give one");
  t.params_dtype = bf16 ? Dtype::kBFloat16 : fp16 ? Dtype::kFloat16 : Dtype::kFloat32;
  t.loss_scale = v.maybe_real("loss_scale");
  PGPT_CHECK(ConfigError, !t.loss_scale || (*t.loss_scale > 0 && std::isfinite(*t.loss_scale)), "--loss-scale is ",
             *t.loss_scale, "; it must be above 0 and finite");
  t.initial_loss_scale = v.real("initial_loss_scale");
  t.min_loss_scale = v.real("min_loss_scale");
  t.loss_scale_window = v.real("loss_scale_window");
  t.hysteresis = v.integer("hysteresis");
  PGPT_CHECK(ConfigError,
             t.initial_loss_scale >= t.min_loss_scale && t.min_loss_scale > 0 && std::isfinite(t.initial_loss_scale),
             "--initial-loss-scale ", t.initial_loss_scale, " must not be below --min-loss-scale ", t.min_loss_scale,
             ", which must be above 0; both must be finite");
  PGPT_CHECK(ConfigError, t.loss_scale_window >= 1, "--loss-scale-window is ", t.loss_scale_window,
             "; it must be at least 1");
  PGPT_CHECK(ConfigError, t.hysteresis >= 1, "--hysteresis is ", t.hysteresis, "; it must be at least 1");
  if (!fp16 || t.loss_scale) {
    d.warn_unused({"initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"},
                  fp16 ? "dynamic loss scaling (remove --loss-scale)" : "--fp16");
  }
  t.check_for_nan = v.flag("check_for_nan_in_loss_and_grad");
  if (fp16 && !t.loss_scale && t.check_for_nan) {
    t.check_for_nan = false;
    v.derive("check_for_nan_in_loss_and_grad", false);
    d.notice("WARNING: dynamic loss scaling turns the NaN check of loss and gradients off");
  }
  const bool reduce_in_type = v.flag("grad_reduce_in_bf16");
  if (t.params_dtype == Dtype::kFloat32) {
    d.warn_unused("grad_reduce_in_bf16", "--bf16 or --fp16");
  } else if (reduce_in_type) {
    d.warn_unused("accumulate_allreduce_grads_in_fp32", "float32 gradients (remove --grad-reduce-in-bf16)");
  }
  const bool asked = v.flag("accumulate_allreduce_grads_in_fp32");
  if (bf16 && !reduce_in_type && !asked)
    d.notice("accumulate and all-reduce gradients in fp32 for bfloat16 data type.");
  const bool accumulate = !reduce_in_type && (asked || bf16);
  t.gradients_in_fp32 = accumulate || t.params_dtype == Dtype::kFloat32;
  v.derive("accumulate_allreduce_grads_in_fp32", accumulate);
  const std::string name = bf16 ? "torch.bfloat16" : fp16 ? "torch.float16" : "torch.float32";
  v.derive("params_dtype", name);
  d.notice("using " + name + " for parameters ...");
  t.gradient_accumulation_fusion = v.flag("gradient_accumulation_fusion");
  t.per_token_loss = v.flag("calculate_per_token_loss");
  t.reduced_precision_matmul = !v.flag("disable_bf16_reduced_precision_matmul");
  t.deterministic = v.flag("deterministic_mode");
  const std::string logits = v.text("output_logit_dtype");
  PGPT_CHECK(ConfigError, logits.empty() || (logits == "bf16") == bf16, "--output-logit-dtype ", logits,
             " differs from the parameter type ", name, ", which is not implemented; remove it");
}

void derive_run_length(Derivation& d) {
  TrainingConfig& t = d.config.training;
  Values& v = d.values;
  const std::string loader = v.text("dataloader_type");
  d.config.data.dataloader = loader == "cyclic" ? DataloaderType::kCyclic : DataloaderType::kSingle;
  if (loader.empty()) v.derive("dataloader_type", std::string("single"));

  const std::optional<std::int64_t> iters = v.maybe_integer("train_iters");
  const std::optional<std::int64_t> samples = v.maybe_integer("train_samples");
  PGPT_CHECK(ConfigError, !iters || !samples, "--train-iters and --train-samples exclude each other; give one");
  const auto refuse = [&](const char* destination, const char* mode) {
    const bool counted = v.given(destination) && v.at(destination) != Value(std::int64_t{0});
    PGPT_CHECK(ConfigError, !counted, option_name(destination), " cannot be combined with ", mode,
               "; use its counterpart in ", std::string(mode) == "--train-iters" ? "iterations" : "samples");
  };
  if (iters) {
    PGPT_CHECK(ConfigError, *iters >= 0, "--train-iters is ", *iters, "; it must not be negative");
    for (const char* name : {"lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples"})
      refuse(name, "--train-iters");
    t.train_iters = *iters;
  }
  if (samples) {
    PGPT_CHECK(ConfigError, *samples > 0, "--train-samples is ", *samples, "; it must be above 0");
    for (const char* name : {"lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"})
      refuse(name, "--train-samples");
    t.train_samples = *samples;
    t.train_iters = iterations_for_samples(t);
    PGPT_CHECK(ConfigError, t.train_iters > 0, "--train-samples ", *samples, " is below one global batch of ",
               t.global_batch_size);
    d.notice(concat("setting training iterations to ", t.train_iters));
    v.derive("train_iters", t.train_iters);
  }
  PGPT_CHECK(ConfigError, iters || samples || t.skip_train,
             "the length of the run is missing; give --train-iters or --train-samples");
  if (v.is_set("lr_warmup_fraction")) {
    for (const char* name : {"lr_warmup_iters", "lr_warmup_samples"}) {
      PGPT_CHECK(ConfigError, v.integer(name) == 0, "--lr-warmup-fraction and ", option_name(name),
                 " exclude each other; give one");
    }
  }
  t.iterations_to_skip = v.integers("iterations_to_skip");
  for (const std::int64_t iteration : t.iterations_to_skip) {
    PGPT_CHECK(ConfigError, iteration >= 1, "--iterations-to-skip ", iteration, ": iterations are counted from 1");
  }
  t.exit_interval = d.maybe_positive("exit_interval").value_or(0);
  t.exit_duration_minutes = d.maybe_positive("exit_duration_in_mins").value_or(0);
  t.exit_signal_handler = v.flag("exit_signal_handler");
  t.exit_signal = v.text("exit_signal");
  if (!t.exit_signal_handler) d.warn_unused("exit_signal", "--exit-signal-handler");
  t.seed = d.positive("seed");
  t.data_parallel_random_init = v.flag("data_parallel_random_init");
  t.kernels = v.text("kernels") == "fast" ? KernelSet::kFast : KernelSet::kReference;
  t.logits_chunks = d.positive("logits_chunks");
  t.gemm_algorithms = v.text("gemm_algorithms");
  PGPT_CHECK(ConfigError, t.gemm_algorithms.empty() || t.params_dtype != Dtype::kFloat32, "--gemm-algorithms ",
             t.gemm_algorithms, " is for 16-bit matrices; add --bf16 or --fp16, or remove it");
  PGPT_CHECK(ConfigError, t.gemm_algorithms.empty() || t.kernels == KernelSet::kFast, "--gemm-algorithms ",
             t.gemm_algorithms, " replaces libtorch's products, --kernels reference asks for them; remove one");
  const std::optional<double> tuning_ms = v.maybe_real("gemm_tuning_ms");
  t.gemm_tuning_ms = tuning_ms.value_or(t.gemm_tuning_ms);
  PGPT_CHECK(ConfigError, t.gemm_tuning_ms > 0 && t.gemm_tuning_ms <= 1000, "--gemm-tuning-ms ", t.gemm_tuning_ms,
             ": give a positive number of milliseconds, at most 1000");
  PGPT_CHECK(ConfigError, !t.gemm_algorithms.empty() || !tuning_ms, "--gemm-tuning-ms ", t.gemm_tuning_ms,
             " is for --gemm-algorithms FILE; add that, or remove it");
  const std::string graphs = v.text("cuda_graph_impl");
  const std::vector<std::string> scope = v.texts("cuda_graph_scope");
  const bool whole = std::find(scope.begin(), scope.end(), "full_iteration") != scope.end();
  t.cuda_graph = graphs == "full_iteration" || (graphs == "local" && whole);
  if (t.cuda_graph && v.flag("skip_train")) d.notice("WARNING: --cuda-graph-impl has no effect with --skip-train");
  t.cuda_graph_warmup_steps = v.integer("cuda_graph_warmup_steps");
  PGPT_CHECK(ConfigError, t.cuda_graph_warmup_steps >= 1, "--cuda-graph-warmup-steps ", t.cuda_graph_warmup_steps,
             ": libraries and communicators set themselves up in steps before the capture; give 1 or more");
  if (graphs == "local" && !whole) {
    d.notice("WARNING: --cuda-graph-impl local has no effect here without --cuda-graph-scope full_iteration");
  } else if (!scope.empty() && !t.cuda_graph) {
    d.notice("WARNING: --cuda-graph-scope has no effect here without --cuda-graph-impl full_iteration or local");
  }
}

void derive_weight_decay(Derivation& d) {
  OptimizerConfig& o = d.config.optimizer;
  Values& v = d.values;
  o.weight_decay = v.real("weight_decay");
  const std::string style = v.text("weight_decay_incr_style");
  const bool start = v.is_set("start_weight_decay"), end = v.is_set("end_weight_decay");
  if (style == "constant") {
    o.weight_decay_style = WeightDecayStyle::kConstant;
    PGPT_CHECK(
        ConfigError, !start && !end,
        "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine, found constant");
    o.start_weight_decay = o.end_weight_decay = o.weight_decay;
  } else {
    o.weight_decay_style = style == "linear" ? WeightDecayStyle::kLinear : WeightDecayStyle::kCosine;
    PGPT_CHECK(ConfigError, start && end, "--weight-decay-incr-style ", style,
               " needs --start-weight-decay and --end-weight-decay");
    o.start_weight_decay = v.real("start_weight_decay");
    o.end_weight_decay = v.real("end_weight_decay");
    d.warn_unused("weight_decay", "--weight-decay-incr-style constant");
  }
  PGPT_CHECK(ConfigError, style != "constant" || (o.weight_decay >= 0 && std::isfinite(o.weight_decay)),
             "--weight-decay is ", o.weight_decay, "; it must not be negative or infinite");
  PGPT_CHECK(
      ConfigError,
      o.start_weight_decay >= 0 && o.end_weight_decay >= o.start_weight_decay && std::isfinite(o.end_weight_decay),
      "weight decay goes from ", o.start_weight_decay, " to ", o.end_weight_decay,
      "; it must start at 0 or more and not fall, and be finite (--start-weight-decay, --end-weight-decay)");
  v.derive("start_weight_decay", o.start_weight_decay);
  v.derive("end_weight_decay", o.end_weight_decay);
  o.apply_weight_decay_to_qk_layernorm = v.flag("apply_wd_to_qk_layernorm") || v.is_set("no_weight_decay_cond_type");
  if (!v.flag("qk_layernorm")) d.warn_unused("apply_wd_to_qk_layernorm", "--qk-layernorm");
}

void derive_recompute(Derivation& d) {
  TrainingConfig& t = d.config.training;
  const Values& v = d.values;
  const std::string granularity = v.text("recompute_granularity");
  const bool method = v.is_set("recompute_method");
  const std::optional<std::int64_t> layers = d.maybe_positive("recompute_num_layers");
  if (v.flag("distribute_saved_activations")) {
    PGPT_CHECK(
        ConfigError, d.config.parallel.tensor > 1 && granularity == "full" && method && !v.flag("sequence_parallel"),
        "--distribute-saved-activations needs --tensor-model-parallel-size above 1, --recompute-granularity full and "
        "--recompute-method, and no --sequence-parallel");
  }
  t.recompute_modules = v.texts("recompute_modules");
  if (granularity == "full") {
    t.recompute = RecomputeGranularity::kFull;
    PGPT_CHECK(ConfigError, method && layers,
               "--recompute-granularity full needs --recompute-method and --recompute-num-layers");
    t.recompute_method = v.text("recompute_method") == "uniform" ? RecomputeMethod::kUniform : RecomputeMethod::kBlock;
    t.recompute_num_layers = *layers;
    PGPT_CHECK(ConfigError, t.recompute_modules.empty(),
               "--recompute-modules belongs to --recompute-granularity selective");
    return;
  }
  PGPT_CHECK(ConfigError, !method && !layers,
             "--recompute-method and --recompute-num-layers need --recompute-granularity full, "
             "found ",
             granularity.empty() ? "none" : granularity);
  if (granularity == "selective") {
    t.recompute = RecomputeGranularity::kSelective;
    if (t.recompute_modules.empty()) t.recompute_modules = {"core_attn"};
    for (const std::string& module : t.recompute_modules) {
      const bool expert = module == "moe_act" || module == "moe" || module == "shared_experts";
      PGPT_CHECK(ConfigError, !expert || v.maybe_integer("num_experts").value_or(0) > 0, "--recompute-modules ", module,
                 " needs --num-experts; dense models have core_attn, layernorm and mlp");
    }
  } else {
    PGPT_CHECK(ConfigError, t.recompute_modules.empty(), "--recompute-modules needs --recompute-granularity selective");
  }
}

void derive_schedules(Derivation& d) {
  OptimizerConfig& o = d.config.optimizer;
  const TrainingConfig& t = d.config.training;
  const Values& v = d.values;
  o.kind = v.text("optimizer") == "sgd" ? OptimizerKind::kSgd : OptimizerKind::kAdam;
  o.adam_beta1 = v.real("adam_beta1");
  o.adam_beta2 = v.real("adam_beta2");
  o.adam_eps = v.real("adam_eps");
  o.sgd_momentum = v.real("sgd_momentum");
  for (const char* name : {"adam_beta1", "adam_beta2"}) {
    PGPT_CHECK(ConfigError, v.real(name) >= 0 && v.real(name) < 1, option_name(name), " is ", v.real(name),
               "; it must be at least 0 and below 1");
  }
  PGPT_CHECK(ConfigError, o.adam_eps > 0, "--adam-eps is ", o.adam_eps,
             "; it must be above 0, or weights without a gradient become NaN");
  PGPT_CHECK(ConfigError, o.sgd_momentum >= 0, "--sgd-momentum is ", o.sgd_momentum, "; it must not be negative");
  o.clip_grad = v.real("clip_grad");
  PGPT_CHECK(ConfigError, o.clip_grad >= 0, "--clip-grad is ", o.clip_grad, "; give 0 (off) or more");
  o.lr = v.maybe_real("lr").value_or(0);
  o.min_lr = v.real("min_lr");
  o.decoupled_lr = v.maybe_real("decoupled_lr");
  o.decoupled_min_lr = v.maybe_real("decoupled_min_lr");
  o.lr_warmup_init = v.real("lr_warmup_init");
  o.override_opt_param_scheduler = v.flag("override_opt_param_scheduler");
  o.use_checkpoint_opt_param_scheduler = v.flag("use_checkpoint_opt_param_scheduler");
  PGPT_CHECK(ConfigError, !o.override_opt_param_scheduler || !o.use_checkpoint_opt_param_scheduler,
             "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other; give one");
  const std::string style = v.text("lr_decay_style");
  o.lr_decay_style = style == "constant" ? LrDecayStyle::kConstant
                     : style == "linear" ? LrDecayStyle::kLinear
                     : style == "cosine" ? LrDecayStyle::kCosine
                     : style == "WSD"    ? LrDecayStyle::kWsd
                                         : LrDecayStyle::kInverseSquareRoot;
  const std::string tail = v.text("lr_wsd_decay_style");
  o.wsd_decay_style = tail == "linear"       ? WsdDecayStyle::kLinear
                      : tail == "cosine"     ? WsdDecayStyle::kCosine
                      : tail == "minus_sqrt" ? WsdDecayStyle::kMinusSqrt
                                             : WsdDecayStyle::kExponential;
  if (o.kind == OptimizerKind::kAdam) {
    d.warn_unused("sgd_momentum", "--optimizer sgd");
  } else {
    d.warn_unused({"adam_beta1", "adam_beta2", "adam_eps"}, "--optimizer adam");
  }
  if (o.lr_decay_style != LrDecayStyle::kWsd) {
    d.warn_unused({"lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"}, "--lr-decay-style WSD");
  }
  if (t.skip_train) return;
  if (o.lr_decay_style == LrDecayStyle::kConstant) {
    constexpr auto kDecay = "a decay (--lr-decay-style linear, for example)";
    d.warn_unused({"min_lr", "decoupled_min_lr"}, kDecay);
    // A warmup may be a fraction of the length.
    if (!v.is_set("lr_warmup_fraction")) d.warn_unused({"lr_decay_iters", "lr_decay_samples"}, kDecay);
  }
  PGPT_CHECK(ConfigError, v.is_set("lr"), "--lr is required for training; give the maximum learning rate");
  PGPT_CHECK(ConfigError, o.lr >= 0 && std::isfinite(o.lr), "--lr is ", o.lr, "; give 0 or more, e.g. 3e-4");
  PGPT_CHECK(ConfigError, std::isfinite(o.decoupled_lr.value_or(0)), "--decoupled-lr is ", *o.decoupled_lr,
             "; it must be finite");
  PGPT_CHECK(ConfigError, o.min_lr >= 0 && o.min_lr <= o.lr, "--min-lr ", o.min_lr, " must be between 0 and --lr ",
             o.lr);
  PGPT_CHECK(ConfigError, o.lr_warmup_init >= 0, "--lr-warmup-init is ", o.lr_warmup_init, "; it must not be negative");
  PGPT_CHECK(ConfigError, o.lr_warmup_init <= o.lr, "--lr-warmup-init ", o.lr_warmup_init, " is above --lr ", o.lr);
  PGPT_CHECK(ConfigError, !o.decoupled_min_lr || (o.decoupled_lr && *o.decoupled_min_lr <= *o.decoupled_lr),
             "--decoupled-min-lr needs --decoupled-lr and must not be above it");

  const Phase phase{t.train_samples > 0, static_cast<double>(t.global_batch_size)};
  const double whole =
      phase.samples ? static_cast<double>(t.train_samples) : static_cast<double>(t.train_iters) * phase.batch;
  o.weight_decay_samples = whole;
  o.lr_decay_samples = length(d, phase, "lr_decay_iters", "lr_decay_samples").value_or(whole);
  const char* decay_option = phase.samples ? "--lr-decay-samples" : "--lr-decay-iters";
  // A run of no iterations (save the initial weights) needs no schedule.
  if (whole == 0 && o.lr_decay_samples == 0) return;
  PGPT_CHECK(ConfigError, o.lr_decay_samples > 0, decay_option, " is 0; give a length above 0");
  if (const std::optional<double> fraction = v.maybe_real("lr_warmup_fraction")) {
    PGPT_CHECK(ConfigError, *fraction >= 0 && *fraction < 1, "--lr-warmup-fraction ", *fraction, " must be in [0, 1)");
    o.lr_warmup_samples = *fraction * o.lr_decay_samples;
  } else {
    o.lr_warmup_samples = *length(d, phase, "lr_warmup_iters", "lr_warmup_samples");
  }
  if (o.lr_warmup_samples == 0) d.warn_unused("lr_warmup_init", "a warmup (--lr-warmup-iters, -samples or -fraction)");
  PGPT_CHECK(ConfigError, o.lr_warmup_samples < o.lr_decay_samples, "warmup of ", o.lr_warmup_samples,
             " samples is not below the decay length of ", o.lr_decay_samples,
             " samples (--lr-warmup-iters, --lr-warmup-samples; ", decay_option, ")");
  const std::optional<double> wsd = length(d, phase, "lr_wsd_decay_iters", "lr_wsd_decay_samples");
  PGPT_CHECK(ConfigError, o.lr_decay_style != LrDecayStyle::kWsd || (wsd && *wsd > 0), "--lr-decay-style WSD needs ",
             phase.samples ? "--lr-wsd-decay-samples" : "--lr-wsd-decay-iters", " above 0");
  o.wsd_decay_samples = wsd.value_or(0);
  PGPT_CHECK(ConfigError, o.wsd_decay_samples <= o.lr_decay_samples, "the WSD tail of ", o.wsd_decay_samples,
             " samples is longer than the decay length of ", o.lr_decay_samples, " samples");
}

}  // namespace pgpt::config

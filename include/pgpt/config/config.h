#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace pgpt::config {

enum class PositionEmbedding { kLearnedAbsolute, kRope, kNone };
enum class Normalization { kLayerNorm, kRMSNorm };
enum class AttentionBackend { kAuto, kFlash, kFused, kUnfused, kLocal };
enum class TransformerImpl { kLocal, kTransformerEngine };
enum class Activation { kGeluTanh, kGeluErf, kSwiglu, kSquaredRelu, kQuickGeglu };
enum class Dtype { kFloat32, kBFloat16, kFloat16 };
enum class RecomputeGranularity { kNone, kSelective, kFull };
enum class RecomputeMethod { kUniform, kBlock };
enum class OptimizerKind { kAdam, kSgd };
enum class LrDecayStyle { kConstant, kLinear, kCosine, kInverseSquareRoot, kWsd };
enum class WsdDecayStyle { kExponential, kLinear, kCosine, kMinusSqrt };
enum class WeightDecayStyle { kConstant, kLinear, kCosine };
enum class DataloaderType { kSingle, kCyclic };
enum class Backend { kNccl, kGloo };
/// Who moves weights and gradients between GTP peers: NCCL's kernels, or the GPUs' copy engines.
enum class GtpTransport { kAutomatic, kNccl, kCopyEngine };
/// Which initial weights GTP shards get: the reference's per-peer draws, or the same full weights for every layout.
enum class WeightInit { kMegatron, kLayoutInvariant };
/// What the loss of a log line means: mean since the last line, or the reference's window (its second line averages two
/// steps).
enum class LossWindow { kStep, kMegatron };
/// Which GPU kernels run: this project's fused ones, or libtorch's operation by operation.
enum class KernelSet { kFast, kReference };

/// Shape and rounding choices of the GPT model; sizes are global (not divided by any parallel axis).
struct ModelConfig {
  std::int64_t num_layers = 0;
  std::int64_t hidden_size = 0;
  std::int64_t ffn_hidden_size = 0;  ///< width of the activation output (gated: fc1 has twice as many rows)
  std::int64_t num_attention_heads = 0;
  std::int64_t num_query_groups = 0;  ///< effective number of KV heads (= heads without --group-query-attention)
  std::int64_t kv_channels = 0;       ///< head dimension
  std::int64_t seq_length = 0;
  std::int64_t max_position_embeddings = 0;
  std::int64_t vocab_size = 0;         ///< true vocabulary (tokenizer)
  std::int64_t padded_vocab_size = 0;  ///< rows of the embedding table
  PositionEmbedding position_embedding = PositionEmbedding::kLearnedAbsolute;
  Normalization normalization = Normalization::kLayerNorm;
  double norm_epsilon = 1e-5;
  bool zero_centered_gamma = false;  ///< --apply-layernorm-1p
  bool add_bias_linear = true;
  bool add_qkv_bias = true;
  bool untie_embeddings = false;
  bool qk_layernorm = false;
  Activation activation = Activation::kGeluTanh;
  bool bias_activation_fusion = true;  ///< one rounding for bias + activation (and for SwiGLU) instead of two
  double glu_linear_offset = 0.0;
  double activation_clamp = 0.0;  ///< 0 = none; --activation-func-clamp-value
  std::int64_t rotary_base = 10000;
  double rotary_percent = 1.0;
  bool rotary_interleaved = false;
  std::int64_t rotary_seq_len_interpolation_factor = 0;  ///< 0 = none
  bool rope_scaling = false;
  double rope_scaling_factor = 8.0;
  bool rope_fusion = true;  ///< fp32 angles and one rounding instead of bf16 products
  double attention_dropout = 0.1;
  double hidden_dropout = 0.1;
  AttentionBackend attention_backend = AttentionBackend::kAuto;
  TransformerImpl transformer_impl = TransformerImpl::kTransformerEngine;
  bool attention_softmax_in_fp32 = false;
  bool masked_softmax_fusion = true;
  bool apply_query_key_layer_scaling = false;
  bool bias_dropout_fusion = true;
  bool fp32_residual_connection = false;
  bool cross_entropy_loss_fusion = false;
  double init_method_std = 0.02;
  double embedding_init_method_std = 0.02;
  bool init_method_xavier_uniform = false;
  bool perform_initialization = true;
  bool use_cpu_initialization = false;
  WeightInit weight_init = WeightInit::kMegatron;
  std::int64_t init_sm_count = 132;  ///< multiprocessors assumed when CUDA draws are emulated on CPU
  std::int64_t make_vocab_size_divisible_by = 128;
  bool pad_vocab_size = true;       ///< --no-pad-vocab-size
  std::int64_t mtp_num_layers = 0;  ///< multi-token prediction layers; parsed and validated, not run yet
  double mtp_loss_scaling_factor = 0.1;

  [[nodiscard]] bool gated() const {
    return activation == Activation::kSwiglu || activation == Activation::kQuickGeglu;
  }
  [[nodiscard]] std::int64_t query_projection_size() const { return kv_channels * num_attention_heads; }
  [[nodiscard]] std::int64_t kv_projection_size() const { return kv_channels * num_query_groups; }
  [[nodiscard]] std::int64_t qkv_rows() const { return query_projection_size() + 2 * kv_projection_size(); }
  [[nodiscard]] std::int64_t fc1_rows() const { return gated() ? 2 * ffn_hidden_size : ffn_hidden_size; }
  [[nodiscard]] bool has_rope() const { return position_embedding == PositionEmbedding::kRope; }
  bool operator==(const ModelConfig&) const = default;
};

/// Mixture-of-experts layers; parsed, validated and estimated, not run yet.
struct MoeConfig {
  std::int64_t num_experts = 0;         ///< 0 = dense model
  std::vector<bool> expert_layer;       ///< one entry a layer; empty for a dense model
  std::int64_t ffn_hidden_size = 0;     ///< width of one expert
  std::int64_t shared_expert_size = 0;  ///< total width of the shared experts, 0 = none
  std::int64_t router_topk = 2;
  std::vector<std::string> load_balancing;    ///< one or more types
  std::vector<double> aux_loss_coefficients;  ///< one for each type
  std::optional<double> z_loss_coefficient;
  bool router_pre_softmax = false;
  std::string router_score_function = "softmax";
  std::string router_dtype;  ///< empty = parameter type
  std::optional<double> topk_scaling_factor;
  bool expert_bias = false;
  double expert_bias_update_rate = 1e-3;
  bool grouped_gemm = false;
  std::string token_dispatcher = "allgather";
  std::optional<double> capacity_factor;
  bool pad_to_capacity = false;
  std::string token_drop_policy = "probs";

  [[nodiscard]] std::int64_t num_expert_layers() const {
    return std::count(expert_layer.begin(), expert_layer.end(), true);
  }
  bool operator==(const MoeConfig&) const = default;
};

/// Sizes of every mesh axis and how gradients travel over them.
struct ParallelConfig {
  std::int64_t world_size = 1;
  std::int64_t tensor = 1;         ///< T
  std::int64_t pipeline = 1;       ///< P
  std::int64_t context = 1;        ///< C
  std::int64_t expert = 1;         ///< E
  std::int64_t expert_tensor = 1;  ///< ETP
  std::int64_t weight_shards = 1;  ///< --tensor-parallel-num-weight-shards (= T * GTP)
  std::int64_t expert_weight_shards = 1;
  std::int64_t gtp = 1;  ///< weight_shards / tensor
  std::int64_t expert_gtp = 1;
  std::int64_t replicate_data = 1;    ///< D: data parallel size without GTP
  std::int64_t virtual_pipeline = 0;  ///< virtual stages a rank, 0 = off
  /// Transformer layers of each virtual stage; stage i belongs to pipeline rank i % P.
  std::vector<std::int64_t> stage_layers;
  std::int64_t microbatch_group_size = 1;  ///< interleaved schedule
  bool overlap_p2p = false;                ///< interleaved schedule
  std::vector<std::string> context_comm;   ///< --cp-comm-type: one word, or one a layer
  bool sequence_parallel = false;
  bool pipeline_before_data = false;  ///< --use-tp-pp-dp-mapping
  bool use_distributed_optimizer = false;
  bool overlap_grad_reduce = false;
  bool overlap_param_gather = false;
  std::int64_t ddp_bucket_size = 0;  ///< elements, 0 = derive
  std::int64_t ddp_num_buckets = 0;
  bool average_in_collective = false;
  bool gtp_prefetch = true;                   ///< --no-gtp-prefetch turns it off
  std::int64_t gtp_keep_gathered_layers = 0;  ///< last layers whose gathered weights stay until the optimizer step
  bool gtp_split_products = false;            ///< --gtp-weight-gradients split
  std::int64_t gtp_communicators = 2;         ///< 1: gathers and scatters take turns
  bool gtp_async_reduce_scatter = true;       ///< --no-gtp-async-reduce-scatter turns it off
  bool gtp_fp32_accumulation = false;         ///< --gtp-remat-reduce-scatter-with-fp32-accumulation
  GtpTransport gtp_transport = GtpTransport::kAutomatic;
  Backend backend = Backend::kGloo;
  bool backend_given = false;  ///< false: choose NCCL where a GPU is visible
  double timeout_minutes = 10;
  std::optional<std::int64_t> timeout_seconds_after_init;

  [[nodiscard]] std::int64_t data_ranks() const { return replicate_data * gtp; }  ///< ranks that read different samples
  bool operator==(const ParallelConfig&) const = default;
};

/// Batch sizes, length of the run, precision and recompute.
struct TrainingConfig {
  std::int64_t micro_batch_size = 0;
  std::int64_t global_batch_size = 0;
  std::int64_t eval_micro_batch_size = 0;
  std::int64_t eval_global_batch_size = 0;
  std::int64_t train_iters = 0;    ///< also set in sample mode
  std::int64_t train_samples = 0;  ///< > 0 in sample mode
  /// Sorted (first sample, global batch size); empty without --step-batch-size-schedule.
  std::vector<std::pair<std::int64_t, std::int64_t>> batch_size_schedule;
  bool decrease_batch_size_if_needed = false;
  std::int64_t eval_interval = 0;  ///< 0 = never during training
  std::int64_t eval_iters = 0;
  std::int64_t start_eval_at_iter = 0;
  bool skip_train = false;
  bool full_validation = false;
  std::int64_t seed = 1234;
  bool data_parallel_random_init = false;
  Dtype params_dtype = Dtype::kFloat32;
  bool gradients_in_fp32 = true;  ///< main gradients are fp32 and not of the parameter type
  bool gradient_accumulation_fusion = true;
  bool per_token_loss = false;
  std::optional<double> loss_scale;
  /// Whether losses are scaled before backward and gradients unscaled after it.
  [[nodiscard]] bool scales_loss() const { return params_dtype == Dtype::kFloat16 || loss_scale.has_value(); }
  double initial_loss_scale = 4294967296.0;
  double min_loss_scale = 1.0;
  double loss_scale_window = 1000;
  std::int64_t hysteresis = 2;
  bool check_for_nan = true;
  bool deterministic = false;
  RecomputeGranularity recompute = RecomputeGranularity::kNone;
  RecomputeMethod recompute_method = RecomputeMethod::kUniform;
  std::int64_t recompute_num_layers = 0;
  /// With selective recompute: any of core_attn, layernorm, mlp, and for MoE the others of the reference.
  std::vector<std::string> recompute_modules;
  std::vector<std::int64_t> iterations_to_skip;
  std::int64_t exit_interval = 0;
  std::int64_t exit_duration_minutes = 0;
  bool exit_signal_handler = false;
  std::string exit_signal = "SIGTERM";
  KernelSet kernels = KernelSet::kFast;
  std::int64_t logits_chunks = 1;  ///< parts of the tokens whose logits exist one after the other
  double gemm_tuning_ms = 0.2;     ///< --gemm-tuning-ms: how long an algorithm runs at a stretch while it is timed
  std::string gemm_algorithms;     ///< --gemm-algorithms: file of tuned matrix products, empty = libtorch computes them
  bool cuda_graph = false;         ///< --cuda-graph-impl full_iteration
  std::int64_t cuda_graph_warmup_steps = 3;
  bool reduced_precision_matmul = true;  ///< --disable-bf16-reduced-precision-matmul turns it off
  bool operator==(const TrainingConfig&) const = default;
};

/// Optimizer and both schedules; iteration-based lengths are kept next to sample-based ones, as given.
struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kAdam;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_eps = 1e-8;
  double sgd_momentum = 0.9;
  double clip_grad = 1.0;
  double lr = 0;
  double min_lr = 0;
  std::optional<double> decoupled_lr;
  std::optional<double> decoupled_min_lr;
  LrDecayStyle lr_decay_style = LrDecayStyle::kLinear;
  WsdDecayStyle wsd_decay_style = WsdDecayStyle::kExponential;
  double lr_warmup_init = 0;
  double lr_warmup_samples = 0;  ///< resolved to samples; fractional with --lr-warmup-fraction
  double lr_decay_samples = 0;   ///< resolved to samples
  double wsd_decay_samples = 0;  ///< resolved to samples
  double weight_decay = 0.01;
  double start_weight_decay = 0.01;
  double end_weight_decay = 0.01;
  WeightDecayStyle weight_decay_style = WeightDecayStyle::kConstant;
  double weight_decay_samples = 0;  ///< resolved to samples
  bool apply_weight_decay_to_qk_layernorm = false;
  bool override_opt_param_scheduler = false;
  bool use_checkpoint_opt_param_scheduler = false;
  bool operator==(const OptimizerConfig&) const = default;
};

/// Where samples come from and how they are masked.
struct DataConfig {
  bool mock = false;
  std::vector<std::string> data_path;  ///< as given: prefix, weight/prefix pairs, or prefixes
  std::vector<std::string> train_data_path, valid_data_path, test_data_path;
  std::string split;  ///< e.g. "969, 30, 1"
  std::string cache_path;
  bool mmap = true;
  DataloaderType dataloader = DataloaderType::kSingle;
  bool data_sharding = true;
  std::int64_t num_workers = 2;
  bool reset_position_ids = false;
  bool reset_attention_mask = false;
  bool eod_mask_loss = false;
  bool create_attention_mask = true;
  bool inter_document_masking = false;
  /// Whether attention stays inside parts of the samples.
  [[nodiscard]] bool has_segments() const {
    return inter_document_masking || (reset_attention_mask && create_attention_mask);
  }
  bool allow_ambiguous_pad_tokens = false;
  double mid_level_surplus = 0.005;
  std::string tokenizer_type;
  std::string tokenizer_model, vocab_file, merge_file;
  std::int64_t vocab_extra_ids = 0;
  std::int64_t tiktoken_num_special_tokens = 1000;
  std::int64_t eod_id = -1;  ///< resolved from the tokenizer
  std::int64_t pad_id = -1;  ///< resolved; -1 = none
  bool operator==(const DataConfig&) const = default;
};

/// Checkpoint reading and writing.
struct CheckpointConfig {
  std::string save, load, pretrained;
  std::int64_t save_interval = 0;
  std::int64_t save_retain_interval = 0;
  std::optional<std::int64_t> step;  ///< --ckpt-step
  bool save_optimizer = true, save_rng = true, load_optimizer = true, load_rng = true;
  bool finetune = false;
  bool exit_on_missing = false;
  bool use_checkpoint_args = false;
  bool async_save = false;
  std::optional<std::int64_t> override_iteration;
  bool non_persistent = false;  ///< --non-persistent-ckpt-type global: temporary checkpoints are written and looked for
  std::int64_t non_persistent_interval = 0;
  std::string non_persistent_dir;
  std::string format = "torch_dist";  ///< torch or torch_dist
  bool auto_detect_format = false;
  std::string strictness = "assume_ok_unexpected";
  bool optimizer_fully_reshardable = false;
  bool fully_parallel_save = true, fully_parallel_load = false;
  bool use_checkpoint_parallel_args = false;  ///< --use-mp-args-from-checkpoint-args
  bool use_checkpoint_tokenizer = true;
  bool load_main_params = false;
  std::string load_hf;  ///< folder of a Hugging Face model
  bool operator==(const CheckpointConfig&) const = default;
};

/// What is printed and written while training.
struct LoggingConfig {
  std::int64_t log_interval = 100;
  LossWindow loss_window = LossWindow::kStep;
  bool throughput = false;
  bool params_norm = false;
  bool num_zeros_in_grad = false;
  bool memory = true;
  std::int64_t memory_interval = 0;
  bool progress = false;              ///< --log-progress: progress.txt in the save folder
  std::optional<bool> progress_line;  ///< --log-progress-line: ETA and tokens/s; unset = only on a terminal
  std::int64_t timing_level = 0;
  std::string timing_option = "minmax";
  std::string metrics_file;
  std::string tensorboard_dir;
  std::int64_t tensorboard_interval = 1;
  bool timers_to_tensorboard = false, validation_ppl_to_tensorboard = false, memory_to_tensorboard = false,
       world_size_to_tensorboard = false, loss_scale_to_tensorboard = true;
  std::string evidence_dir;
  std::vector<std::int64_t> evidence_iterations;  ///< empty = all
  std::vector<std::string> evidence_content;      ///< empty = all kinds
  std::optional<std::int64_t> level;              ///< --logging-level, numeric as in Python: 10 debug, 20 info, ...
  bool operator==(const LoggingConfig&) const = default;
};

/// Everything the program was asked to do, validated and with all derived values filled in.
struct Config {
  ModelConfig model;
  ParallelConfig parallel;
  TrainingConfig training;
  OptimizerConfig optimizer;
  DataConfig data;
  CheckpointConfig checkpoint;
  LoggingConfig logging;
  MoeConfig experts;

  bool dry_run = false;
  bool moe = false;  ///< --num-experts given; parsed and validated, not run yet
  /// Argument dump as (name, printed value), sorted case-insensitively; also stored in checkpoints.
  std::vector<std::pair<std::string, std::string>> arguments;
  /// Lines to print once by rank 0, in order (derivations, warnings), as the reference words them.
  std::vector<std::string> notices;
  bool operator==(const Config&) const = default;
};

}  // namespace pgpt::config

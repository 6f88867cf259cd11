// What parses and validates but does not run: one line each, saying what to do.
#include "pgpt/base/error.h"
#include "pgpt/config/parse.h"

namespace pgpt::config {

void check_runnable(const Config& config) {
  const ParallelConfig& p = config.parallel;
  constexpr auto kLater = " is not available yet; only --dry-run works with it. ";
  PGPT_CHECK(ConfigError, p.tensor == 1, "--tensor-model-parallel-size ", p.tensor, kLater,
             "Use GTP instead: --tensor-model-parallel-size 1 --tensor-parallel-num-weight-shards N");
  PGPT_CHECK(ConfigError, p.pipeline == 1, "--pipeline-model-parallel-size ", p.pipeline, kLater,
             "Use GTP instead: --tensor-parallel-num-weight-shards N");
  PGPT_CHECK(ConfigError, p.context == 1, "--context-parallel-size ", p.context, kLater, "Set it to 1");
  PGPT_CHECK(ConfigError, !config.moe, "--num-experts ", config.experts.num_experts, kLater,
             "Remove it for a dense model");
  PGPT_CHECK(ConfigError, p.expert == 1 && p.expert_tensor == 1 && p.expert_gtp == 1,
             "expert parallelism (--expert-model-parallel-size, --expert-tensor-parallel-size, "
             "--expert-tensor-parallel-num-weight-shards)",
             kLater, "Remove these options");
  PGPT_CHECK(ConfigError, config.model.mtp_num_layers == 0, "--mtp-num-layers ", config.model.mtp_num_layers, kLater,
             "Remove it");
  PGPT_CHECK(ConfigError, !p.use_distributed_optimizer || p.replicate_data * p.context == 1,
             "--use-distributed-optimizer with data parallel size ", p.replicate_data, kLater,
             "Use more GTP shards (--tensor-parallel-num-weight-shards) or remove it");
  const DataConfig& data = config.data;
  PGPT_CHECK(ConfigError, data.data_path.size() <= 1, "--data-path with ", data.data_path.size(),
             " words (weights or several prefixes)", kLater, "Give one prefix without a weight");
  PGPT_CHECK(ConfigError, data.train_data_path.empty() && data.valid_data_path.empty() && data.test_data_path.empty(),
             "data paths for each split", kLater, "Use --data-path PREFIX --split 969,30,1");
  const CheckpointConfig& c = config.checkpoint;
  PGPT_CHECK(ConfigError, !c.use_checkpoint_parallel_args, "--use-mp-args-from-checkpoint-args", kLater,
             "Give the parallel sizes; checkpoints load into any");
  PGPT_CHECK(
      ConfigError, !config.training.cuda_graph || p.gtp == 1 || p.gtp_transport != GtpTransport::kCopyEngine,
      "--gtp-transport copy-engine cannot be part of a CUDA graph (--cuda-graph-impl); use --gtp-transport nccl");
  const TrainingConfig& t = config.training;
  PGPT_CHECK(ConfigError, t.logits_chunks == 1 || config.logging.evidence_dir.empty(), "--logits-chunks ",
             t.logits_chunks, ": the logits that --evidence-dir writes never exist as a whole; remove one of the two");
  if (t.cuda_graph) {
    constexpr auto kGraph = "--cuda-graph-impl full_iteration captures a step that the host cannot look into; ";
    PGPT_CHECK(ConfigError, !t.scales_loss(), kGraph,
               "--fp16 and --loss-scale decide about overflows on the host: use --bf16");
    PGPT_CHECK(ConfigError, !data.has_segments(), kGraph,
               data.inter_document_masking ? "--dataloader-inter-document-masking" : "--reset-attention-mask",
               " gives every micro-batch another number of documents: remove one of the two");
    PGPT_CHECK(ConfigError, config.logging.evidence_dir.empty(), kGraph, "remove --evidence-dir ",
               config.logging.evidence_dir, " or the graph");
    PGPT_CHECK(ConfigError, config.logging.timing_level == 0, kGraph, "--timing-log-level ",
               config.logging.timing_level, " would have nothing to time: use 0");
  }
}

void resolve_backend(Config& config, const MachineFacts& machine) {
  ParallelConfig& p = config.parallel;
  const bool gpus = machine.built_with_cuda && machine.visible_gpus > 0;
  if (!p.backend_given) p.backend = gpus ? Backend::kNccl : Backend::kGloo;
  if (p.backend == Backend::kNccl) {
    PGPT_CHECK(
        ConfigError, machine.built_with_cuda,
        "--distributed-backend nccl needs NCCL, but this program was built without CUDA; use --distributed-backend "
        "gloo, or build again with -DPGPT_CUDA=ON");
    PGPT_CHECK(ConfigError, machine.visible_gpus > 0,
               "--distributed-backend nccl needs a GPU, but none is visible; use --distributed-backend gloo, or check "
               "nvidia-smi and CUDA_VISIBLE_DEVICES");
    PGPT_CHECK(ConfigError, machine.local_world_size <= machine.visible_gpus,
               "--distributed-backend nccl needs a GPU for "
               "each rank, but ",
               machine.local_world_size, " local ranks see ", machine.visible_gpus,
               "; start fewer ranks, or use --distributed-backend gloo to let ranks share a GPU (slow, for tests)");
  } else if (gpus && machine.local_world_size > machine.visible_gpus) {
    config.notices.push_back(concat("WARNING: ", machine.local_world_size, " local ranks share ", machine.visible_gpus,
                                    " GPU(s); collectives go through host memory, for functional tests only"));
  }
  const std::string name = p.backend == Backend::kNccl ? "nccl" : "gloo";
  for (auto& [argument, value] : config.arguments) {
    if (argument == "distributed_backend") value = name;
  }
}

void check_devices(const Config& config, const MachineFacts& machine) {
  const ParallelConfig& p = config.parallel;
  PGPT_CHECK(ConfigError, p.backend == Backend::kNccl || p.gtp == 1 || p.gtp_transport != GtpTransport::kCopyEngine,
             "--gtp-transport copy-engine needs --distributed-backend nccl and a GPU for each rank, but the backend is "
             "gloo; use --gtp-transport nccl");
  if (!config.training.cuda_graph) return;
  PGPT_CHECK(ConfigError, machine.built_with_cuda && machine.visible_gpus > 0,
             "--cuda-graph-impl full_iteration needs a GPU, and none is visible (or this program was built without "
             "CUDA); remove it");
  PGPT_CHECK(ConfigError, p.world_size == 1 || p.backend == Backend::kNccl,
             "--cuda-graph-impl full_iteration needs --distributed-backend nccl: gloo works on the host");
}

}  // namespace pgpt::config

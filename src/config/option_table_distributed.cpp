// Rows of the groups "Distributed and GTP" and "Mixture of experts".
#include "rows.h"

namespace pgpt::config::rows {

namespace {
constexpr auto kNcclTuning = "set the NCCL_* environment variables instead";
constexpr auto kTpOverlap = "tensor parallel overlap is decided by this program";
constexpr auto kSchedule = "the schedule is decided by this program; numbers do not change";
constexpr auto kFsdp =
    "FSDP is not implemented; use --tensor-parallel-num-weight-shards (GTP) or --use-distributed-optimizer";
constexpr auto kMoeKernels = "expert kernels are chosen by this program";
constexpr auto kUpcycling = "turning a dense checkpoint into experts is not implemented";
}  // namespace

Rows distributed_rows() {
  return {
      integer("--tensor-model-parallel-size", "1", "Tensor parallel size T; above 1 only in dry runs for now."),
      integer("--pipeline-model-parallel-size", "1", "Pipeline parallel size P; above 1 only in dry runs for now."),
      integer("--context-parallel-size", "1", "Context parallel size C; above 1 only in dry runs for now."),
      integer("--tensor-parallel-num-weight-shards", kNone,
              "Shards of every linear weight, a multiple of T; the GTP degree is shards / T. Default T."),
      integer("--expert-tensor-parallel-num-weight-shards", kNone,
              "The same for experts; default the expert tensor parallel size."),
      choice("--gtp-remat-opt-in-modules", kNone, "moe_latent_proj", "More modules whose weights are sharded.")
          .any_number()
          .refused("latent expert projections are not implemented"),
      on("--gtp-remat-reduce-scatter-with-fp32-accumulation", "Sum GTP gradients of more than two peers in float32."),
      on("--sequence-parallel", "Split norms and dropout over tensor parallel ranks; dropped when T is 1."),
      integer("--expert-model-parallel-size", "1", "Expert parallel size E; above 1 only in dry runs for now."),
      integer("--expert-tensor-parallel-size", kNone, "Tensor parallel size of experts; default T."),
      integer("--num-layers-per-virtual-pipeline-stage", kNone, "Layers of a virtual pipeline stage."),
      integer("--num-virtual-stages-per-pipeline-rank", kNone, "Virtual pipeline stages of a rank."),
      text("--pipeline-model-parallel-layout", kNone,
           "Stages as letters: E embedding, t layer, m MTP, L loss; '|' ends a stage, x*n and (..)*n repeat."),
      integer("--decoder-first-pipeline-num-layers", kNone, "Layers of the first pipeline stage."),
      integer("--decoder-last-pipeline-num-layers", kNone, "Layers of the last pipeline stage."),
      on("--account-for-embedding-in-pipeline-split", "Count the embedding as a layer."),
      on("--account-for-loss-in-pipeline-split", "Count the loss as a layer."),
      integer("--microbatch-group-size-per-virtual-pipeline-stage", kNone, "Microbatches in a group; default P."),
      off("--no-overlap-p2p-communication", "Pipeline messages do not overlap (interleaved schedule).")
          .to("overlap_p2p_comm"),
      on("--overlap-p2p-communication-warmup-flush", "Overlap also in warmup and flush.").no_effect(kSchedule),
      on("--use-distributed-optimizer", "Shard optimizer state over data parallel ranks (ZeRO-1)."),
      on("--overlap-grad-reduce", "Reduce gradients while backward runs."),
      on("--overlap-param-gather", "Gather weights while forward runs; needs the two options above."),
      on("--overlap-param-gather-with-optimizer-step", "Gather weights during the update.").no_effect(kSchedule),
      off("--no-align-param-gather", "Pipeline stages gather at different times.").no_effect(kSchedule),
      off("--no-align-grad-reduce", "Pipeline stages reduce at different times.").no_effect(kSchedule),
      integer("--ddp-bucket-size", kNone, "Elements of a gradient bucket."),
      integer("--ddp-num-buckets", kNone, "Number of gradient buckets."),
      on("--ddp-pad-buckets-for-high-nccl-busbw", "Pad buckets.").no_effect("bucket ends are aligned anyway"),
      on("--ddp-average-in-collective", "Let the collective average; not with GTP or per-token loss."),
      on("--ddp-reduce-scatter-with-fp32-accumulation", "Sum gradients in float32.")
          .refused("use float32 gradients (without --grad-reduce-in-bf16)"),
      text("--ddp-param-name-patterns-for-fp32-local-accumulation", kNone, "Weights with local float32 gradients.")
          .any_number()
          .refused("use float32 gradients (without --grad-reduce-in-bf16)"),
      integer("--num-distributed-optimizer-instances", "1", "Copies of the sharded optimizer.")
          .refused("one instance is supported"),
      off("--no-gradient-reduce-div-fusion", "FSDP detail.").no_effect("it belongs to FSDP"),
      on("--use-tp-pp-dp-mapping", "Rank order with pipeline before data."),
      on("--use-decentralized-pg", "Process groups without global state (Megatron-Bridge); not with GTP.")
          .no_effect("groups are objects here anyway"),
      choice("--distributed-backend", kNone, "nccl|gloo",
             "Collectives; default nccl where a GPU is visible, else gloo."),
      integer("--distributed-timeout-minutes", "10", "Deadline of every collective."),
      integer("--distributed-timeout-seconds-after-init", kNone, "Deadline once the first step is done."),
      integer("--local-rank", kNone, "Device index; default LOCAL_RANK from the environment."),
      off("--disable-gloo-process-groups", "No gloo groups beside NCCL.")
          .to("use_gloo_process_groups")
          .no_effect("no such groups are made"),
      text("--nccl-communicator-config-path", kNone, "NCCL settings.").no_effect(kNcclTuning),
      on("--use-sharp", "NCCL setting.").no_effect(kNcclTuning),
      text("--sharp-enabled-group", kNone, "NCCL setting.").no_effect(kNcclTuning),
      text("--high-priority-stream-groups", kNone, "NCCL setting.").any_number().no_effect(kNcclTuning),
      on("--use-nccl-ub", "NCCL setting.").no_effect(kNcclTuning),
      on("--use-ring-exchange-p2p", "Pipeline messages.").no_effect(kSchedule),
      on("--create-all-gather-group", "NCCL setting.").no_effect(kNcclTuning),
      on("--tp-comm-overlap", "Overlap tensor parallel messages; needs --sequence-parallel.").no_effect(kTpOverlap),
      text("--tp-comm-overlap-cfg", kNone, "Tensor parallel overlap.").no_effect(kTpOverlap),
      text("--no-tp-comm-*", kNone, "Tensor parallel overlap.").any_number().no_effect(kTpOverlap),
      text("--tp-comm-bootstrap-backend", "nccl", "Tensor parallel overlap.").no_effect(kTpOverlap),
      choice("--cp-comm-type", "p2p", "p2p|a2a|allgather|all_gather|a2a+p2p",
             "How context parallel ranks exchange keys and values.")
          .list(),
      integer("--hierarchical-context-parallel-sizes", kNone, "Levels of context parallelism.")
          .list()
          .no_effect(kSchedule),
      on("--hybrid-context-parallel", "Context parallel size by sample.").refused("use --context-parallel-size"),
      on("--defer-embedding-wgrad-compute", "Later gradient of the output layer.").no_effect(kSchedule),
      integer("--wgrad-deferral-limit", "0", "Later gradient of the output layer.").no_effect(kSchedule),
      on("--delay-wgrad-compute", "Later weight gradients.").no_effect(kSchedule),
      on("--overlap-moe-expert-parallel-comm", "Overlap expert messages.").no_effect(kSchedule),
      on("--use-megatron-fsdp", "Megatron FSDP.").refused(kFsdp),
      on("--use-torch-fsdp2", "PyTorch FSDP2.").refused(kFsdp),
      choice("--data-parallel-sharding-strategy", "optim_grads_params", "no_shard|optim|optim_grads|optim_grads_params",
             "What FSDP shards.")
          .no_effect("it belongs to FSDP"),
      text("--fsdp-*", kNone, "FSDP details.").any_number().no_effect("it belongs to FSDP"),
      text("--flight-recorder-*", kNone, "Recorder of collectives.")
          .any_number()
          .no_effect("a late rank, group and operation are named anyway"),
      on("--lazy-mpu-init", "Later group creation.").default_none().no_effect("groups are made once"),
      on("--fake-process-group", "Groups without communication.").refused("use --dry-run --world-size N"),
  };
}

Rows moe_rows() {
  return {
      integer("--num-experts", kNone, "Experts of a layer; 0 = none. Dry runs only for now."),
      pattern("--moe-layer-freq", "1", "Every n-th layer has experts, or a list of 0 and 1, one for each layer."),
      integer("--moe-ffn-hidden-size", kNone, "Width of an expert; default the MLP width."),
      integer("--moe-router-topk", "2", "Experts for each token."),
      choice("--moe-router-load-balancing-type", "aux_loss",
             "aux_loss|seq_aux_loss|global_aux_loss|sinkhorn|quantile_balancing|none", "Load balancing.")
          .list(),
      real("--moe-aux-loss-coeff", "0.0", "Weight of the balancing loss, one for each type.").list(),
      real("--moe-z-loss-coeff", kNone, "Weight of the router z-loss."),
      real("--moe-input-jitter-eps", kNone, "Noise on router inputs.").refused("router input noise is not implemented"),
      on("--moe-router-pre-softmax", "Softmax before the choice of experts."),
      choice("--moe-router-score-function", "softmax", "softmax|sigmoid|sqrtsoftplus", "Router scores."),
      choice("--moe-router-dtype", kNone, "fp32|fp64", "Type of router logits."),
      real("--moe-router-topk-scaling-factor", kNone, "Factor of the chosen scores."),
      integer("--moe-router-num-groups", kNone, "Groups of experts.")
          .refused("group-limited routing is not implemented"),
      integer("--moe-router-group-topk", kNone, "Groups for each token.")
          .refused("group-limited routing is not implemented"),
      on("--moe-router-enable-expert-bias", "Balance without a loss."),
      real("--moe-router-bias-update-rate", "1e-3", "Step of that balance."),
      on("--moe-router-force-load-balancing", "Random routing.").refused("it is a benchmark mode; remove it"),
      on("--moe-router-fusion", "Fused router.").no_effect(kMoeKernels),
      on("--moe-permute-fusion", "Fused permutation.").no_effect(kMoeKernels),
      on("--moe-grouped-gemm", "One call for all experts of a rank."),
      choice("--moe-token-dispatcher-type", "allgather", "allgather|alltoall|flex", "How tokens travel."),
      real("--moe-expert-capacity-factor", kNone, "Token limit of an expert; negative = none."),
      on("--moe-pad-expert-input-to-capacity", "Pad experts to their limit."),
      choice("--moe-token-drop-policy", "probs", "probs|position", "Which tokens are dropped."),
      integer("--moe-shared-expert-intermediate-size", kNone, "Total width of shared experts."),
      on("--moe-shared-expert-gate", "Gate of shared experts.")
          .refused("the gate of shared experts is not implemented"),
      on("--moe-shared-expert-overlap", "Overlap of shared experts.").no_effect(kSchedule),
      on("--moe-apply-probs-on-input", "Router weights before the experts.").refused("weights apply to expert outputs"),
      integer("--moe-latent-size", kNone, "Width of latent experts.").refused("latent experts are not implemented"),
      on("--moe-per-layer-logging", "Log every layer.").no_effect("averages are logged"),
      on("--moe-layer-recompute", "Older form of --recompute-modules moe.").no_effect("use --recompute-modules moe"),
      on("--moe-use-upcycling", "Dense to experts.").refused(kUpcycling),
      integer("--moe-upcycling-granularity", "1", "Dense to experts.").refused(kUpcycling),
      on("--moe-enable-deepep", "Other dispatcher.").no_effect(kMoeKernels),
      text("--moe-flex-dispatcher-backend", "deepep", "Other dispatcher.").no_effect(kMoeKernels),
      text("--moe-*-num-sms", kNone, "Other dispatcher.").no_effect(kMoeKernels),
      text("--moe-paged-stash*", kNone, "Paged activations.").any_number().no_effect(kMoeKernels),
      text("--moe-routing-trace-*", kNone, "Routing traces.").any_number().no_effect("routing is not recorded"),
  };
}

}  // namespace pgpt::config::rows

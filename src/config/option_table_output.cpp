// Rows of the groups "Checkpointing", "Logging" and "This program".
#include "rows.h"

namespace pgpt::config::rows {

namespace {
constexpr auto kConvert = "conversion is a separate step, not part of training";
constexpr auto kLocal = "local non-persistent checkpoints are not implemented; use --non-persistent-ckpt-type global";
constexpr auto kWandb = "no Weights & Biases client; use --metrics-file or --tensorboard-dir";
constexpr auto kTelemetry = "there is no telemetry";
constexpr auto kDumps = "tensor dumps have another form; use --evidence-dir";
constexpr auto kFormat = "checkpoints have this program's own format (docs/checkpoints.md)";
constexpr auto kWriter = "how checkpoint writing is spread is decided by this program";
}  // namespace

Rows checkpoint_rows() {
  return {
      place("--save", "Folder for checkpoints."),
      place("--load", "Folder to continue from."),
      integer("--save-interval", kNone, "Save every n iterations; required with --save.")
          .alias("--persistent-save-interval"),
      integer("--save-retain-interval", kNone, "Keep multiples of this iteration and delete others."),
      integer("--ckpt-step", kNone, "Iteration to load instead of the latest."),
      on("--no-save-optim", "Do not save optimizer state.").default_none(),
      on("--no-save-rng", "Do not save random states.").default_none(),
      on("--no-load-optim", "Do not load optimizer and schedule.").default_none(),
      on("--no-load-rng", "Do not load random states.").default_none(),
      on("--finetune", "Load weights only and start at iteration 0."),
      place("--pretrained-checkpoint", "Weights to start from when --load holds nothing; implies --finetune."),
      on("--exit-on-missing-checkpoint", "Stop with status 1 when there is nothing to load."),
      on("--use-checkpoint-args", "Take model options from the checkpoint."),
      on("--use-mp-args-from-checkpoint-args", "Take parallel sizes from the checkpoint too."),
      off_pair("--no-use-tokenizer-model-from-checkpoint-args", "Keep the command line's tokenizer."),
      integer("--override-ckpt-iteration", kNone, "Continue with this iteration number and its data."),
      on("--load-main-params-from-ckpt", "Load master weights without optimizer state."),
      choice("--ckpt-format", "torch_dist", "torch|torch_dist|torch_dcp|fsdp_dtensor", "Checkpoint format.")
          .refuse("torch_dcp|fsdp_dtensor", "they belong to FSDP; use torch_dist")
          .no_effect(kFormat),
      on("--auto-detect-ckpt-format", "Recognise the format when loading.").no_effect(kFormat),
      choice("--dist-ckpt-strictness", "assume_ok_unexpected",
             "assume_ok_unexpected|log_unexpected|log_all|raise_unexpected|raise_all|return_unexpected|return_all|"
             "ignore_all",
             "What a key mismatch does when loading."),
      on("--dist-ckpt-optim-fully-reshardable", "Save optimizer state in the shape of the weights.")
          .no_effect("it is always saved so"),
      on("--distrib-optim-fully-reshardable-mem-efficient", "The same with less memory; not with GTP.")
          .no_effect(kWriter),
      off_pair("--no-ckpt-fully-parallel-save", "Only the first replica writes."),
      on("--ckpt-fully-parallel-load", "Replicas share reading.").no_effect("every rank reads just the rows it needs"),
      choice("--ckpt-fully-parallel-save-process-group", "dp", "dp|ep_dp", "Who shares writing.").no_effect(kWriter),
      choice("--ckpt-fully-parallel-load-process-group", "dp", "dp|ep_dp", "Who shares reading.").no_effect(kWriter),
      on("--ckpt-assume-constant-structure", "Keep the plan of the first save.").no_effect(kWriter),
      off("--no-ckpt-load-validate-sharding-integrity", "Skip a check when loading.")
          .no_effect("checks are always made"),
      on("--async-save", "Write in the background; needs --use-persistent-ckpt-worker."),
      on("--use-persistent-ckpt-worker", "One background writer for the whole run."),
      choice("--async-strategy", "nvrx", "nvrx|mcore", "Which background writer.").no_effect(kWriter),
      integer("--async-ckpt-cpu-priority", "10", "Background writer.").no_effect(kWriter),
      integer("--async-ckpt-io-priority", "3", "Background writer.").no_effect(kWriter),
      on("--async-ckpt-use-cpu-shm", "Background writer.").no_effect(kWriter),
      integer("--non-persistent-save-interval", kNone, "Save a temporary checkpoint every n iterations."),
      choice("--non-persistent-ckpt-type", kNone, "global|local|in_memory", "Kind of temporary checkpoint.")
          .refuse("local|in_memory", kLocal),
      place("--non-persistent-global-ckpt-dir", "Folder of temporary checkpoints."),
      text("--non-persistent-local-ckpt-dir", kNone, "Local folder.").refused(kLocal),
      choice("--non-persistent-local-ckpt-algo", "fully_parallel", "fully_parallel|atomic", "Local checkpoints.")
          .refused(kLocal),
      on("--replication", "Copies of local checkpoints.").refused(kLocal),
      integer("--replication-jump", kNone, "Copies of local checkpoints.").refused(kLocal),
      integer("--replication-factor", "2", "Copies of local checkpoints.").refused(kLocal),
      choice("--ckpt-convert-format", kNone, "torch|torch_dist|torch_dcp", "Convert and stop.").refused(kConvert),
      text("--ckpt-convert-save", kNone, "Convert and stop.").refused(kConvert),
      on("--ckpt-convert-update-legacy-dist-opt-format", "Convert and stop.").refused(kConvert),
      on("--dist-ckpt-save-pre-mcore-014", "Older layout.").refused("remove it"),
      on("--ckpt-drop-redundant-extra-state", "Leave out empty entries.").no_effect(kWriter),
      on("--verify-integrity", "Checksums of checkpoint files.").no_effect(kWriter),
      integer("--dist-ckpt-workers", "1", "Writer threads.").no_effect(kWriter),
      on("--use-dist-ckpt", "Older switch.").no_effect("use --ckpt-format"),
      text("--dist-ckpt-format", kNone, "Older switch.").no_effect("use --ckpt-format"),
      on("--ckpt-fully-parallel-save", "Older switch.")
          .to("ckpt_fully_parallel_save_deprecated")
          .no_effect("it is the default"),
      integer("--save-params-interval", kNone, "Dump weights.").no_effect(kDumps),
      integer("--save-wgrads-interval", kNone, "Dump weight gradients.").no_effect(kDumps),
      integer("--save-dgrads-interval", kNone, "Dump activation gradients.").no_effect(kDumps),
      integer("--save-activations-interval", kNone, "Dump activations.").no_effect(kDumps),
      integer("--save-tokens-per-expert-interval", kNone, "Dump routing.").no_effect(kDumps),
  };
}

Rows logging_rows() {
  return {
      integer("--log-interval", "100", "Iterations between training lines."),
      on("--log-throughput", "Add TFLOP/s per GPU to the training line."),
      on("--log-params-norm", "Add the norm of all weights."),
      on("--log-num-zeros-in-grad", "Add the number of zero gradients."),
      on("--log-progress", "Keep progress.txt in the --save folder."),
      integer("--log-memory-interval", kNone, "Repeat the memory report; a multiple of --log-interval."),
      on("--log-device-memory-used", "Memory of the whole device.")
          .no_effect("the memory report names this process's memory"),
      on("--log-energy", "Energy of the step.").no_effect("energy is not measured"),
      on("--log-max-attention-logit", "Largest attention score.").no_effect("scores are not kept"),
      choice("--timing-log-level", "0", "0|1|2", "How many timers are logged."),
      choice("--timing-log-option", "minmax", "max|minmax|all", "How timers are logged."),
      off_pair("--no-barrier-with-level-1-timing", "No barrier before timers.").no_effect("timers never add barriers"),
      place("--tensorboard-dir", "Folder for TensorBoard events."),
      integer("--tensorboard-log-interval", "1", "Iterations between events."),
      integer("--tensorboard-queue-size", "1000", "Waiting events.").no_effect("events are written at once"),
      on("--log-timers-to-tensorboard", "Timers as events."),
      on("--log-validation-ppl-to-tensorboard", "Validation perplexity as events."),
      on("--log-memory-to-tensorboard", "Memory as events."),
      on("--log-world-size-to-tensorboard", "World size as events."),
      off_pair("--no-log-loss-scale-to-tensorboard", "No loss scale events."),
      text("--wandb-project", "", "Weights & Biases.").no_effect(kWandb),
      text("--wandb-exp-name", "", "Weights & Biases.").no_effect(kWandb),
      text("--wandb-save-dir", "", "Weights & Biases.").no_effect(kWandb),
      text("--wandb-entity", "", "Weights & Biases.").no_effect(kWandb),
      integer("--logging-level", kNone, "Numeric level of Python's logging: 10 debug, 20 info, 30 warning, 40 error."),
      off("--no-one-logger", "No telemetry.").to("enable_one_logger").no_effect(kTelemetry),
      text("--one-logger-project", "megatron-lm", "Telemetry.").no_effect(kTelemetry),
      text("--one-logger-run-name", kNone, "Telemetry.").no_effect(kTelemetry),
      on("--one-logger-async", "Telemetry.").no_effect(kTelemetry),
      text("--app-tag-run-name", kNone, "Telemetry.").no_effect(kTelemetry),
      text("--app-tag-run-version", "0.0.0", "Telemetry.").no_effect(kTelemetry),
      text("--config-logger-dir", "", "Dump configuration objects.").no_effect("use --print-config"),
  };
}

Rows own_rows() {
  return {
      on("--help", "Print this help.").own().action(),
      on("--version", "Print the version.").own().action(),
      on("--help-markdown", "Print docs/options.md.").own().action().hidden(),
      text("--config", kNone, "JSON file of option values; the command line wins.").own().action(),
      text("--yaml-cfg", kNone, "YAML configuration of the reference.")
          .action()
          .refused("write the same values as JSON and use --config (see --print-config)"),
      on("--print-config", "Print the values that --config would need, and stop.").own().action(),
      on("--dry-run", "Check everything, print mesh, groups, parameters and memory, and stop.").own().action(),
      integer("--world-size", kNone, "Number of ranks that --dry-run assumes.").own().action(),
      off("--no-gtp-prefetch", "Gather each weight only when it is needed.").own(),
      off("--no-gtp-async-reduce-scatter", "Wait for each gradient's reduce-scatter at once.").own(),
      choice("--gtp-weight-gradients", "whole", "whole|split",
             "whole: a weight gradient is one product, and a sum of the peers' parts; split: two products, the peers' "
             "rows first and this rank's on top of what comes from the peers.")
          .own(),
      choice("--gtp-communicators", "2", "1|2",
             "Communicators of GTP: 1 lets gathers and reduce-scatters take turns, for less memory of NCCL.")
          .own(),
      integer("--gtp-keep-gathered-layers", "0",
              "Layers, from the last one, whose gathered weights stay until the optimizer step: backward and later "
              "micro-batches gather nothing again, for the memory of those weights.")
          .own(),
      choice("--gtp-transport", "auto", "auto|nccl|copy-engine",
             "Who moves GTP's weights and gradients: NCCL's kernels, or copies between the GPUs of one node that leave "
             "the multiprocessors to the computation; auto: copies where they work.")
          .own(),
      choice("--weight-init", "megatron", "megatron|layout-invariant",
             "megatron: GTP shards draw their own values; layout-invariant: the same weights for every layout.")
          .own(),
      integer("--init-sm-count", "132", "Multiprocessors of the GPU whose random draws are reproduced on the CPU.")
          .own(),
      choice("--loss-window", "step", "step|megatron",
             "What a line's loss covers: since the last line, or as the reference (its second line is a mean of two).")
          .own(),
      choice("--kernels", "fast", "fast|reference", "GPU kernels of this program, or operation by operation.").own(),
      place("--gemm-algorithms",
            "File of tuned cuBLASLt algorithms for matrix products on GPUs; shapes it lacks are timed and added.")
          .own(),
      real("--gemm-tuning-ms", kNone,
           "Milliseconds that an algorithm runs at a stretch while it is timed (0.2); 50 or more let the clock settle, "
           "so that at the power limit what draws less counts too.")
          .own(),
      integer("--logits-chunks", "1",
              "Parts of a micro-batch's tokens whose logits exist at once; more need less memory.")
          .own(),
      place("--metrics-file", "File for one JSON object a step.").own(),
      on("--log-progress-line", "Print time left and tokens/s; default only on a terminal.").default_none().own(),
      off("--no-log-progress-line", "Never print that line.").default_none().own(),
      place("--evidence-dir", "Folder for tensors of the run.").own(),
      integer("--evidence-iterations", kNone, "Iterations whose tensors are written; default all.").list().own(),
      text("--evidence-content", kNone, "Kinds of tensors to write; default all.").list().own(),
      place("--load-hf", "Folder of a Hugging Face model to start from.").own(),
  };
}

}  // namespace pgpt::config::rows

// Rows of the groups "Optimizer and learning rate", "Training" and "Mixed precision".
#include "rows.h"

namespace pgpt::config::rows {

namespace {
constexpr auto kMuon = "the Muon family of optimizers is not implemented; use --optimizer adam or sgd";
constexpr auto kStatePrecision = "optimizer state is kept in fp32; remove it";
constexpr auto kOffload = "optimizer state stays on the device; use more GTP shards to save memory";
constexpr auto kProfile = "profile with nsys or ncu from outside";
constexpr auto kCluster = "cluster helpers of the reference do not exist here";
constexpr auto kFp8 = "8-bit training is not implemented; use --bf16";
constexpr auto kFp4 = "4-bit training is not implemented; use --bf16";
constexpr auto kGraphs = "only --cuda-graph-impl full_iteration means something here";
constexpr auto kActivationOffload = "activations stay on the device; use --recompute-granularity to save memory";
}  // namespace

Rows optimizer_rows() {
  return {
      choice("--optimizer", "adam", "adam|sgd|muon|dist_muon|lion|soap|adaptive_muon", "Optimizer.")
          .refuse("muon|dist_muon|lion|soap|adaptive_muon", "use adam or sgd"),
      real("--adam-beta1", "0.9", "Decay of the first moment."),
      real("--adam-beta2", "0.999", "Decay of the second moment."),
      real("--adam-eps", "1e-8", "Added to the root of the second moment."),
      real("--sgd-momentum", "0.9", "Momentum of SGD."),
      real("--lion-beta1", "0.95", "Lion parameter.").refused("the Lion optimizer is not implemented"),
      real("--lion-beta2", "0.98", "Lion parameter.").refused("the Lion optimizer is not implemented"),
      real("--muon-momentum", "0.9", "Muon parameter.").refused(kMuon),
      off("--muon-no-split-qkv", "Muon parameter.").to("muon_split_qkv").refused(kMuon),
      on("--muon-nesterov", "Muon parameter.").refused(kMuon),
      text("--muon-scale-mode", "spectral", "Muon parameter.").refused(kMuon),
      text("--muon-fp32-matmul-prec", "medium", "Muon parameter.").refused(kMuon),
      text("--muon-coefficient-type", "quintic", "Muon parameter.").refused(kMuon),
      integer("--muon-num-ns-steps", "5", "Muon parameter.").refused(kMuon),
      text("--muon-tp-mode", "blockwise", "Muon parameter.").refused(kMuon),
      on("--muon-use-syrk", "Muon parameter.").refused(kMuon),
      real("--muon-extra-scale-factor", "1.0", "Muon parameter.").refused(kMuon),
      text("--muon-scalar-optimizer", "adam", "Muon parameter.").refused(kMuon),
      real("--lr", kNone, "Maximum learning rate; required for training."),
      real("--min-lr", "0.0", "Minimum learning rate."),
      real("--decoupled-lr", kNone, "Learning rate of word embedding and output layer."),
      real("--decoupled-min-lr", kNone, "Minimum learning rate of word embedding and output layer."),
      choice("--lr-decay-style", "linear", "constant|linear|cosine|inverse-square-root|WSD", "Shape of the decay."),
      integer("--lr-decay-iters", kNone, "Length of the decay in iterations; default --train-iters."),
      integer("--lr-decay-samples", kNone, "Length of the decay in samples; default --train-samples."),
      integer("--lr-warmup-iters", "0", "Length of the warmup in iterations."),
      integer("--lr-warmup-samples", "0", "Length of the warmup in samples."),
      real("--lr-warmup-fraction", kNone, "Warmup as a fraction of the decay length."),
      real("--lr-warmup-init", "0.0", "Learning rate at step 0."),
      choice("--lr-wsd-decay-style", "exponential", "exponential|linear|cosine|minus_sqrt", "Shape of the WSD tail."),
      integer("--lr-wsd-decay-iters", kNone, "Length of the WSD tail in iterations."),
      integer("--lr-wsd-decay-samples", kNone, "Length of the WSD tail in samples."),
      on("--override-opt-param-scheduler", "The command line's schedule wins over the checkpoint's.")
          .alias("--override-opt_param-scheduler"),
      on("--use-checkpoint-opt-param-scheduler", "The checkpoint's schedule wins over the command line's.")
          .alias("--use-checkpoint-opt_param-scheduler"),
      on("--use-precision-aware-optimizer", "Optimizer state in lower precision.").refused(kStatePrecision),
      choice("--main-grads-dtype", "fp32", "fp32|bf16", "Type of main gradients.").refuse("bf16", kStatePrecision),
      choice("--main-params-dtype", "fp32", "fp32|fp16", "Type of main weights.").refuse("fp16", kStatePrecision),
      choice("--exp-avg-dtype", "fp32", "fp32|fp16|bf16|fp8", "Type of the first moment.")
          .refuse("fp16|bf16|fp8", kStatePrecision),
      choice("--exp-avg-sq-dtype", "fp32", "fp32|fp16|bf16|fp8", "Type of the second moment.")
          .refuse("fp16|bf16|fp8", kStatePrecision),
      on("--optimizer-cpu-offload", "Optimizer on the host.").refused(kOffload),
      real("--optimizer-offload-fraction", "1.0", "Part of the optimizer on the host.").refused(kOffload),
      on("--use-torch-optimizer-for-cpu-offload", "Which host optimizer.").refused(kOffload),
      on("--overlap-cpu-optimizer-d2h-h2d", "Overlap of host copies.").refused(kOffload),
      off("--no-pin-cpu-grads", "Host memory of gradients.").no_effect(kOffload),
      off("--no-pin-cpu-params", "Host memory of weights.").no_effect(kOffload),
      on("--optimizer-cuda-graph", "Capture the optimizer step.").no_effect(kGraphs),
      text("--dump-param-to-param-group-map", kNone, "File for the parameter groups.")
          .no_effect("--dry-run and the start-up lines tell the groups"),
      on("--freeze-all-layers", "Train nothing.").refused("use --skip-train to evaluate only"),
  };
}

Rows training_rows() {
  return {
      integer("--micro-batch-size", kNone, "Samples of one forward pass on one data rank; required."),
      integer("--global-batch-size", kNone,
              "Samples of one step; default micro batch x data parallel size x GTP degree."),
      text("--rampup-batch-size", kNone, "Start, increment, samples.")
          .exactly(3)
          .no_effect("the reference ignores it too; use --step-batch-size-schedule"),
      text("--step-batch-size-schedule", kNone,
           "Global batch by consumed tokens, \"T0:B0 T1:B1 ...\" (K/M/B/T suffixes); needs --train-samples."),
      on("--decrease-batch-size-if-needed", "Round the global batch down to what the ranks can divide."),
      integer("--train-iters", kNone, "Iterations of the run."),
      integer("--train-samples", kNone, "Samples of the run, instead of --train-iters."),
      integer("--exit-interval", kNone, "Stop at multiples of this iteration."),
      integer("--exit-duration-in-mins", kNone, "Stop after so many minutes."),
      on("--exit-signal-handler", "Save and stop when the exit signal arrives."),
      choice("--exit-signal", "SIGTERM",
             "SIGTERM|SIGINT|SIGHUP|SIGQUIT|SIGUSR1|SIGUSR2|SIGALRM|SIGCONT|SIGTSTP|SIGURG|SIGVTALRM|SIGXCPU|SIGWINCH",
             "Signal of --exit-signal-handler."),
      on("--exit-signal-handler-for-dataloader", "Handler in loader workers.")
          .no_effect("there are no worker processes"),
      on("--exit-signal-handler-for-training", "Stop at once on the signal.").no_effect("use --exit-signal-handler"),
      integer("--iterations-to-skip", kNone, "1-based iterations whose data are dropped.").list(),
      text("--result-rejected-tracker-filename", kNone, "File with more iterations to skip.")
          .refused("list the iterations with --iterations-to-skip"),
      text("--phase-transition-iterations", kNone, "Iterations at which a data phase ends.")
          .refused("data phases are not implemented; start one run for each phase"),
      choice("--empty-unused-memory-level", "0", "0|1|2", "Free caches during the step.")
          .no_effect("buffers are allocated once"),
      on("--manual-gc", "Python garbage collection.").no_effect("there is no Python"),
      integer("--manual-gc-interval", "0", "Python garbage collection.").no_effect("there is no Python"),
      off_pair("--no-manual-gc-eval", "Python garbage collection.").no_effect("there is no Python"),
      integer("--train-sync-interval", kNone, "Device synchronisation every n steps.")
          .no_effect("the host never runs more than a step ahead"),
      integer("--check-weight-hash-across-dp-replicas-interval", kNone, "Compare replicas every n steps.")
          .no_effect("replicas are not compared during the run"),
      integer("--gpu-sniff-test-interval", kNone, "Device self-test every n steps.").no_effect(kCluster),
      off_pair("--no-check-for-nan-in-loss-and-grad", "Do not stop at NaN or Inf in loss or gradients."),
      on("--check-for-spiky-loss", "Report sudden losses.").no_effect("read the loss from --metrics-file"),
      on("--check-for-large-grads", "Report large gradients.").no_effect("read the norm from --metrics-file"),
      choice("--rerun-mode", "validate_results", "disabled|validate_results|report_stats", "Result validation.")
          .no_effect("steps are never run twice; NaN checks follow --no-check-for-nan-in-loss-and-grad")
          .refuse("report_stats", "it fails in the reference; use --metrics-file"),
      integer("--error-injection-rate", "0", "Injected faults.").refused("faults are not injected"),
      text("--error-injection-type", "transient_error", "Kind of injected faults.").refused("faults are not injected"),
      on("--recompute-activations", "Older form of --recompute-granularity selective."),
      choice("--recompute-granularity", kNone, "full|selective", "What backward computes again."),
      choice("--recompute-method", kNone, "uniform|block", "Which layers, with full recompute."),
      integer("--recompute-num-layers", kNone, "Layers in a unit (uniform) or recomputed layers (block)."),
      choice("--recompute-modules", kNone,
             "core_attn|moe_act|layernorm|mla_up_proj|mlp|moe|shared_experts|gdn_norm_out",
             "Parts that selective recompute covers; default core_attn.")
          .list()
          .refuse("mla_up_proj|gdn_norm_out", "the model has no such part; use core_attn, layernorm or mlp"),
      on("--distribute-saved-activations", "Spread saved activations over tensor parallel ranks.")
          .no_effect("every rank keeps its own activations"),
      off("--no-masked-softmax-fusion", "Unfused softmax rounding of the local attention."),
      off("--no-bias-gelu-fusion", "Bias and GELU round separately; GELU takes its erf form.").imported(),
      off("--no-bias-swiglu-fusion", "SwiGLU rounds between its steps."),
      off("--no-bias-dropout-fusion", "Bias and residual round separately."),
      off("--no-rope-fusion", "Rotary products round to the parameter type.").to("apply_rope_fusion"),
      on("--no-persist-layer-norm", "Other norm kernel.").no_effect("there is one norm kernel; numbers do not change"),
      off("--no-gradient-accumulation-fusion", "Weight gradients round to the parameter type before they are added."),
      on("--cross-entropy-loss-fusion", "Fused cross entropy rounding."),
      choice("--cross-entropy-fusion-impl", "native", "native|te", "Which fused cross entropy.")
          .refuse("te", "use native"),
      choice("--cuda-graph-impl", "none", "none|local|transformer_engine|full_iteration",
             "full_iteration: each training step is one CUDA graph.")
          .choice_no_effect("transformer_engine", kGraphs),
      text("--cuda-graph-scope", kNone, "What is captured; full_iteration with --cuda-graph-impl local.").list(),
      text("--cuda-graph-modules", kNone, "What is captured.").list().no_effect(kGraphs),
      integer("--cuda-graph-warmup-steps", "3", "Steps of this process before the capture."),
      on("--enable-cuda-graph", "Older switch for layer graphs.").no_effect(kGraphs),
      on("--external-cuda-graph", "Older switch for layer graphs.").no_effect(kGraphs),
      integer("--cpu-offloading-num-layers", "0", "Layers whose activations go to the host.")
          .no_effect(kActivationOffload),
      on("--fine-grained-activation-offloading", "Activations on the host.").no_effect(kActivationOffload),
      text("--offload-modules", kNone, "Activations on the host.").any_number().no_effect(kActivationOffload),
      on("--profile", "Profile some steps.").no_effect(kProfile),
      integer("--profile-step-start", "10", "First profiled step.").no_effect(kProfile),
      integer("--profile-step-end", "12", "Last profiled step.").no_effect(kProfile),
      integer("--profile-ranks", kNone, "Profiled ranks.").list().no_effect(kProfile),
      on("--use-pytorch-profiler", "Which profiler.").no_effect(kProfile),
      on("--nvtx-ranges", "NVTX ranges.").no_effect(kProfile),
      on("--record-memory-history", "Record allocations.").no_effect(kProfile),
      text("--memory-snapshot-path", "snapshot.pickle", "File of recorded allocations.").no_effect(kProfile),
      on("--log-straggler", "Straggler detection.").no_effect(kCluster),
      text("--straggler-*", kNone, "Straggler detection.").any_number().no_effect(kCluster),
      on("--disable-straggler-on-startup", "Straggler detection.").no_effect(kCluster),
      on("--enable-ft-package", "Fault tolerance package.").no_effect(kCluster),
      on("--calc-ft-timeouts", "Fault tolerance package.").no_effect(kCluster),
      on("--inprocess-restart", "Restart inside the process.").no_effect(kCluster),
      text("--fault-injector-*", kNone, "Injected faults.").refused("faults are not injected"),
      on("--run-workload-inspector-server", "Inspection server.").no_effect(kCluster),
      on("--adlr-autoresume", "Automatic resume.").no_effect(kCluster),
      integer("--adlr-autoresume-interval", "1000", "Automatic resume.").no_effect(kCluster),
      on("--batch-invariant-mode", "Kernels whose bits do not depend on the batch.")
          .refused("it would change numbers and is not implemented; see --deterministic-mode"),
      on("--disable-jit-fuser", "Unfused element-wise kernels.")
          .refused("it would change rounding; use --no-bias-gelu-fusion, --no-bias-swiglu-fusion or "
                   "--no-bias-dropout-fusion"),
      on("--enable-experimental", "Experimental features.").no_effect("there are none"),
      on("--sft", "Supervised fine-tuning data.").refused("only pretraining data are read"),
      integer("--batch-size", kNone, "Old name.").hidden().refused("it was replaced by --micro-batch-size"),
      integer("--warmup", kNone, "Old name.").hidden().refused("it was replaced by --lr-warmup-fraction"),
      integer("--model-parallel-size", kNone, "Old name.")
          .hidden()
          .refused("it was replaced by --tensor-model-parallel-size"),
      on("--checkpoint-activations", "Old name.")
          .hidden()
          .refused("it was replaced by --recompute-activations or --recompute-granularity full"),
  };
}

Rows precision_rows() {
  return {
      on("--bf16", "Train in bfloat16."),
      on("--fp16", "Train in float16 with loss scaling."),
      real("--loss-scale", kNone, "Constant loss scale, in any precision."),
      real("--initial-loss-scale", "4294967296", "First dynamic loss scale."),
      real("--min-loss-scale", "1.0", "Smallest dynamic loss scale."),
      real("--loss-scale-window", "1000", "Good steps before the scale doubles."),
      integer("--hysteresis", "2", "Bad steps before the scale halves."),
      on("--accumulate-allreduce-grads-in-fp32",
         "Main gradients in float32 with --fp16 too; always with --bf16 unless --grad-reduce-in-bf16."),
      on("--grad-reduce-in-bf16", "Gradient buffer in the parameter type."),
      on("--fp32-residual-connection", "Residual stream in float32."),
      on("--attention-softmax-in-fp32", "Softmax of the local attention in float32."),
      on("--apply-query-key-layer-scaling", "Scale scores by the layer number; also float32 softmax.")
          .taken(Taken::kAlways),
      on("--fp16-lm-cross-entropy", "Cross entropy in float16.").refused("the loss is always computed in float32"),
      choice("--output-logit-dtype", kNone, "bf16|fp32", "Type of the logits; only the parameter type for now."),
      on("--disable-bf16-reduced-precision-matmul", "Full-precision sums inside bfloat16 matrix products."),
      choice("--fp8-format", kNone, "e4m3|hybrid", "8-bit format.").refused(kFp8),
      text("--fp8-recipe", "delayed", "8-bit recipe.").refused(kFp8),
      integer("--fp8-margin", "0", "8-bit parameter.").refused(kFp8),
      integer("--fp8-interval", "1", "8-bit parameter.").refused(kFp8),
      integer("--fp8-amax-history-len", "1", "8-bit parameter.").refused(kFp8),
      text("--fp8-amax-compute-algo", "most_recent", "8-bit parameter.").refused(kFp8),
      off("--no-fp8-wgrad", "8-bit parameter.").refused(kFp8),
      on("--fp8-param-gather", "8-bit parameter.").refused(kFp8),
      on("--first-last-layers-bf16", "8-bit parameter.").refused(kFp8),
      integer("--num-layers-at-start-in-bf16", "1", "8-bit parameter.").refused(kFp8),
      integer("--num-layers-at-end-in-bf16", "1", "8-bit parameter.").refused(kFp8),
      on("--reuse-grad-buf-for-mxfp8-param-ag", "8-bit parameter.").refused(kFp8),
      text("--fp4-format", kNone, "4-bit format.").refused(kFp4),
      text("--fp4-recipe", "nvfp4", "4-bit recipe.").refused(kFp4),
      on("--fp4-param-gather", "4-bit parameter.").refused(kFp4),
      text("--te-precision-config-file", kNone, "Per-layer precision.").refused("precision is the same in all layers"),
      text("--kitchen-*", kNone, "Experimental precision library.").refused("use --bf16"),
  };
}

}  // namespace pgpt::config::rows

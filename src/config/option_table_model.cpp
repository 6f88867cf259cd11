// Rows of the groups "Model" and "Regularisation and initialisation".
#include "rows.h"

namespace pgpt::config::rows {

namespace {
constexpr auto kMla =
    "multi-latent attention is not implemented; use grouped query attention (--group-query-attention)";
constexpr auto kYarn = "YaRN positions are not implemented; use --position-embedding-type rope with --use-rope-scaling";
constexpr auto kHybrid = "hybrid (Mamba) models are not implemented; this program trains GPT models";
constexpr auto kMup = "muP scaling is not implemented; set --lr and --init-method-std yourself";
}  // namespace

Rows model_rows() {
  return {
      integer("--num-layers", kNone, "Transformer layers; required.").model_size(),
      integer("--encoder-num-layers", kNone, "Older name of --num-layers; give only one of them."),
      integer("--decoder-num-layers", kNone, "Decoder layers of encoder-decoder models.")
          .refused("only decoder models are trained here; use --num-layers"),
      integer("--hidden-size", kNone, "Width of the model; required.").model_size(),
      integer("--ffn-hidden-size", kNone, "Width of the MLP; default 4h, with --swiglu int(4h*2/3/64)*64.")
          .model_size(),
      integer("--num-attention-heads", kNone, "Attention heads; required, a multiple of the tensor parallel size.")
          .model_size(),
      integer("--kv-channels", kNone, "Head dimension; default hidden size / heads.").model_size(),
      on("--group-query-attention", "Use --num-query-groups key/value heads.").model_kind(),
      integer("--num-query-groups", "1", "Key/value heads; counts only with --group-query-attention.").model_kind(),
      integer("--max-position-embeddings", kNone,
              "Rows of the learned position table, at least the sequence length; required.")
          .imported()
          .taken(Taken::kIfUnset),
      choice("--position-embedding-type", "learned_absolute", "learned_absolute|rope|yarn|mrope|relative|none",
             "Position scheme.")
          .model_kind()
          .refuse("yarn", kYarn)
          .refuse("mrope", "multimodal rotary positions are not implemented; use rope")
          .refuse("relative", "relative position bias is not implemented; use rope or learned_absolute"),
      on("--use-rotary-position-embeddings", "Older form of --position-embedding-type rope."),
      off("--no-position-embedding", "No learned position table; only together with rotary positions.")
          .to("add_position_embedding"),
      integer("--rotary-base", "10000", "Base of the rotary angles.").model_kind(),
      real("--rotary-percent", "1.0", "Part of the head dimension that is rotated.").model_kind(),
      on("--rotary-interleaved", "Rotate neighbouring pairs instead of halves.").model_kind(),
      integer("--rotary-seq-len-interpolation-factor", kNone, "Divide positions by this factor.").model_kind(),
      on("--use-rope-scaling", "Frequency scaling as in Llama 3.1 (factor 8, original context 8192).").model_kind(),
      real("--rope-scaling-factor", "8.0", "Factor of --use-rope-scaling.")
          .model_kind()
          .no_effect("the reference never passes it on; the factor is always 8"),
      choice("--rope-type", kNone, "rope|yarn", "Kind of rotary positions.").refuse("yarn", kYarn),
      pattern("--no-rope-freq", kNone, "Layers without rotary positions.")
          .refused("rotary positions apply to every layer; remove it"),
      integer("--mrope-section", kNone, "Sections of multimodal rotary positions.")
          .list()
          .refused("multimodal rotary positions are not implemented; use rope"),
      integer("--yarn-original-max-position-embeddings", kNone, "Original context of YaRN.").refused(kYarn),
      real("--yarn-beta-fast", kNone, "YaRN parameter.").refused(kYarn),
      real("--yarn-beta-slow", kNone, "YaRN parameter.").refused(kYarn),
      on("--yarn-correction-range-round-to-int", "YaRN rounding.").default_none().refused(kYarn),
      off("--no-yarn-correction-range-round-to-int", "YaRN without rounding.").default_none().refused(kYarn),
      integer("--relative-attention-num-buckets", "32", "Buckets of the relative position bias.")
          .refused("relative position bias is not implemented"),
      integer("--relative-attention-max-distance", "128", "Reach of the relative position bias.")
          .refused("relative position bias is not implemented"),
      integer("--vocab-size", kNone, "Vocabulary before padding; needed by NullTokenizer.").model_size(),
      integer("--padded-vocab-size", kNone, "Exact number of embedding rows instead of padding.").model_size(),
      integer("--make-vocab-size-divisible-by", "128",
              "Unit of vocabulary padding, multiplied by the tensor parallel size."),
      off("--no-pad-vocab-size", "Do not pad the vocabulary."),
      on("--untie-embeddings-and-output-weights", "Separate output matrix.").model_kind(),
      choice("--normalization", "LayerNorm", "LayerNorm|RMSNorm", "Kind of normalisation.").model_kind(),
      real("--norm-epsilon", "1e-5", "Epsilon inside the root of the normalisation.").model_kind(),
      on("--apply-layernorm-1p", "Store norm weights as gamma - 1.").model_kind(),
      on("--apply-residual-connection-post-layernorm", "Residual after the norm.")
          .no_effect("nothing reads it in the reference either; the residual is taken before the norm"),
      off("--disable-bias-linear", "No biases in linear layers.").model_kind().to("add_bias_linear"),
      on("--add-qkv-bias", "Bias of the QKV projection although other biases are off.").model_kind(),
      on("--swiglu", "Gated SiLU MLP.").model_kind(),
      on("--squared-relu", "Squared ReLU MLP.").model_kind(),
      on("--quick-geglu", "Gated quick GELU MLP.").model_kind(),
      on("--openai-gelu", "Older GELU form.").model_kind().no_effect("core models ignore it in the reference too"),
      real("--activation-func-clamp-value", kNone, "Clamp before the activation (with --quick-geglu)."),
      real("--glu-linear-offset", "0.0", "Offset of the linear half (with --quick-geglu)."),
      on("--qk-layernorm", "Norm of queries and keys per head.").model_kind(),
      on("--qk-l2-norm", "L2 norm of queries and keys.").refused("use --qk-layernorm"),
      on("--qk-clip", "Clip of QK logits (MuonClip).").refused("the Muon family of optimizers is not implemented"),
      real("--qk-clip-alpha", "0.5", "MuonClip parameter.").refused("the Muon family of optimizers is not implemented"),
      real("--qk-clip-threshold", "100", "MuonClip parameter.")
          .refused("the Muon family of optimizers is not implemented"),
      on("--attention-output-gate", "Gate the attention output.").refused("gated attention output is not implemented"),
      choice("--softmax-type", "vanilla", "vanilla|off-by-one|learnable", "Attention sinks.")
          .refuse("off-by-one|learnable", "attention sinks are not implemented; use vanilla"),
      text("--window-size", kNone, "Sliding attention window, left,right.")
          .refused("sliding window attention is not implemented; remove it for full causal attention"),
      pattern("--window-attn-skip-freq", kNone, "Layers with full attention.")
          .refused("sliding window attention is not implemented"),
      pattern("--linear-attention-freq", kNone, "Layers with linear attention.")
          .refused("linear attention is not implemented"),
      choice("--attention-backend", "auto", "flash|fused|unfused|local|auto",
             "Attention kernels and their rounding; local needs --transformer-impl local."),
      choice("--flash-attention-version", kNone, "2|3|4", "Version of flash attention.")
          .no_effect("attention kernels come from cuDNN and this program"),
      choice("--transformer-impl", "transformer_engine", "local|transformer_engine|inference_optimized",
             "Whose initialisation, norm placement and rounding points are followed.")
          .model_kind()
          .refuse("inference_optimized", "use transformer_engine or local"),
      on("--use-flash-attn", "Older switch for flash attention.").no_effect("use --attention-backend"),
      on("--use-mcore-models", "Older switch for core models.").no_effect("core models are the only ones"),
      text("--spec", kNone, "Layer specification; only 'local' together with --transformer-impl local.").list(),
      on("--multi-latent-attention", "Multi-latent attention.").refused(kMla),
      integer("--q-lora-rank", kNone, "MLA parameter.").refused(kMla),
      integer("--kv-lora-rank", "32", "MLA parameter.").refused(kMla),
      integer("--qk-head-dim", "128", "MLA parameter.").refused(kMla),
      integer("--qk-pos-emb-head-dim", "64", "MLA parameter.").refused(kMla),
      integer("--v-head-dim", "128", "MLA parameter.").refused(kMla),
      real("--rotary-scaling-factor", "1.0", "MLA/YaRN parameter.").refused(kMla),
      real("--mscale", "1.0", "MLA/YaRN parameter.").refused(kMla),
      real("--mscale-all-dim", "0.0", "MLA/YaRN parameter.").refused(kMla),
      integer("--mtp-num-layers", kNone, "Multi-token prediction layers; dry runs only for now.").taken(Taken::kAlways),
      real("--mtp-loss-scaling-factor", "0.1", "Weight of the multi-token prediction loss."),
      on("--mtp-use-repeated-layer", "One block for all predictions.").refused("each prediction has its own block"),
      on("--mtp-detach-heads", "Separate gradients of the prediction heads.")
          .refused("one norm and clip covers all weights"),
      text("--hybrid-layer-pattern", kNone, "Layer kinds of hybrid models.").refused(kHybrid),
      on("--is-hybrid-model", "Hybrid model.").refused(kHybrid),
      text("--mamba-*", kNone, "Options of Mamba layers.").refused(kHybrid),
      text("--heterogeneous-layers-config-path", kNone, "File with one configuration a layer.")
          .refused("all layers are alike here; remove it"),
      on("--calculate-per-token-loss", "Average the loss over all tokens of the global batch."),
      on("--use-mup", "muP scaling.").refused(kMup),
      integer("--mup-base-hidden-size", kNone, "muP parameter.").refused(kMup),
      real("--mup-*-mult", kNone, "muP multipliers.").refused(kMup),
  };
}

Rows regularisation_rows() {
  return {
      real("--attention-dropout", "0.1", "Dropout of attention probabilities.").imported().taken(Taken::kAlways),
      real("--hidden-dropout", "0.1", "Dropout of residual branches and of the embedding.")
          .imported()
          .taken(Taken::kAlways),
      real("--weight-decay", "0.01", "Decoupled weight decay."),
      real("--start-weight-decay", kNone, "First value of an increasing weight decay."),
      real("--end-weight-decay", kNone, "Last value of an increasing weight decay."),
      choice("--weight-decay-incr-style", "constant", "constant|linear|cosine", "How weight decay grows."),
      on("--apply-wd-to-qk-layernorm", "Decay the gains and biases of the query and key norms."),
      choice("--no-weight-decay-cond-type", kNone, "apply_wd_to_qk_layernorm",
             "Older form of --apply-wd-to-qk-layernorm."),
      real("--clip-grad", "1.0", "Global gradient norm limit; 0 = off."),
      real("--init-method-std", "0.02",
           "Standard deviation of the initial weights; output-side matrices use std/sqrt(2*layers)."),
      real("--embedding-init-method-std", kNone, "The same for the embedding tables; default --init-method-std."),
      on("--init-method-xavier-uniform", "Xavier uniform initial weights."),
      off("--no-initialization", "Skip the initialisation of weights.").to("perform_initialization"),
      on("--use-cpu-initialization", "Draw the full weights on the CPU and cut them.").default_none(),
      on("--init-model-with-meta-device", "Build on the meta device.").no_effect("it belongs to FSDP"),
      integer("--seed", "1234", "Seed of all random streams; above 0."),
      on("--data-parallel-random-init", "Different initial draws on data ranks, then a broadcast."),
      on("--te-rng-tracker", "Generator class of Transformer Engine.").no_effect("the streams are the same"),
      on("--inference-rng-tracker", "Generator class of inference.").no_effect("the streams are the same"),
      on("--deterministic-mode", "Only kernels that repeat their bits."),
  };
}

}  // namespace pgpt::config::rows

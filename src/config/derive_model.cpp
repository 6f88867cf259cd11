// Model sizes and kinds, experts.
#include <cmath>

#include "derive.h"

namespace pgpt::config {

namespace {

// Far beyond every model; larger ones are typing errors whose sizes would overflow.
constexpr std::int64_t kMostLayers = 100000, kMostWidth = 1 << 20;

}  // namespace

void derive_model_sizes(Derivation& d) {
  ModelConfig& m = d.config.model;
  Values& v = d.values;
  const std::optional<std::int64_t> layers = d.maybe_positive("num_layers");
  const std::optional<std::int64_t> encoder_layers = d.maybe_positive("encoder_num_layers");
  PGPT_CHECK(ConfigError, !layers || !encoder_layers,
             "--num-layers and --encoder-num-layers exclude each other; give one");
  PGPT_CHECK(ConfigError, layers || encoder_layers, "--num-layers is required; give the number of transformer layers");
  m.num_layers = layers ? *layers : *encoder_layers;
  PGPT_CHECK(ConfigError, m.num_layers <= kMostLayers, "--num-layers is ", m.num_layers, "; it must be at most ",
             kMostLayers);
  v.derive("num_layers", m.num_layers);
  v.derive("encoder_num_layers", m.num_layers);
  for (const char* name : {"hidden_size", "num_attention_heads", "max_position_embeddings"}) {
    PGPT_CHECK(ConfigError, v.is_set(name), option_name(name), " is required");
  }
  m.hidden_size = d.positive("hidden_size");
  PGPT_CHECK(ConfigError, m.hidden_size <= kMostWidth, "--hidden-size is ", m.hidden_size, "; it must be at most ",
             kMostWidth);
  m.num_attention_heads = d.positive("num_attention_heads");
  m.max_position_embeddings = d.positive("max_position_embeddings");

  m.ffn_hidden_size = d.maybe_positive("ffn_hidden_size")
                          .value_or(v.flag("swiglu") ? m.hidden_size * 4 * 2 / 3 / 64 * 64 : 4 * m.hidden_size);
  PGPT_CHECK(ConfigError, m.ffn_hidden_size > 0, "the MLP width that follows from --hidden-size ", m.hidden_size,
             " with --swiglu is 0; give --ffn-hidden-size");
  v.derive("ffn_hidden_size", m.ffn_hidden_size);
  if (const std::optional<std::int64_t> channels = d.maybe_positive("kv_channels")) {
    m.kv_channels = *channels;
  } else {
    PGPT_CHECK(ConfigError, m.hidden_size % m.num_attention_heads == 0, "--hidden-size ", m.hidden_size,
               " is not divisible by --num-attention-heads ", m.num_attention_heads,
               "; change one of them or give --kv-channels");
    m.kv_channels = m.hidden_size / m.num_attention_heads;
    v.derive("kv_channels", m.kv_channels);
  }

  const std::optional<std::int64_t> seq = d.maybe_positive("seq_length");
  const std::optional<std::int64_t> encoder_seq = d.maybe_positive("encoder_seq_length");
  PGPT_CHECK(ConfigError, !seq || !encoder_seq, "--seq-length and --encoder-seq-length exclude each other; give one");
  PGPT_CHECK(ConfigError, seq || encoder_seq, "--seq-length is required; give the tokens of a sample");
  m.seq_length = seq ? *seq : *encoder_seq;
  v.derive("seq_length", m.seq_length);
  v.derive("encoder_seq_length", m.seq_length);
  const std::int64_t context = d.config.parallel.context;
  PGPT_CHECK(ConfigError, context == 1 || m.seq_length % (2 * context) == 0, "--seq-length ", m.seq_length,
             " is not divisible by 2 x --context-parallel-size ", context, " = ", 2 * context);
  PGPT_CHECK(ConfigError, m.max_position_embeddings >= m.seq_length, "--max-position-embeddings ",
             m.max_position_embeddings, " is below --seq-length ", m.seq_length, "; raise it");
  m.mtp_num_layers = d.maybe_positive("mtp_num_layers").value_or(0);
  m.mtp_loss_scaling_factor = v.real("mtp_loss_scaling_factor");
  if (m.mtp_num_layers == 0) d.warn_unused("mtp_loss_scaling_factor", "--mtp-num-layers");
}

namespace {

/// Kind of MLP and where its activation rounds (spec/model.md 4.5).
void derive_activation(Derivation& d) {
  ModelConfig& m = d.config.model;
  const Values& v = d.values;
  const bool swiglu = v.flag("swiglu"), squared = v.flag("squared_relu"), geglu = v.flag("quick_geglu");
  PGPT_CHECK(ConfigError, int{swiglu} + int{squared} + int{geglu} <= 1,
             "--swiglu, --squared-relu and --quick-geglu exclude each other; give one");
  m.bias_activation_fusion = v.flag(swiglu ? "bias_swiglu_fusion" : "bias_gelu_fusion");
  m.activation = swiglu                     ? Activation::kSwiglu
                 : squared                  ? Activation::kSquaredRelu
                 : geglu                    ? Activation::kQuickGeglu
                 : m.bias_activation_fusion ? Activation::kGeluTanh
                                            : Activation::kGeluErf;
  PGPT_CHECK(ConfigError, !squared || !m.bias_activation_fusion,
             "--squared-relu has no fused form with bias; add --no-bias-gelu-fusion or --disable-bias-linear");
  m.glu_linear_offset = v.real("glu_linear_offset");
  const std::optional<double> clamp = v.maybe_real("activation_func_clamp_value");
  PGPT_CHECK(ConfigError, !clamp || *clamp > 0, "--activation-func-clamp-value is ", *clamp, "; it must be above 0");
  m.activation_clamp = clamp.value_or(0);
  PGPT_CHECK(ConfigError, geglu || (m.glu_linear_offset == 0 && !clamp),
             "--glu-linear-offset and --activation-func-clamp-value work with --quick-geglu only; remove them");
}

void derive_positions(Derivation& d) {
  ModelConfig& m = d.config.model;
  Values& v = d.values;
  std::string kind = v.text("position_embedding_type");
  if (v.flag("use_rotary_position_embeddings")) kind = "rope";
  m.position_embedding = kind == "rope"   ? PositionEmbedding::kRope
                         : kind == "none" ? PositionEmbedding::kNone
                                          : PositionEmbedding::kLearnedAbsolute;
  v.derive("position_embedding_type", kind);
  m.rope_fusion = v.flag("apply_rope_fusion") && m.has_rope();
  v.derive("apply_rope_fusion", m.rope_fusion);
  PGPT_CHECK(ConfigError, v.flag("add_position_embedding") || m.has_rope(),
             "--no-position-embedding needs --position-embedding-type rope; for no positions at all use "
             "--position-embedding-type none");
  PGPT_CHECK(ConfigError, m.mtp_num_layers == 0 || m.position_embedding != PositionEmbedding::kLearnedAbsolute,
             "--mtp-num-layers ", m.mtp_num_layers, " needs --position-embedding-type rope or none, found ", kind);
  m.rotary_base = d.positive("rotary_base");
  m.rotary_percent = v.real("rotary_percent");
  m.rotary_interleaved = v.flag("rotary_interleaved");
  m.rotary_seq_len_interpolation_factor = d.maybe_positive("rotary_seq_len_interpolation_factor").value_or(0);
  m.rope_scaling = v.flag("use_rope_scaling");
  m.rope_scaling_factor = 8.0;
  if (!m.has_rope()) {
    d.warn_unused({"rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor",
                   "use_rope_scaling"},
                  "--position-embedding-type rope");
    return;
  }
  PGPT_CHECK(ConfigError, m.rotary_percent > 0 && m.rotary_percent <= 1, "--rotary-percent ", m.rotary_percent,
             " must be above 0 and at most 1");
  const auto rotated = static_cast<std::int64_t>(std::floor(static_cast<double>(m.kv_channels) * m.rotary_percent));
  PGPT_CHECK(ConfigError, rotated > 0 && rotated % 2 == 0, "rotary positions turn ", rotated, " of ", m.kv_channels,
             " head channels (--kv-channels, --rotary-percent ", m.rotary_percent,
             "); it must be an even number above 0");
}

}  // namespace

void derive_model_kind(Derivation& d) {
  ModelConfig& m = d.config.model;
  Values& v = d.values;
  m.add_bias_linear = v.flag("add_bias_linear");
  if (!m.add_bias_linear) v.derive("bias_gelu_fusion", false);
  m.add_qkv_bias = m.add_bias_linear || v.flag("add_qkv_bias");
  v.derive("add_qkv_bias", m.add_qkv_bias);
  derive_activation(d);
  derive_positions(d);
  m.untie_embeddings = v.flag("untie_embeddings_and_output_weights");
  m.normalization = v.text("normalization") == "RMSNorm" ? Normalization::kRMSNorm : Normalization::kLayerNorm;
  m.norm_epsilon = v.real("norm_epsilon");
  PGPT_CHECK(ConfigError, m.norm_epsilon >= 0, "--norm-epsilon is ", m.norm_epsilon, "; it must not be negative");
  m.zero_centered_gamma = v.flag("apply_layernorm_1p");
  m.qk_layernorm = v.flag("qk_layernorm");
  for (const char* name : {"attention_dropout", "hidden_dropout"}) {
    const double rate = v.real(name);
    PGPT_CHECK(ConfigError, rate >= 0 && rate < 1, option_name(name), " is ", rate,
               "; it must be at least 0 and below 1");
  }
  m.attention_dropout = v.real("attention_dropout");
  m.hidden_dropout = v.real("hidden_dropout");
  m.transformer_impl =
      v.text("transformer_impl") == "local" ? TransformerImpl::kLocal : TransformerImpl::kTransformerEngine;
  const bool local = m.transformer_impl == TransformerImpl::kLocal;
  const std::vector<std::string> spec = v.texts("spec");
  PGPT_CHECK(ConfigError, spec.empty() || (spec == std::vector<std::string>{"local"} && local),
             "--spec can only be 'local', with --transformer-impl local: layers cannot be loaded from Python modules");
  const std::string backend = v.text("attention_backend");
  m.attention_backend = backend == "flash"     ? AttentionBackend::kFlash
                        : backend == "fused"   ? AttentionBackend::kFused
                        : backend == "unfused" ? AttentionBackend::kUnfused
                        : backend == "local"   ? AttentionBackend::kLocal
                                               : AttentionBackend::kAuto;
  PGPT_CHECK(ConfigError, m.attention_backend != AttentionBackend::kLocal || local,
             "--attention-backend local needs --transformer-impl local (and the reference --spec local); for the "
             "unfused rounding of the other implementation use --attention-backend unfused");
  PGPT_CHECK(ConfigError, d.config.parallel.context == 1 || !local,
             "--context-parallel-size above 1 needs --transformer-impl transformer_engine");
  m.apply_query_key_layer_scaling = v.flag("apply_query_key_layer_scaling");
  m.attention_softmax_in_fp32 = v.flag("attention_softmax_in_fp32") || m.apply_query_key_layer_scaling;
  v.derive("attention_softmax_in_fp32", m.attention_softmax_in_fp32);
  m.masked_softmax_fusion = v.flag("masked_softmax_fusion");
  m.bias_dropout_fusion = v.flag("bias_dropout_fusion");
  m.fp32_residual_connection = v.flag("fp32_residual_connection");
  PGPT_CHECK(ConfigError, !m.fp32_residual_connection || d.config.training.params_dtype != Dtype::kFloat32,
             "--fp32-residual-connection needs --bf16 or --fp16");
  m.cross_entropy_loss_fusion = v.flag("cross_entropy_loss_fusion");
  m.init_method_std = v.real("init_method_std");
  m.embedding_init_method_std = v.maybe_real("embedding_init_method_std").value_or(m.init_method_std);
  PGPT_CHECK(ConfigError,
             m.init_method_std >= 0 && m.embedding_init_method_std >= 0 && std::isfinite(m.init_method_std) &&
                 std::isfinite(m.embedding_init_method_std),
             "--init-method-std and --embedding-init-method-std must be finite and must not be negative, found ",
             m.init_method_std, " and ", m.embedding_init_method_std);
  m.init_method_xavier_uniform = v.flag("init_method_xavier_uniform");
  m.perform_initialization = v.flag("perform_initialization");
  // With a spread of their own for the tables, the two are compared: equal ones make the tables xavier too.
  if (m.init_method_xavier_uniform && !v.is_set("embedding_init_method_std")) {
    d.warn_unused("init_method_std", "normal initial weights (remove --init-method-xavier-uniform)");
  }
  m.use_cpu_initialization = v.flag("use_cpu_initialization");
  m.weight_init = v.text("weight_init") == "megatron" ? WeightInit::kMegatron : WeightInit::kLayoutInvariant;
  m.init_sm_count = d.positive("init_sm_count");
}

void derive_experts(Derivation& d) {
  MoeConfig& e = d.config.experts;
  Values& v = d.values;
  const std::int64_t layers = d.config.model.num_layers;
  e.num_experts = v.maybe_integer("num_experts").value_or(0);
  PGPT_CHECK(ConfigError, e.num_experts >= 0, "--num-experts is ", e.num_experts, "; it must not be negative");
  d.config.moe = e.num_experts > 0;
  const std::int64_t expert_parallel = d.config.parallel.expert;
  if (!d.config.moe) {
    v.derive("num_experts", std::monostate{});
    PGPT_CHECK(ConfigError, !v.is_set("moe_ffn_hidden_size"), "--moe-ffn-hidden-size needs --num-experts");
    PGPT_CHECK(ConfigError, expert_parallel == 1, "--expert-model-parallel-size ", expert_parallel,
               " needs --num-experts");
    for (const Option& option : option_table()) {
      const bool expert_option = option.status == Status::kWorks && option.destination.starts_with("moe_");
      if (expert_option) d.warn_unused(option.destination.c_str(), "--num-experts");
    }
    return;
  }
  PGPT_CHECK(ConfigError, e.num_experts % expert_parallel == 0, "--num-experts ", e.num_experts,
             " is not divisible by --expert-model-parallel-size ", expert_parallel);
  const Value& frequency = v.at("moe_layer_freq");
  if (const auto* every = std::get_if<std::int64_t>(&frequency)) {
    PGPT_CHECK(ConfigError, *every > 0, "--moe-layer-freq is ", *every, "; it must be above 0 or a list");
    for (std::int64_t i = 0; i < layers; ++i) e.expert_layer.push_back(i % *every == 0);
  } else {
    const std::vector<std::int64_t> list = v.integers("moe_layer_freq");
    PGPT_CHECK(ConfigError, static_cast<std::int64_t>(list.size()) == layers, "--moe-layer-freq has ", list.size(),
               " entries, but --num-layers is ", layers);
    for (const std::int64_t entry : list) {
      PGPT_CHECK(ConfigError, entry == 0 || entry == 1, "--moe-layer-freq holds ", entry, "; entries are 0 or 1");
      e.expert_layer.push_back(entry == 1);
    }
  }
  e.ffn_hidden_size = d.maybe_positive("moe_ffn_hidden_size").value_or(d.config.model.ffn_hidden_size);
  v.derive("moe_ffn_hidden_size", e.ffn_hidden_size);
  PGPT_CHECK(ConfigError, e.ffn_hidden_size % d.config.parallel.expert_tensor == 0, "--moe-ffn-hidden-size ",
             e.ffn_hidden_size, " is not divisible by --expert-tensor-parallel-size ", d.config.parallel.expert_tensor);
  e.shared_expert_size = d.maybe_positive("moe_shared_expert_intermediate_size").value_or(0);
  e.router_topk = d.positive("moe_router_topk");
  PGPT_CHECK(ConfigError, e.router_topk <= e.num_experts, "--moe-router-topk ", e.router_topk,
             " is above --num-experts ", e.num_experts);
  e.load_balancing = v.texts("moe_router_load_balancing_type");
  e.aux_loss_coefficients = std::get<std::vector<double>>(v.at("moe_aux_loss_coeff"));
  PGPT_CHECK(ConfigError, e.aux_loss_coefficients.size() == e.load_balancing.size(), "--moe-aux-loss-coeff has ",
             e.aux_loss_coefficients.size(), " values for ", e.load_balancing.size(),
             " types in --moe-router-load-balancing-type; give one for each");
  // The reference turns lists of one element into scalars, and prints them so.
  if (e.load_balancing.size() == 1) {
    v.derive("moe_router_load_balancing_type", e.load_balancing.front());
    v.derive("moe_aux_loss_coeff", e.aux_loss_coefficients.front());
  }
  e.z_loss_coefficient = v.maybe_real("moe_z_loss_coeff");
  e.router_pre_softmax = v.flag("moe_router_pre_softmax");
  e.router_score_function = v.text("moe_router_score_function");
  e.router_dtype = v.text("moe_router_dtype");
  e.topk_scaling_factor = v.maybe_real("moe_router_topk_scaling_factor");
  e.expert_bias = v.flag("moe_router_enable_expert_bias");
  e.expert_bias_update_rate = v.real("moe_router_bias_update_rate");
  e.grouped_gemm = v.flag("moe_grouped_gemm");
  e.token_dispatcher = v.text("moe_token_dispatcher_type");
  e.capacity_factor = v.maybe_real("moe_expert_capacity_factor");
  if (e.capacity_factor && *e.capacity_factor < 0) e.capacity_factor.reset();
  e.pad_to_capacity = v.flag("moe_pad_expert_input_to_capacity");
  PGPT_CHECK(ConfigError, !e.pad_to_capacity || e.capacity_factor,
             "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor");
  e.token_drop_policy = v.text("moe_token_drop_policy");
  PGPT_CHECK(ConfigError, !v.flag("moe_shared_expert_overlap") || e.token_dispatcher != "allgather",
             "--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall or flex");
  const ParallelConfig& p = d.config.parallel;
  PGPT_CHECK(ConfigError, p.tensor == 1 || p.sequence_parallel || d.config.training.skip_train, "--num-experts ",
             e.num_experts, " with --tensor-model-parallel-size ", p.tensor,
             " needs --sequence-parallel to train; add it");
  PGPT_CHECK(ConfigError, !d.config.model.add_bias_linear || p.expert_tensor == 1,
             "experts with biases need an expert tensor parallel size of 1, found ", p.expert_tensor,
             "; add --disable-bias-linear or --expert-tensor-parallel-size 1");
}

void check_heads(Derivation& d) {
  ModelConfig& m = d.config.model;
  const std::int64_t tensor = d.config.parallel.tensor;
  PGPT_CHECK(ConfigError, m.num_attention_heads % tensor == 0, "--num-attention-heads ", m.num_attention_heads,
             " is not divisible by --tensor-model-parallel-size ", tensor);
  m.num_query_groups = m.num_attention_heads;
  if (d.values.flag("group_query_attention")) {
    m.num_query_groups = d.positive("num_query_groups");
    PGPT_CHECK(ConfigError, m.num_attention_heads % m.num_query_groups == 0, "--num-attention-heads ",
               m.num_attention_heads, " is not divisible by --num-query-groups ", m.num_query_groups);
    PGPT_CHECK(ConfigError, m.num_query_groups % tensor == 0 || tensor % m.num_query_groups == 0, "--num-query-groups ",
               m.num_query_groups, " is neither a multiple nor a divisor of --tensor-model-parallel-size ", tensor);
  } else if (d.values.integer("num_query_groups") != m.num_attention_heads) {  // without groups each head is its own
    d.warn_unused("num_query_groups", "--group-query-attention");
  }
  PGPT_CHECK(ConfigError, m.ffn_hidden_size % tensor == 0, "--ffn-hidden-size ", m.ffn_hidden_size,
             " is not divisible by --tensor-model-parallel-size ", tensor);
}

}  // namespace pgpt::config

// Memory of a training step: what the layers of src/model keep for backward, and what is in flight at its fullest
// moments.
#include "memory.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace pgpt::config {

namespace {

/// A matrix of the chain on this tensor parallel rank.
struct Matrix {
  std::int64_t rows = 0, columns = 0;
};

/// Bytes of the tensors of one micro-batch on one rank, by the names that src/model gives them.
struct Sizes {
  explicit Sizes(const Config& config)
      : c(config),
        element(config.training.params_dtype == Dtype::kFloat32 ? 4 : 2),
        tensor(static_cast<double>(config.parallel.tensor)),
        tokens(static_cast<double>(config.model.seq_length * config.training.micro_batch_size) /
               static_cast<double>(config.parallel.context)),
        split_tokens(config.parallel.sequence_parallel ? tokens / tensor : tokens) {
    const ModelConfig& m = config.model;
    const auto h = static_cast<double>(m.hidden_size);
    hidden = split_tokens * h * element;
    stream = split_tokens * h * (m.fp32_residual_connection ? 4 : element);
    norm_statistics = split_tokens * (m.normalization == Normalization::kRMSNorm ? 4 : 8);
    query = tokens * static_cast<double>(m.query_projection_size()) / tensor * element;
    key = tokens * static_cast<double>(m.kv_projection_size()) / tensor * element;
    qkv = query + 2 * key;
    fc1 = tokens * static_cast<double>(m.fc1_rows()) / tensor * element;
    activated = tokens * static_cast<double>(m.ffn_hidden_size) / tensor * element;
    logits = tokens * static_cast<double>(m.padded_vocab_size) / tensor * element;
    // int64 tokens, labels and positions, fp32 mask and scale; then fp32 losses.
    batch = tokens * (3 * 8 + 2 * 4 + 4);
  }
  const Config& c;
  double element, tensor, tokens, split_tokens;
  double hidden = 0, stream = 0, norm_statistics = 0;
  double query = 0, key = 0, qkv = 0, fc1 = 0, activated = 0, logits = 0, batch = 0;
};

bool recomputes(const TrainingConfig& training, const char* module) {
  if (training.recompute != RecomputeGranularity::kSelective) return false;
  const std::vector<std::string>& modules = training.recompute_modules;
  return std::find(modules.begin(), modules.end(), module) != modules.end();
}

/// Row statistics of fused attention, or the probabilities that unfused forms keep.
double core_attention_bytes(const Sizes& z) {
  const ModelConfig& m = z.c.model;
  const bool local = m.transformer_impl == TransformerImpl::kLocal;
  const bool fused = !local && m.attention_backend != AttentionBackend::kUnfused &&
                     m.attention_backend != AttentionBackend::kLocal && !m.apply_query_key_layer_scaling;
  const double rows = z.tokens * static_cast<double>(m.num_attention_heads) / z.tensor;
  if (fused) return rows * 4;
  const bool fused_softmax = local && m.masked_softmax_fusion && z.element == 2;
  const bool wide = m.apply_query_key_layer_scaling || (local && !fused_softmax && m.attention_softmax_in_fp32);
  return rows * static_cast<double>(m.seq_length) * (wide ? 4 : z.element);
}

struct AttentionBytes {
  double kept = 0;  ///< from forward to backward
  double core = 0;  ///< made again in backward when the core is recomputed
};

AttentionBytes attention_bytes(const Sizes& z) {
  const ModelConfig& m = z.c.model;
  double heads = z.qkv;  // views of the packed projection, or copies that replace it
  double core = core_attention_bytes(z);
  const bool grouped = m.num_query_groups > 1 && m.num_query_groups < m.num_attention_heads;
  if (m.qk_layernorm) {
    // Input and output of both norms; the values keep the packed projection alive.
    const double rows = z.tokens * static_cast<double>(m.num_attention_heads + m.num_query_groups) / z.tensor;
    core += 2 * (z.query + z.key) + rows * (m.normalization == Normalization::kRMSNorm ? 4 : 8);
  } else if (grouped && !m.has_rope()) {
    core += z.query;  // the queries of two groups have no common stride
  }
  if (recomputes(z.c.training, "core_attn")) return {heads + z.query, core + z.query};
  return {heads + core + z.query, 0};
}

/// fc1 output and activation; for experts, of the tokens routed to this rank when they spread evenly.
double mlp_bytes(const Sizes& z, bool experts) {
  if (!experts) return z.fc1 + z.activated;
  const MoeConfig& e = z.c.experts;
  const double width = static_cast<double>(e.ffn_hidden_size) * (z.c.model.gated() ? 3 : 2);
  const double routed = z.tokens * static_cast<double>(e.router_topk) * z.element;
  const double shared = static_cast<double>(e.shared_expert_size) * (z.c.model.gated() ? 3 : 2) / z.tensor;
  return routed * (2 * static_cast<double>(z.c.model.hidden_size) + width) + z.tokens * shared * z.element;
}

/// What one layer keeps.
struct LayerBytes {
  double first_half = 0;   ///< input norm and attention
  double second_half = 0;  ///< second norm and feed-forward
  [[nodiscard]] double total() const { return first_half + second_half; }
};

LayerBytes layer_bytes(const Sizes& z, bool experts) {
  const bool keep_norms = !recomputes(z.c.training, "layernorm");
  const double norm = z.stream + z.norm_statistics + (keep_norms ? z.hidden : 0);
  return {norm + attention_bytes(z).kept,
          norm + (recomputes(z.c.training, "mlp") && !experts ? 0 : mlp_bytes(z, experts))};
}

/// Whether GTP's tensors move by copies between GPUs; the automatic choice is taken to find that they work.
bool moves_by_copies(const Config& config) {
  const ParallelConfig& p = config.parallel;
  if (p.gtp_transport != GtpTransport::kAutomatic) return p.gtp_transport == GtpTransport::kCopyEngine;
  return !config.training.cuda_graph && !(p.backend_given && p.backend == Backend::kGloo);
}

/// Bytes of an element of a weight gradient on its way to the main gradient.
double gradient_element(const Config& config, bool transformer_engine_module) {
  const TrainingConfig& t = config.training;
  const double element = t.params_dtype == Dtype::kFloat32 ? 4 : 2;
  const bool fuse = t.gradient_accumulation_fusion && (config.parallel.gtp == 1 || transformer_engine_module);
  return fuse && t.gradients_in_fp32 ? 4 : element;
}

std::int64_t microbatches(const Config& config) {
  return std::max<std::int64_t>(
      1, config.training.global_batch_size / (config.training.micro_batch_size * config.parallel.data_ranks()));
}

/// What a weight gradient needs beside main gradient and staging buffer: a product that is added afterwards, or under
/// GTP the part that comes back before it is added.
double gradient_in_flight(const Sizes& z, const Matrix& m, bool transformer_engine_module) {
  const TrainingConfig& t = z.c.training;
  const double peers = static_cast<double>(z.c.parallel.gtp);
  const double main = t.gradients_in_fp32 ? 4 : z.element;
  const double type = gradient_element(z.c, transformer_engine_module);
  if (peers == 1) return type == 4 && main == 4 ? 0 : static_cast<double>(m.rows * m.columns) * type;
  const double shard = static_cast<double>(shard_rows(m.rows, z.c.parallel.gtp) * m.columns);
  // Copies are added up in fp32 without it.
  const bool in_parts = z.c.parallel.gtp_fp32_accumulation && peers > 2 && type < 4 && !moves_by_copies(z.c);
  if (in_parts) return type * shard * peers;
  return type == main && microbatches(z.c) == 1 ? 0 : type * shard;
}

struct ChainMatrices {
  Matrix qkv, proj, fc1, fc2, vocabulary;
};

ChainMatrices matrices(const Config& config) {
  const ModelConfig& m = config.model;
  const std::int64_t t = config.parallel.tensor, h = m.hidden_size;
  return {{m.qkv_rows() / t, h},
          {h, m.query_projection_size() / t},
          {m.fc1_rows() / t, h},
          {h, m.ffn_hidden_size / t},
          {m.padded_vocab_size / t, h}};
}

/// Activations of micro-batches that are under way at once, in micro-batches.
double in_flight(const Config& config, std::int64_t stage) {
  const ParallelConfig& p = config.parallel;
  if (p.pipeline == 1) return 1;
  const auto stages = static_cast<double>(p.pipeline);
  if (p.virtual_pipeline > 0) return stages * (1 + (stages - 1) / (stages * static_cast<double>(p.virtual_pipeline)));
  return std::min(static_cast<double>(microbatches(config)), stages - static_cast<double>(stage));
}

/// How full recompute divides the layers.
struct RecomputePlan {
  double inputs = 0;  ///< chunk inputs that are kept
  double unit = 0;    ///< layers of the unit that is recomputed at once
  double kept = 0;    ///< layers that keep everything
};

RecomputePlan recompute_plan(const TrainingConfig& t, std::int64_t layers) {
  const auto all = static_cast<double>(layers);
  if (t.recompute != RecomputeGranularity::kFull) return {0, 0, all};
  const double size = std::min(all, static_cast<double>(t.recompute_num_layers));
  if (t.recompute_method == RecomputeMethod::kUniform) return {std::ceil(all / size), size, 0};
  return {size, std::min(1.0, size), all - size};
}

}  // namespace

std::int64_t shard_rows(std::int64_t rows, std::int64_t gtp) {
  if (gtp == 1) return rows;
  const std::int64_t unit = 16 * gtp;
  return (rows + unit - 1) / unit * unit / gtp;
}

std::vector<MemoryMoment> memory_moments(const Config& config, const StagePlace& place) {
  const Sizes z(config);
  const ChainMatrices chain = matrices(config);
  const RecomputePlan plan = recompute_plan(config.training, place.layers);
  const std::vector<bool>& expert_layer = config.experts.expert_layer;
  const bool mixed = config.moe && !expert_layer.empty();
  const double expert_share =
      mixed ? static_cast<double>(config.experts.num_expert_layers()) / static_cast<double>(expert_layer.size()) : 0.0;
  const LayerBytes dense = layer_bytes(z, false);
  const LayerBytes sparse = mixed ? layer_bytes(z, true) : dense;
  const LayerBytes layer{dense.first_half, dense.second_half + expert_share * (sparse.second_half - dense.second_half)};

  const double of_microbatches = in_flight(config, place.index);
  const double kept = of_microbatches * (plan.kept * layer.total() + plan.inputs * z.stream);
  const double gradient = z.stream;               // of the residual stream
  const double head = place.last ? z.hidden : 0;  // the output layer's input gradient lives until the pass ends
  const double branch = config.model.hidden_dropout > 0 || z.stream != z.hidden ? z.hidden : 0;
  std::vector<MemoryMoment> moments;

  if (place.last) {
    const double final_norm = z.stream + z.hidden + z.norm_statistics;
    // In parts: the input gradient as a whole and of a part, and a sum in fp32 where the gradient is 16-bit.
    const auto parts = static_cast<double>(config.training.logits_chunks);
    const double sum = parts > 1 && gradient_element(config, false) == 2
                           ? static_cast<double>(chain.vocabulary.rows * chain.vocabulary.columns) * 4
                           : 0;
    moments.push_back(
        {"backward of the output layer", kept + final_norm + z.batch, z.logits / parts,
         z.hidden * (parts > 1 ? 1 + 1 / parts : 1) + sum + gradient_in_flight(z, chain.vocabulary, false)});
  }
  // Backward of the layers runs from the last one, when all the others are still kept; a recomputed unit joins them,
  // and its first layer shares the unit's kept input.
  const bool unit_last = plan.unit > 0 && plan.kept == 0;
  const double before = unit_last ? kept + plan.unit * layer.total() - z.stream : kept;
  const double mlp = mlp_bytes(z, false);
  const double mlp_again =
      (recomputes(config.training, "mlp") ? mlp : 0) + (recomputes(config.training, "layernorm") ? z.hidden : 0);
  moments.push_back({"backward of the last feed-forward block", before + z.batch, 0,
                     head + gradient + branch + mlp_again + z.activated + z.fc1 + z.hidden +
                         gradient_in_flight(z, chain.fc2, true) + gradient_in_flight(z, chain.fc1, true)});
  // Three gradients of the stream, that of the context, of the heads, the same packed; fp32 sums of the queries inside.
  const double attention_work = head + 2 * gradient + branch + attention_bytes(z).core + z.query + z.qkv +
                                std::max(z.qkv, z.query * 4 / z.element) + z.hidden +
                                (recomputes(config.training, "layernorm") ? z.hidden : 0);
  moments.push_back(
      {"backward of the last attention block", before - layer.second_half + z.batch, 0,
       attention_work + gradient_in_flight(z, chain.proj, true) + gradient_in_flight(z, chain.qkv, true)});
  if (plan.unit > 0 && plan.kept > 0) {
    // Recompute of the first layers starts when the kept ones are gone.
    const double then = of_microbatches * plan.inputs * z.stream + (of_microbatches - 1) * plan.kept * layer.total();
    moments.push_back({"backward of a recomputed layer", then + plan.unit * layer.total() - z.stream + z.batch, 0,
                       head + gradient + branch + z.activated + z.fc1 + z.hidden +
                           gradient_in_flight(z, chain.fc2, true) + gradient_in_flight(z, chain.fc1, true)});
  }
  if (place.first) {
    const double whole_table = static_cast<double>(chain.vocabulary.rows * chain.vocabulary.columns) * z.element;
    const double table = config.parallel.gtp > 1 ? whole_table + gradient_in_flight(z, chain.vocabulary, false) : 0;
    moments.push_back({"backward of the embedding", (of_microbatches - 1) * kept / of_microbatches + z.batch, 0,
                       head + gradient + branch + table});
  }
  return moments;
}

double buffer_bytes(const Config& config, const StagePlace& place) {
  const ModelConfig& m = config.model;
  const double element = config.training.params_dtype == Dtype::kFloat32 ? 4 : 2;
  double bytes = 32.0 * 1024 * 1024;  // workspace that libtorch gives cuBLAS on a Hopper GPU
  if (m.has_rope()) {
    const double angles = std::floor(static_cast<double>(m.kv_channels) * m.rotary_percent / 2);
    bytes += static_cast<double>(m.seq_length) * angles * 2 * 4;
  }
  if (config.parallel.gtp == 1) return bytes;
  // Two gather buffers, taken in turns along the chain, each as large as its largest weight that is not kept; recompute
  // has its own pair; and two buffers for whole gradients.
  const ChainMatrices chain = matrices(config);
  struct Use {
    Matrix matrix;
    double gradient;  // bytes an element
  };
  const bool fused_modules = m.transformer_impl == TransformerImpl::kTransformerEngine;
  const double inner = gradient_element(config, fused_modules);
  const double outer = gradient_element(config, false);
  std::vector<Use> uses;
  if (place.first) uses.push_back({chain.vocabulary, outer});
  for (std::int64_t i = 0; i < place.layers; ++i)
    uses.insert(uses.end(), {{chain.qkv, inner}, {chain.proj, inner}, {chain.fc1, inner}, {chain.fc2, inner}});
  if (place.last) uses.push_back({chain.vocabulary, outer});
  const std::int64_t kept_layers = std::min(config.parallel.gtp_keep_gathered_layers, place.layers);
  std::size_t kept = kept_layers == 0 ? 0 : 4 * static_cast<std::size_t>(kept_layers) + (place.last ? 1 : 0);
  if (kept > 0 && kept_layers == place.layers) kept = uses.size();
  double largest[2] = {0, 0};
  double largest_gradient[2] = {0, 0};
  for (std::size_t i = 0; i < uses.size(); ++i) {
    const std::int64_t rows = shard_rows(uses[i].matrix.rows, config.parallel.gtp) * config.parallel.gtp;
    const double elements = static_cast<double>(rows) * static_cast<double>(uses[i].matrix.columns);
    if (i + kept >= uses.size()) {
      const bool tied_again = place.first && place.last && !m.untie_embeddings && i + 1 == uses.size();
      if (!tied_again || kept < uses.size()) bytes += elements * element;
    } else {
      largest[i % 2] = std::max(largest[i % 2], elements);
    }
    largest_gradient[i % 2] = std::max(largest_gradient[i % 2], elements * uses[i].gradient);
  }
  if (moves_by_copies(config)) {
    // The peers' parts of the largest gradient; and a page of flags for each communicator.
    const auto peers = static_cast<double>(config.parallel.gtp);
    bytes += (peers - 1) / peers * std::max(largest_gradient[0], largest_gradient[1]) +
             static_cast<double>(config.parallel.gtp_communicators) * 2.0 * 1024 * 1024;
  }
  const bool again = config.training.recompute == RecomputeGranularity::kFull || recomputes(config.training, "mlp");
  return bytes + (largest[0] + largest[1]) * element * (again ? 2 : 1) + largest_gradient[0] + largest_gradient[1];
}

}  // namespace pgpt::config

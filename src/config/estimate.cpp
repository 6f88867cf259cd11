// Parameter counts, memory and operations from the configuration alone.
#include "pgpt/config/estimate.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "memory.h"
#include "pgpt/base/error.h"
#include "pgpt/config/flops.h"
#include "pgpt/mesh/mesh.h"

namespace pgpt::config {

namespace {

/// How weights are cut; all ones gives the whole model.
struct Cuts {
  std::int64_t tensor = 1, gtp = 1, expert = 1, expert_tensor = 1, expert_gtp = 1;
};

class ParameterCounter {
 public:
  ParameterCounter(const Config& config, const Cuts& cuts) : m_(config.model), e_(config.experts), cuts_(cuts) {}

  [[nodiscard]] std::int64_t norm() const { return m_.hidden_size * norm_tensors(); }

  [[nodiscard]] std::int64_t layer(bool experts) const {
    const std::int64_t h = m_.hidden_size;
    std::int64_t count = column(m_.qkv_rows(), h, m_.add_qkv_bias) + row(h, m_.query_projection_size());
    count += 2 * norm();
    if (m_.qk_layernorm) count += 2 * m_.kv_channels * norm_tensors();
    return count + (experts ? expert_mlp() : mlp(m_.ffn_hidden_size));
  }

  [[nodiscard]] std::int64_t vocabulary() const {
    return shard_rows(m_.padded_vocab_size / cuts_.tensor, cuts_.gtp) * m_.hidden_size;
  }
  [[nodiscard]] std::int64_t positions() const {
    const bool learned = m_.position_embedding == PositionEmbedding::kLearnedAbsolute;
    return learned ? m_.max_position_embeddings * m_.hidden_size : 0;
  }
  /// One multi-token prediction block: two input norms, a projection of both inputs, a layer and its final norm.
  [[nodiscard]] std::int64_t prediction_block() const {
    const bool experts = !e_.expert_layer.empty() && e_.expert_layer.back();
    return 3 * norm() + column(m_.hidden_size, 2 * m_.hidden_size, false) + layer(experts);
  }

 private:
  [[nodiscard]] std::int64_t norm_tensors() const { return m_.normalization == Normalization::kRMSNorm ? 1 : 2; }
  [[nodiscard]] std::int64_t column(std::int64_t rows, std::int64_t columns, bool bias) const {
    const std::int64_t local = rows / cuts_.tensor;
    return shard_rows(local, cuts_.gtp) * columns + (bias ? local : 0);
  }
  [[nodiscard]] std::int64_t row(std::int64_t rows, std::int64_t columns) const {
    return shard_rows(rows, cuts_.gtp) * (columns / cuts_.tensor) + (m_.add_bias_linear ? rows : 0);
  }
  [[nodiscard]] std::int64_t mlp(std::int64_t width) const {
    const std::int64_t rows = m_.gated() ? 2 * width : width;
    return column(rows, m_.hidden_size, m_.add_bias_linear) + row(m_.hidden_size, width);
  }
  [[nodiscard]] std::int64_t expert_mlp() const {
    const std::int64_t h = m_.hidden_size;
    const std::int64_t width = e_.ffn_hidden_size / cuts_.expert_tensor;
    const std::int64_t rows = m_.gated() ? 2 * width : width;
    const std::int64_t one = shard_rows(rows, cuts_.expert_gtp) * h + shard_rows(h, cuts_.expert_gtp) * width +
                             (m_.add_bias_linear ? rows + h : 0);
    const std::int64_t shared = e_.shared_expert_size > 0 ? mlp(e_.shared_expert_size) : 0;
    return e_.num_experts * h + e_.num_experts / cuts_.expert * one + shared;
  }

  const ModelConfig& m_;
  const MoeConfig& e_;
  Cuts cuts_;
};

/// Parameters of each pipeline rank of a model cut like `cuts`, with these layers in its virtual stages.
std::vector<std::int64_t> count_stages(const Config& config, const Cuts& cuts, std::int64_t pipeline,
                                       const std::vector<std::int64_t>& stage_layers) {
  const ParameterCounter counter(config, cuts);
  const ModelConfig& m = config.model;
  std::vector<std::int64_t> ranks(static_cast<std::size_t>(pipeline), 0);
  std::size_t layer = 0;
  for (std::size_t stage = 0; stage < stage_layers.size(); ++stage) {
    for (std::int64_t i = 0; i < stage_layers[stage]; ++i, ++layer) {
      const bool experts = config.moe && config.experts.expert_layer.at(layer);
      ranks[stage % ranks.size()] += counter.layer(experts);
    }
  }
  ranks.front() += counter.vocabulary() + counter.positions();
  ranks.back() += counter.norm();
  // A tied output matrix is a copy of the embedding when it lives on another rank.
  if (m.untie_embeddings || pipeline > 1) ranks.back() += counter.vocabulary();
  if (m.mtp_num_layers > 0) {
    ranks.back() += m.mtp_num_layers * counter.prediction_block();
    // The blocks embed shifted tokens, for which a later stage keeps a copy of the tables.
    if (pipeline > 1 && m.untie_embeddings) ranks.back() += counter.vocabulary();
    if (pipeline > 1) ranks.back() += counter.positions();
  }
  return ranks;
}

double step_flops(const Config& config) {
  ModelConfig model = config.model;
  const MoeConfig& e = config.experts;
  const auto h = static_cast<double>(model.hidden_size);
  const auto mtp = static_cast<double>(model.mtp_num_layers);
  double expert_layers = config.moe ? static_cast<double>(e.num_expert_layers()) : 0.0;
  if (config.moe && e.expert_layer.back()) expert_layers += mtp;
  model.num_layers += model.mtp_num_layers;
  const std::int64_t samples = config.training.global_batch_size;
  const double tokens = static_cast<double>(samples) * static_cast<double>(model.seq_length);
  const double matrices = model.activation == Activation::kSwiglu ? 3.0 : 2.0;
  const double expert_width = static_cast<double>(e.ffn_hidden_size * e.router_topk + e.shared_expert_size);
  const double experts =
      6.0 * h * matrices * expert_layers * (expert_width - static_cast<double>(model.ffn_hidden_size));
  const double predictions =
      mtp * (6.0 * (3.0 * h + 2.0 * h * h) + 6.0 * h * static_cast<double>(model.padded_vocab_size));
  return training_flops(model, samples) + tokens * (experts + predictions);
}

std::string format_bytes(double bytes) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, "%.2f MiB", bytes / (1024.0 * 1024.0));
  return buffer;
}

}  // namespace

const MemoryMoment& RankEstimate::fullest_moment() const {
  PGPT_ASSERT(!moments.empty(), "an estimate without moments");
  return *std::max_element(moments.begin(), moments.end(),
                           [](const MemoryMoment& a, const MemoryMoment& b) { return a.total() < b.total(); });
}

Estimate estimate(const Config& config) {
  const ModelConfig& m = config.model;
  const ParallelConfig& p = config.parallel;
  const TrainingConfig& t = config.training;
  PGPT_CHECK(ConfigError, m.padded_vocab_size > 0,
             "the vocabulary size is not known; give --vocab-size or --padded-vocab-size to estimate sizes");
  Estimate result;
  result.total_parameters = count_stages(config, {}, 1, {m.num_layers}).front();
  result.step_flops = step_flops(config);
  const std::vector<std::int64_t> counts =
      count_stages(config, {p.tensor, p.gtp, p.expert, p.expert_tensor, p.expert_gtp}, p.pipeline, p.stage_layers);
  const std::int64_t weight = t.params_dtype == Dtype::kFloat32 ? 4 : 2;
  const std::int64_t gradient = t.gradients_in_fp32 ? 4 : weight;
  const bool sgd = config.optimizer.kind == OptimizerKind::kSgd;
  const std::int64_t moments = sgd ? (config.optimizer.sgd_momentum != 0 ? 4 : 0) : 8;
  const std::int64_t state_ranks = p.use_distributed_optimizer ? p.replicate_data * p.context : 1;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    RankEstimate r;
    r.parameters = counts[rank];
    r.weight_bytes = counts[rank] * weight;
    r.gradient_bytes = counts[rank] * gradient;
    const std::int64_t held = (counts[rank] + state_ranks - 1) / state_ranks;
    r.master_bytes = weight == 4 ? 0 : held * 4;
    r.moment_bytes = held * moments;
    std::int64_t layers = 0;
    for (std::size_t stage = rank; stage < p.stage_layers.size(); stage += counts.size())
      layers += p.stage_layers[stage];
    const StagePlace place{layers, static_cast<std::int64_t>(rank), rank == 0, rank + 1 == counts.size()};
    r.buffer_bytes = buffer_bytes(config, place);
    r.moments = memory_moments(config, place);
    // Gradients of 16 bits are unscaled in an fp32 copy.
    if (!t.gradients_in_fp32 && t.scales_loss())
      r.moments.push_back({"update of the weights", 0, 0, static_cast<double>(counts[rank]) * 4});
    result.stages.push_back(r);
  }
  return result;
}

std::string describe_dry_run(const Config& config) {
  const ParallelConfig& p = config.parallel;
  const mesh::Mesh mesh({p.world_size, p.tensor, p.pipeline, p.context, p.gtp, p.expert, p.expert_tensor, p.expert_gtp,
                         p.pipeline_before_data});
  std::ostringstream out;
  for (const std::string& notice : config.notices) out << notice << "\n";
  out << mesh.describe();
  const TrainingConfig& t = config.training;
  out << "batch: global " << t.global_batch_size << " = micro " << t.micro_batch_size << " x data ranks "
      << p.data_ranks() << " (data parallel " << p.replicate_data << " x GTP " << p.gtp << ") x microbatches "
      << t.global_batch_size / (t.micro_batch_size * p.data_ranks()) << "\n";
  if (config.model.padded_vocab_size == 0) {
    out << "parameters and memory: not known without --vocab-size or --padded-vocab-size\n";
    return out.str();
  }
  const Estimate e = estimate(config);
  out << "parameters of the model: " << e.total_parameters << "\n";
  for (std::size_t rank = 0; rank < e.stages.size(); ++rank) {
    const RankEstimate& r = e.stages[rank];
    out << "pipeline rank " << rank << ": parameters per rank " << r.parameters << "\n";
    out << "  weights " << format_bytes(static_cast<double>(r.weight_bytes)) << " (" << r.weight_bytes
        << " bytes), main gradients " << format_bytes(static_cast<double>(r.gradient_bytes)) << ", master weights "
        << format_bytes(static_cast<double>(r.master_bytes)) << ", optimizer moments "
        << format_bytes(static_cast<double>(r.moment_bytes)) << "\n";
    out << "  weights, gradients and optimizer " << format_bytes(static_cast<double>(r.state_bytes())) << " ("
        << r.state_bytes() << " bytes), buffers " << format_bytes(r.buffer_bytes) << ", activations "
        << format_bytes(r.fullest_moment().activations) << ", peak " << format_bytes(r.peak_bytes()) << " in the "
        << r.fullest_moment().name << "\n";
  }
  out << "floating-point operations per step: " << static_cast<std::int64_t>(std::llround(e.step_flops)) << "\n";
  return out.str();
}

}  // namespace pgpt::config

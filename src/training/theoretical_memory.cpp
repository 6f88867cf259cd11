#include <algorithm>
#include <cinttypes>
#include <cmath>

#include "pgpt/training/training_log.h"
#include "text.h"

namespace pgpt::training {
namespace {

constexpr double kMegabyte = 1024.0 * 1024.0;
constexpr double kBillion = 1e9;

/// Sizes as real numbers, named as in the formulas of spec/training.md 10.3.
struct Sizes {
  explicit Sizes(const config::Config& c)
      : layers(static_cast<double>(c.model.num_layers)),
        h(static_cast<double>(c.model.hidden_size)),
        ffn(static_cast<double>(c.model.ffn_hidden_size)),
        s(static_cast<double>(c.model.seq_length)),
        b(static_cast<double>(c.training.micro_batch_size)),
        v(static_cast<double>(c.model.padded_vocab_size)),
        t(static_cast<double>(c.parallel.tensor)),
        p(static_cast<double>(c.parallel.pipeline)),
        vpp(static_cast<double>(c.parallel.virtual_pipeline)) {}
  double layers, h, ffn, s, b, v, t, p, vpp;
};

/// Adds the parameter lines and returns the bytes of weights and optimizer on the most loaded shard.
double weight_and_optimizer_bytes(const config::Config& c, const Sizes& z, std::vector<std::string>& lines) {
  const double groups_per_head =
      static_cast<double>(c.model.num_query_groups) / static_cast<double>(c.model.num_attention_heads);
  const double attention =
      2 * z.h * z.h * (1 + groups_per_head) * (static_cast<double>(c.model.query_projection_size()) / z.h);
  const double mlp = 2 * z.h * z.ffn * (c.model.activation == config::Activation::kSwiglu ? 1.5 : 1.0);
  const double norm = (c.model.normalization == config::Normalization::kRMSNorm ? 1.0 : 2.0) * z.h;
  const double matrices = z.layers * (attention + mlp);
  const double norms = z.layers * 2 * norm + norm;
  const double block = matrices + norms;
  const double embedding = z.h * z.v;
  const double embeddings = c.model.untie_embeddings ? 2 * embedding : embedding;
  double shard = (matrices / z.p + embedding) / z.t + norms / z.p;
  if (c.model.untie_embeddings && z.p == 1) shard += embedding / z.t;

  lines.push_back(text("Number of parameters in transformer block in billions: % .2f", block / kBillion));
  lines.push_back(text("Number of active parameters in transformer block in billions: % .2f", block / kBillion));
  lines.push_back(text("Number of parameters in embedding layers in billions: %.2f", embeddings / kBillion));
  lines.push_back(text("Total number of parameters in billions: %.2f", (block + embeddings) / kBillion));
  lines.push_back(text("Total number of active parameters in billions: %.2f", (block + embeddings) / kBillion));
  lines.push_back(text("Number of parameters in most loaded shard in billions: %.4f", shard / kBillion));
  if (z.p > 1) {
    const double other = matrices / (z.p * z.t) + norms / z.p;
    lines.push_back(text("Number of parameters in other shards in billions: %.4f", other / kBillion));
  }
  const double bytes_per_parameter =
      c.parallel.use_distributed_optimizer ? 6 + 12 / static_cast<double>(c.parallel.replicate_data) : 18;
  return shard * bytes_per_parameter;
}

/// Applies what a pipeline schedule does to the activations of one stage and adds its lines.
double in_flight_factor(const Sizes& z, std::int64_t num_microbatches, std::vector<std::string>& lines) {
  if (z.vpp > 0) {
    const double penalty = 1 + (z.p - 1) / (z.p * z.vpp);
    lines.push_back(text("Memory penalty from interleaved schedule: %.2f", penalty));
    lines.push_back(text("Number of in-flight microbatches: %.0f", std::ceil(penalty * z.p)));
    return penalty;
  }
  if (z.p > 1) {
    const double in_flight = std::min(static_cast<double>(num_microbatches), z.p);
    lines.push_back(text("Number of in-flight microbatches: %.0f", in_flight));
    return in_flight / z.p;
  }
  return 1;
}

double activation_bytes_with_sp(const Sizes& z, std::int64_t num_microbatches, std::vector<std::string>& lines) {
  lines.emplace_back("compute_activation_memory with SP");
  const double layer = z.s * z.b * z.h * (18 + 4 * (z.ffn / z.h));
  lines.push_back(text("Activation memory footprint per transformer layer: %.1f MB", layer / kMegabyte / z.t));
  double total = layer * z.layers + 8 * z.s * z.b * z.p + z.s * z.b * z.h * z.p;
  total *= in_flight_factor(z, num_microbatches, lines);
  if (z.p == 1) total += z.s * z.b * z.h * 4 * (1 + z.v / z.h);
  return total / z.t;
}

double activation_bytes_without_sp(const Sizes& z, std::int64_t num_microbatches, std::vector<std::string>& lines) {
  lines.emplace_back("compute_activation_memory_without_sp");
  const double layer = z.s * z.b * z.h * (10 + 24 / z.t);
  lines.push_back(
      text("Activation memory footprint per transformer layer (precise, without SP): %.1f MB", layer / kMegabyte));
  double total = layer * z.layers + 8 * z.s * z.b * z.p + z.s * z.b * z.h * z.p;
  total *= in_flight_factor(z, num_microbatches, lines);
  if (z.p == 1) total += 2 * (z.s * z.b * z.v / z.t + z.s * z.b * z.h);
  return total * 1.05;
}

}  // namespace

std::vector<std::string> theoretical_memory_lines(const config::Config& config, std::int64_t num_microbatches) {
  const Sizes z(config);
  std::vector<std::string> lines;
  const double weights = weight_and_optimizer_bytes(config, z, lines) / kMegabyte;
  const bool sp =
      config.parallel.sequence_parallel && config.training.recompute == config::RecomputeGranularity::kSelective;
  const double activations = (sp ? activation_bytes_with_sp(z, num_microbatches, lines)
                                 : activation_bytes_without_sp(z, num_microbatches, lines)) /
                             kMegabyte;
  lines.push_back(text("Theoretical memory footprints: weight and optimizer=%.2f MB, activation=%.2f MB, total=%.2f MB",
                       weights, activations, weights + activations));
  lines.emplace_back();
  return lines;
}

}  // namespace pgpt::training

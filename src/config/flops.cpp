#include "pgpt/config/flops.h"

#include "pgpt/base/error.h"

namespace pgpt::config {
namespace {

/// Operations per token that grow with the layer sizes: 6 = multiply and add, in forward and twice in backward.
double dense_flops_per_token(const ModelConfig& m) {
  const auto h = static_cast<double>(m.hidden_size);
  const auto layers = static_cast<double>(m.num_layers);
  const auto q = static_cast<double>(m.query_projection_size());
  const auto kv = static_cast<double>(m.kv_projection_size());
  const double mlp_matrices = m.activation == Activation::kSwiglu ? 3.0 : 2.0;
  const double mlp = 6.0 * h * static_cast<double>(m.ffn_hidden_size) * mlp_matrices * layers;
  const double attention = 6.0 * layers * (h * (q + 2.0 * kv) + q * h);
  const double logits = 6.0 * h * static_cast<double>(m.padded_vocab_size);
  return mlp + attention + logits;
}

/// Operations per squared document length: the two attention products, halved by causality.
double attention_flops_per_square(const ModelConfig& m) {
  return static_cast<double>(m.num_layers) * 6.0 * static_cast<double>(m.query_projection_size());
}

}  // namespace

double training_flops(const ModelConfig& model, double tokens, double squared_lengths) {
  return tokens * dense_flops_per_token(model) + squared_lengths * attention_flops_per_square(model);
}

double training_flops(const ModelConfig& model, std::int64_t samples) {
  const auto b = static_cast<double>(samples);
  const auto s = static_cast<double>(model.seq_length);
  return training_flops(model, b * s, b * s * s);
}

double tflops_per_gpu(double flops, double seconds, std::int64_t world_size) {
  if (!(seconds > 0)) return 0;
  return flops / (seconds * 1e12 * static_cast<double>(world_size));
}

std::string describe_flops(const ModelConfig& m) {
  std::ostringstream out;
  out.precision(15);
  out << "FLOPs of a step: tokens * [6*hidden*ffn*" << (m.activation == Activation::kSwiglu ? 3 : 2)
      << "*layers + 6*layers*(hidden*(q+k+v) + q*hidden) + 6*hidden*padded_vocab] + sum(length^2)*layers*6*q = tokens "
         "* "
      << dense_flops_per_token(m) << " + sum(length^2) * " << attention_flops_per_square(m)
      << "; recompute, norms and softmax are not counted";
  return out.str();
}

}  // namespace pgpt::config

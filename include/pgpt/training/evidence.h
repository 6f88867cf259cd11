#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pgpt/config/config.h"
#include "pgpt/mesh/mesh.h"
#include "pgpt/model/context.h"
#include "pgpt/model/gpt.h"
#include "pgpt/optim/optimizer.h"
#include "pgpt/training/batch.h"

namespace pgpt::training {

/// Writes the tensors of chosen iterations of one rank: DIR/iter_NNNNNNN/rank_RRRRR.safetensors and, after it, a JSON
/// manifest of the same name (configuration, place in the mesh, shard cuts, versions, types, a checksum for each
/// tensor). Inactive without --evidence-dir, and then free of cost; collecting never changes what the step computes.
///
/// Tensor names: `mbK.tokens|labels|loss_mask|token_losses|logits`, `mbK.activation.NAME`, `mbK.grad.PARAMETER` (whole,
/// of that micro-batch's own scaled loss, before GTP and data-parallel reduction), `main_grad.PARAMETER` (this rank's
/// shard, reduced, before clipping), `param.PARAMETER` (after the step), `delta.PARAMETER` (fp32 change by the step),
/// `fp32_param|exp_avg|exp_avg_sq|momentum_buffer.PARAMETER`. Iteration 0, written when the first step starts, holds
/// the initial `param.PARAMETER`. docs/evidence.md describes the files.
class Evidence {
 public:
  /// Throws ConfigError for an unknown content kind or a negative iteration.
  Evidence(const config::Config& config, const mesh::Mesh& mesh, int rank);

  /// The kinds that --evidence-content accepts.
  [[nodiscard]] static const std::vector<std::string>& kinds();

  /// Starts an iteration (1-based); collects only when it was asked for.
  void begin_iteration(std::int64_t iteration, const LossScaling& scaling, const parameter::ParameterStore& store);
  /// Whether this iteration is collected, which is the same on every rank.
  [[nodiscard]] bool active() const { return active_; }
  /// Observer for the model of micro-batch `index`, or null when nothing is collected; it lives until finish_iteration.
  [[nodiscard]] const model::Observer* observer(std::int64_t micro_batch);
  void add_inputs(std::int64_t micro_batch, const model::Batch& batch);
  void add_token_losses(std::int64_t micro_batch, const at::Tensor& value);
  void add_main_gradients(const parameter::ParameterStore& store);
  /// Collects weights and optimizer state after the step and writes the files, without communication. Throws DataError
  /// (a full disk, for example) on this rank alone: the caller tells the others.
  void finish_iteration(const parameter::ParameterStore& store, const optim::Optimizer& optimizer,
                        std::optional<double> gradient_norm);

 private:
  [[nodiscard]] bool wants(const std::string& kind) const;
  [[nodiscard]] bool wants_iteration(std::int64_t iteration) const;
  void keep(std::string name, const at::Tensor& value);
  void keep_gradient(const std::string& name, const at::Tensor& gradient);
  void write(std::int64_t iteration, const parameter::ParameterStore& store);
  [[nodiscard]] std::string manifest(std::int64_t iteration, const parameter::ParameterStore& store) const;

  config::Config config_;
  mesh::Mesh mesh_;
  int rank_;
  bool active_ = false;
  std::int64_t iteration_ = 0;
  LossScaling scaling_;
  std::optional<double> clip_coefficient_;
  std::map<std::int64_t, std::int64_t> valid_tokens_;                   // per micro-batch
  std::map<std::int64_t, std::unique_ptr<model::Observer>> observers_;  // per micro-batch
  std::vector<std::pair<std::string, at::Tensor>> tensors_;
  std::vector<std::pair<std::string, at::Tensor>> initial_;  // weights before the first step
  std::vector<at::Tensor> before_;                           // weights at the start of the step, for deltas
};

}  // namespace pgpt::training

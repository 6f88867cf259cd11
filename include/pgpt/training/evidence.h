#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "pgpt/config/config.h"
#include "pgpt/model/context.h"
#include "pgpt/optim/optimizer.h"

namespace pgpt::training {

/// Writes the tensors of chosen iterations of one rank: DIR/iter_NNNNNNN/rank_RRRRR.safetensors and a JSON manifest beside it (layout, cuts,
/// types, configuration). Inactive without --evidence-dir, and then free of cost.
///
/// Tensor names: `mbK.tokens|labels|loss_mask|token_losses|logits`, `mbK.activation.NAME`, `mbK.grad.PARAMETER` (whole, of that micro-batch's
/// own scaled loss, before GTP and data-parallel reduction), `main_grad.PARAMETER` (this rank's shard, reduced, before clipping),
/// `param.PARAMETER` (after the step), `delta.PARAMETER` (change by the step), `fp32_param|exp_avg|exp_avg_sq|momentum_buffer.PARAMETER`.
class Evidence {
 public:
  /// Throws ConfigError for an unknown content kind.
  Evidence(const config::Config& config, int rank, int world_size);

  /// The kinds that --evidence-content accepts.
  [[nodiscard]] static const std::vector<std::string>& kinds();

  /// Starts an iteration (1-based); collects only when it was asked for.
  void begin_iteration(std::int64_t iteration, const parameter::ParameterStore& store);
  [[nodiscard]] bool active() const { return active_; }
  /// Observer for the model of micro-batch `index`, or null when nothing is collected.
  [[nodiscard]] const model::Observer* observer(std::int64_t micro_batch);
  void add_input(std::int64_t micro_batch, const std::string& name, const at::Tensor& value);
  void add_token_losses(std::int64_t micro_batch, const at::Tensor& value);
  void add_main_gradients(const parameter::ParameterStore& store);
  /// Collects weights and optimizer state after the step and writes the files.
  void finish_iteration(const parameter::ParameterStore& store, const optim::Optimizer& optimizer);

 private:
  [[nodiscard]] bool wants(const std::string& kind) const;
  void keep(std::string name, const at::Tensor& value);
  [[nodiscard]] std::string manifest(const parameter::ParameterStore& store) const;

  std::string directory_;
  std::vector<std::int64_t> iterations_;
  std::vector<std::string> content_;
  std::vector<std::pair<std::string, std::string>> arguments_;
  int rank_;
  int world_size_;
  bool active_ = false;
  std::int64_t iteration_ = 0;
  model::Observer observer_;
  std::vector<std::pair<std::string, at::Tensor>> tensors_;
  std::vector<std::pair<std::string, at::Tensor>> before_;  // weights at the start, for deltas
};

}  // namespace pgpt::training

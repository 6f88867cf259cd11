#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pgpt/config/config.h"
#include "pgpt/model/layers.h"

namespace pgpt::model {

/// One micro-batch on the model's device; [b,s] tensors are batch-major.
struct Batch {
  at::Tensor tokens;                    // [b,s] int64
  at::Tensor labels;                    // [T] int64
  at::Tensor position_ids;              // [b,s] int64
  at::Tensor loss_mask;                 // [T] fp32
  at::Tensor gradient_scale;            // [T] fp32: d(objective)/d(token loss), mask and every divisor included
  kernels::AttentionSegments segments;  // undefined = causal over each sample
  at::Tensor rope_positions;            // [b,s] int32, where rotary positions restart; undefined = index in the sample
};

/// What one forward pass yields.
struct LossSum {
  at::Tensor sum;           // fp32 scalar: sum of token losses times mask
  at::Tensor token_losses;  // [T] fp32
};

/// The dense GPT model of spec/model.md on one pipeline stage, with explicit forward and backward.
///
/// Order of life: `parameter_specs` -> ParameterStore -> GptModel (binds layers to parameters) -> `chain_uses` ->
/// WeightChain.
class GptModel {
 public:
  /// All parameters in registration order, with tensor-parallel-local shapes.
  [[nodiscard]] static std::vector<parameter::ParameterSpec> parameter_specs(const config::ModelConfig& model);

  GptModel(const config::ModelConfig& model, const config::TrainingConfig& training, parameter::ParameterStore& store,
           at::Device device);
  GptModel(const GptModel&) = delete;
  GptModel& operator=(const GptModel&) = delete;

  /// Every read of a matrix in the forward pass, in order; the model's layers refer to these positions.
  [[nodiscard]] const std::vector<gtp::UseSpec>& chain_uses() const { return uses_; }
  /// How many uses at the chain's end belong to the last `layers` layers and what follows them; all for all layers.
  [[nodiscard]] std::size_t uses_of_last(std::int64_t layers) const;

  /// Forward and backward of one micro-batch: main gradients receive d(sum of token losses * gradient_scale).
  [[nodiscard]] LossSum forward_backward(const StepContext& context, const Batch& batch);
  /// Forward only.
  [[nodiscard]] LossSum forward(const StepContext& context, const Batch& batch);

 private:
  /// Consecutive layers that are kept or recomputed together.
  struct Chunk {
    std::size_t begin = 0, end = 0;
    bool recompute = false;
  };
  struct ChunkSaved {
    std::vector<TransformerLayer::Saved> layers;
    at::Tensor input;       // [T,h], only when recomputed
    DropoutCursor dropout;  // at the chunk's start, only when recomputed
  };
  struct Saved {
    kernels::DropoutState embedding_dropout;
    std::vector<ChunkSaved> chunks;
    Norm::Saved final_norm;
    at::Tensor dlogits;  // [T,V]
    at::Tensor doutput;  // [T,h] gradient of the final norm's output, instead, with --logits-chunks
  };

  void build_layers(const config::TrainingConfig& training, parameter::ParameterStore& store);
  void plan_chunks(const config::TrainingConfig& training);
  [[nodiscard]] at::Tensor embed(const StepContext& context, const Batch& batch, Saved& saved) const;
  void embed_backward(const StepContext& context, const Batch& batch, const at::Tensor& gradient,
                      const Saved& saved) const;
  void run_chunk(const StepContext& context, const Chunk& chunk, ResidualStream& stream, const Batch& batch,
                 gtp::Pass pass, ChunkSaved& saved) const;
  /// Calls work(first token, count) for each part of `tokens` whose logits may exist at once.
  void for_each_part(std::int64_t tokens, const std::function<void(std::int64_t, std::int64_t)>& work) const;
  /// Token losses from the final norm's output y [T,h], part by part; forward only.
  [[nodiscard]] at::Tensor losses_in_parts(const StepContext& context, const Batch& batch, const at::Tensor& y) const;
  /// The same with both gradients of the output layer: y's is returned in `dy`, the weight's goes to the chain.
  [[nodiscard]] at::Tensor losses_and_gradients_in_parts(const StepContext& context, const Batch& batch,
                                                         const at::Tensor& y, at::Tensor& dy) const;
  [[nodiscard]] LossSum run_forward(const StepContext& context, const Batch& batch, bool with_gradient,
                                    Saved& saved) const;

  config::ModelConfig config_;
  std::int64_t logits_chunks_ = 1;
  parameter::Parameter* word_embeddings_ = nullptr;
  parameter::Parameter* position_embeddings_ = nullptr;  // null without a learned table
  std::vector<TransformerLayer> layers_;
  Norm final_norm_;
  Linear output_;
  std::vector<gtp::UseSpec> uses_;
  std::vector<Chunk> chunks_;
  std::unique_ptr<kernels::RopeTable> rope_;
};

}  // namespace pgpt::model

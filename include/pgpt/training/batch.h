#pragma once

#include "pgpt/data/loader.h"
#include "pgpt/model/gpt.h"

namespace pgpt::training {

/// Divisors of the loss of one micro-batch (spec/training.md 5).
struct LossScaling {
  bool per_token = false;  ///< no division here; gradients are divided by all tokens of the step at its end
  std::int64_t num_microbatches = 1;
  double loss_scale = 1.0;
};

/// Copies a micro-batch to the device, without a host wait, and works out each token's weight in the objective.
[[nodiscard]] model::Batch to_device(const data::MicroBatch& batch, const LossScaling& scaling, at::Device device);
/// The same into the tensors of an earlier batch of the same shape.
void to_device(const data::MicroBatch& batch, const LossScaling& scaling, model::Batch& into);

}  // namespace pgpt::training

#pragma once

#include <cstdint>
#include <string>

#include "pgpt/config/config.h"

namespace pgpt::config {

/// Floating-point operations of one training step over all ranks, forward and backward, by the reference's formula
/// (spec/training.md 11): GEMMs and attention products count, recompute, norms and softmax do not. `tokens` are the
/// real tokens of the step and `squared_lengths` the sum of the squared lengths of its documents; without packing they
/// are samples x sequence length and samples x sequence length^2. Quick GEGLU counts two matrices as the reference
/// does.
[[nodiscard]] double training_flops(const ModelConfig& model, double tokens, double squared_lengths);

/// The same for unpacked samples of `model.seq_length` tokens.
[[nodiscard]] double training_flops(const ModelConfig& model, std::int64_t samples);

/// TFLOP/s per GPU: flops / (seconds x 10^12 x ranks). 0 when no time passed.
[[nodiscard]] double tflops_per_gpu(double flops, double seconds, std::int64_t world_size);

/// One line that names the formula with this model's numbers, for the start of a run with --log-throughput.
[[nodiscard]] std::string describe_flops(const ModelConfig& model);

}  // namespace pgpt::config

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pgpt/config/config.h"

namespace pgpt::config {

/// What exists at one moment of a training step beside weights, optimizer state and buffers; bytes.
struct MemoryMoment {
  std::string name;        ///< what runs then, e.g. "backward of the output layer"
  double activations = 0;  ///< kept by layers for backward, batch and final norm included
  double logits = 0;       ///< logits or their gradient
  double work = 0;         ///< gradients of activations, and whole weight gradients in flight
  [[nodiscard]] double total() const { return activations + logits + work; }
};

/// Parameters and bytes of one rank; all ranks of a pipeline stage have the same. What counts is memory that tensors
/// occupy: the CUDA context, loaded kernels and NCCL's own buffers come on top.
struct RankEstimate {
  std::int64_t parameters = 0;  ///< held by the rank, alignment padding of GTP shards included
  std::int64_t weight_bytes = 0;
  std::int64_t gradient_bytes = 0;  ///< main gradients
  std::int64_t master_bytes = 0;    ///< fp32 copies of 16-bit weights
  std::int64_t moment_bytes = 0;    ///< m and v, or the momentum
  double buffer_bytes = 0;  ///< allocated once: GTP gather buffers, rotary tables, the matrix library's workspace
  std::vector<MemoryMoment> moments;  ///< those that can be the fullest of a training step; at least one

  [[nodiscard]] std::int64_t state_bytes() const { return weight_bytes + gradient_bytes + master_bytes + moment_bytes; }
  /// Held between steps.
  [[nodiscard]] double resident_bytes() const { return static_cast<double>(state_bytes()) + buffer_bytes; }
  [[nodiscard]] const MemoryMoment& fullest_moment() const;
  [[nodiscard]] double peak_bytes() const { return resident_bytes() + fullest_moment().total(); }
};

/// Sizes of the whole job.
struct Estimate {
  std::int64_t total_parameters = 0;  ///< of the model itself: no padding of shards, nothing counted twice
  std::vector<RankEstimate> stages;   ///< by pipeline rank
  double step_flops = 0;              ///< floating-point operations of one global batch (spec/training.md 11)
};

/// Computes the sizes. Throws ConfigError when `model.padded_vocab_size` is not known yet.
[[nodiscard]] Estimate estimate(const Config& config);

/// What the allocator of a rank counted.
struct MeasuredMemory {
  double resident_bytes = 0;  ///< after a step
  double peak_bytes = 0;      ///< highest so far
};

/// The memory of a rank as a table, one line a part; with `measured` a column beside the sums.
[[nodiscard]] std::vector<std::string> memory_table(const RankEstimate& rank,
                                                    const std::optional<MeasuredMemory>& measured = std::nullopt);

/// One way to recompute activations and what it needs.
struct RecomputeChoice {
  std::string options;  ///< the options that ask for it, empty for none
  RankEstimate rank;    ///< of the pipeline rank that needs most
};

/// The estimate of `config` with every recompute choice in turn, whatever its own is.
[[nodiscard]] std::vector<RecomputeChoice> estimate_recompute_choices(const Config& config);

/// What --dry-run prints: sizes, memory of a rank, mesh and groups.
[[nodiscard]] std::string describe_dry_run(const Config& config);

}  // namespace pgpt::config

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pgpt/config/config.h"

// What a run says before its first step (spec/training.md 10), as pure functions of the values.
namespace pgpt::training {

/// "> PyTorch version ................ V" and its two companions; `core` is what plays Megatron-Core's part here and
/// `engine` Transformer Engine's.
[[nodiscard]] std::vector<std::string> version_lines(const std::string& torch, const std::string& core,
                                                     const std::string& engine);

/// "[LABEL] datetime: <T> " with its trailing space; `time` as from timestamp().
[[nodiscard]] std::string datetime_line(const std::string& label, const std::string& time);

/// Labels of the datetime lines, in the order in which a run reaches them.
namespace label {
inline constexpr const char* kInitialized = "after megatron is initialized";
inline constexpr const char* kModelBuilt = "after model, optimizer, and learning rate scheduler are built";
inline constexpr const char* kDataBuilt = "after dataloaders are built";
inline constexpr const char* kBeforeTraining = "before the start of training step";
inline constexpr const char* kAfterTraining = "after training is done";
}  // namespace label

/// "> initialized tensor model parallel with size T" and the GTP and pipeline lines.
[[nodiscard]] std::vector<std::string> parallel_size_lines(const config::ParallelConfig& parallel);

/// " > number of parameters on (tensor, gtp_remat, pipeline) model parallel rank (t, g, p): N"; alignment padding
/// counts.
[[nodiscard]] std::string parameters_line(std::int64_t tensor_rank, std::int64_t gtp_rank, std::int64_t pipeline_rank,
                                          std::int64_t parameters);

/// "> setting random seeds to S ...".
[[nodiscard]] std::string seed_line(std::int64_t seed);

/// "time to initialize megatron (seconds): X".
[[nodiscard]] std::string initialization_time_line(double seconds);

/// "> learning rate decay style: cosine".
[[nodiscard]] std::string decay_style_line(config::LrDecayStyle style);

/// "setting training iterations to N", for runs counted in samples.
[[nodiscard]] std::string training_iterations_line(std::int64_t iterations);

/// The lines around building the data sets, before and after; validation without a count reads everything ("None").
[[nodiscard]] std::vector<std::string> dataset_lines(std::int64_t train, std::optional<std::int64_t> validation,
                                                     std::int64_t test);
inline constexpr const char* kDatasetsDone = "> finished creating GPT datasets ...";
inline constexpr const char* kSetupDone = "done with setup ...";
inline constexpr const char* kTrainingStarts = "training ...";
inline constexpr const char* kTrainingSkipped = "skipping training (--skip-train is on) ...";

/// "exiting program after receiving SIGTERM." and the two other reasons; each is a label of datetime_line.
[[nodiscard]] std::string exit_signal_label(const std::string& signal);
[[nodiscard]] std::string exit_duration_label(double minutes);
[[nodiscard]] std::string exit_iteration_label(std::int64_t iteration);

}  // namespace pgpt::training

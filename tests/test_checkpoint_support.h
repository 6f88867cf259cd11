#pragma once

// Small runs whose checkpoints the tests compare.

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "pgpt/checkpoint/shard.h"
#include "pgpt/training/training_log.h"
#include "support/text.h"

namespace pgpt::test {

/// A model of two layers on a small corpus, 8 iterations of 4 samples; later options win.
[[nodiscard]] const std::string& base_flags();
/// Four shards of its fc1 (144 rows) and QKV (96 rows) need padding.
inline constexpr const char* kPadded = "--hidden-size 32 --ffn-hidden-size 72 --num-attention-heads 4 --swiglu ";
[[nodiscard]] std::string gtp(int shards);

/// A folder that disappears with the object.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  [[nodiscard]] std::string path(const std::string& name) const { return (root_ / name).string(); }

 private:
  std::filesystem::path root_;
};

/// What a whole run left behind.
struct Outcome {
  std::vector<training::StepReport> steps;
  std::vector<std::string> evaluations;  ///< result lines
  std::vector<std::string> lines;        ///< everything that rank 0 printed
};

/// Runs `base + flags` on thread ranks, to its end.
[[nodiscard]] Outcome train(const std::string& flags, int ranks, const std::string& base = base_flags());
/// What went wrong in a run that must fail on all ranks: the message of the one that speaks, and the exit code.
struct Failure {
  std::string message;
  int code = 0;
};
[[nodiscard]] Failure train_fails(const std::string& flags, int ranks);

/// Every number that a step reports, time and memory aside, is equal in bits.
void require_same_steps(const std::vector<training::StepReport>& actual,
                        const std::vector<training::StepReport>& expected);
/// `steps` from `first` on.
[[nodiscard]] std::vector<training::StepReport> tail(const std::vector<training::StepReport>& steps, std::size_t first);
/// Same tensors with the same bytes, and the same state beside them.
void require_same_checkpoints(const std::string& a, const std::string& b);
/// ROOT/iter_NNNNNNN.
[[nodiscard]] std::string iteration_path(const std::string& root, std::int64_t iteration);
/// A number from the environment, for longer runs than CI's.
[[nodiscard]] int trials(const char* variable, int fallback);

}  // namespace pgpt::test

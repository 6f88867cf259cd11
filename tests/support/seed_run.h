#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/text.h"

/// The published comparison (README): its command, its figures, and the metrics files of our runs of it.
namespace pgpt::test {

/// The published command with GTP 2; a later occurrence of an option wins, so cases append theirs.
inline constexpr const char* kSeedFlags =
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 128 --num-layers 2 --hidden-size 128 --ffn-hidden-size "
    "256 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size "
    "2 --train-iters 3 --eval-interval 100 --eval-iters 0 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 1 --lr-decay-iters "
    "3 --lr-decay-style cosine --weight-decay 0.01 --weight-decay-incr-style constant --clip-grad 1.0 --bf16 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion --attention-dropout "
    "0 --hidden-dropout 0 --attention-softmax-in-fp32 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    "--tensor-parallel-num-weight-shards 2 --seed 1234 --log-interval 1 --dataloader-type single --num-workers 0";

/// What a run may differ from the published figures by: losses of steps 1 and 2, and of step 3.
struct SeedTolerance {
  double early_losses, last_loss;
};

/// A fresh folder for one test; its name holds the process id.
[[nodiscard]] std::filesystem::path scratch_folder(const std::string& name);
/// The step objects of a metrics file.
[[nodiscard]] std::vector<nlohmann::json> read_steps(const std::filesystem::path& metrics);
/// Checks losses, grad norms, rates and samples of the published run (Catch2 assertions).
void check_published(const std::vector<nlohmann::json>& steps, SeedTolerance tolerance);

}  // namespace pgpt::test

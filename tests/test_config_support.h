#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pgpt/base/error.h"
#include "pgpt/config/parse.h"
#include "support/text.h"

namespace test_config {

using pgpt::test::contains;
using pgpt::test::split_words;

/// The command of the published comparison, which must parse unchanged.
inline const std::string kSeedCommand =
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 128 --num-layers 2 --hidden-size 128 --ffn-hidden-size "
    "256 "
    "--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 2 "
    "--train-iters 3 --eval-interval 100 --eval-iters 0 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 1 --lr-decay-iters 3 "
    "--lr-decay-style cosine --weight-decay 0.01 --weight-decay-incr-style constant --clip-grad 1.0 --bf16 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion --attention-dropout "
    "0 "
    "--hidden-dropout 0 --attention-softmax-in-fp32 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    "--tensor-parallel-num-weight-shards 2 --seed 1234 --log-interval 1 --dataloader-type single --num-workers 0";

/// The smallest command that runs on one rank; without lengths of the run or a learning rate.
inline const std::string kTinyModel =
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 128 --num-layers 4 --hidden-size 64 --num-attention-heads "
    "4 "
    "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 ";
inline const std::string kTiny = kTinyModel + "--train-iters 10 --lr 1e-3 ";

inline pgpt::config::ParsedCommand parse_words(const std::vector<std::string>& arguments, std::int64_t world = 1) {
  pgpt::config::ParseContext context;
  context.world_size = world;
  return pgpt::config::parse_command_line(arguments, context);
}

inline pgpt::config::ParsedCommand parse(const std::string& command, std::int64_t world = 1) {
  return parse_words(split_words(command), world);
}

/// The configuration of a command, also of one that can only be dry-run.
inline pgpt::config::Config config_of(const std::string& command, std::int64_t world = 1) {
  return parse(command + " --dry-run", world).config;
}

/// The error that a command ends with; empty when it is accepted. Every error must ask for exit code 2.
inline std::string error_of(const std::string& command, std::int64_t world = 1) {
  try {
    (void)parse(command, world);
  } catch (const pgpt::Error& error) {
    return static_cast<int>(error.code()) == 2 ? error.what() : "wrong exit code: " + std::string(error.what());
  }
  return "";
}

/// A rule: options that break it, and what the message must say.
struct Rule {
  std::string flags;
  std::string message;
  std::int64_t world = 1;
};

}  // namespace test_config

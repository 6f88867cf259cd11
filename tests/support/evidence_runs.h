#pragma once

// Small training runs that leave evidence behind, for the tests of evidence and comparison.

#include <ATen/ATen.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "pgpt/checkpoint/safetensors.h"
#include "support/temporary_folder.h"
#include "support/thread_ranks.h"

namespace pgpt::test {

/// The published two-rank comparison without its GTP degree (spec: "Command that must parse unchanged").
inline const std::string kSeedFlags =
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 128 --num-layers 2 --hidden-size 128 --ffn-hidden-size "
    "256 "
    "--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 2 "
    "--train-iters 3 "
    "--eval-interval 100 --eval-iters 0 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 1 --lr-decay-iters 3 "
    "--lr-decay-style cosine "
    "--weight-decay 0.01 --weight-decay-incr-style constant --clip-grad 1.0 --bf16 --disable-bias-linear "
    "--untie-embeddings-and-output-weights --no-gradient-accumulation-fusion --attention-dropout 0 --hidden-dropout 0 "
    "--attention-softmax-in-fp32 --seed 1234 --log-interval 1 --dataloader-type single --num-workers 0 ";
inline const std::string kGtp2 = "--tensor-parallel-num-weight-shards 2 ";
inline const std::string kInvariant = "--weight-init layout-invariant ";

/// A small model whose row counts need padding at GTP 2 (vocabulary 128 of 100, ffn 40, hidden 24).
inline const std::string kSmallFlags =
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --num-layers 2 --hidden-size 24 --ffn-hidden-size 40 "
    "--num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --train-iters 2 "
    "--eval-interval 100 "
    "--eval-iters 0 --lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0 "
    "--seed 7 "
    "--log-interval 1 --dataloader-type single --num-workers 0 ";

/// Everything a run ends with, bit by bit.
struct Bits {
  std::vector<double> losses, norms;  // of the last rank
  std::vector<at::Tensor> weights;    // flat, one a rank
  std::vector<at::Tensor> state;      // optimizer, all ranks
};
inline Bits train(const std::string& flags, int ranks) {
  Bits bits;
  std::vector<std::vector<at::Tensor>> weights(static_cast<std::size_t>(ranks)), state(static_cast<std::size_t>(ranks));
  const auto results = run_ranks(parse(flags, ranks), ranks, [&](int rank, training::Trainer& trainer) {
    trainer.run();
    weights[static_cast<std::size_t>(rank)].push_back(trainer.store().weights().clone());
    for (const auto& [name, tensor] : trainer.optimizer().state())
      state[static_cast<std::size_t>(rank)].push_back(tensor.clone());
  });
  for (const training::StepReport& step : results.back().steps) {
    bits.losses.push_back(step.losses[0].second);
    bits.norms.push_back(*step.grad_norm);
  }
  for (const auto& of_rank : weights) bits.weights.insert(bits.weights.end(), of_rank.begin(), of_rank.end());
  for (const auto& of_rank : state) bits.state.insert(bits.state.end(), of_rank.begin(), of_rank.end());
  return bits;
}
inline bool equal_tensors(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!a[i].equal(b[i])) return false;
  }
  return true;
}
inline bool operator==(const Bits& a, const Bits& b) {
  return a.losses == b.losses && a.norms == b.norms && equal_tensors(a.weights, b.weights) &&
         equal_tensors(a.state, b.state);
}

/// Rewrites one tensor of a safetensors file with one bit of one element flipped; manifest and other tensors stay.
inline void flip_bit(const std::string& path, const std::string& name, std::int64_t element, int bit) {
  const checkpoint::SafetensorsFile file(path);
  checkpoint::NamedTensors tensors;
  for (const auto& [tensor, entry] : file.entries()) {
    tensors.emplace_back(tensor, file.read(tensor));
    if (tensor != name) continue;
    at::Tensor& value = tensors.back().second;
    auto* bytes =
        static_cast<std::uint8_t*>(value.data_ptr()) + element * static_cast<std::int64_t>(value.element_size());
    bytes[bit / 8] = static_cast<std::uint8_t>(bytes[bit / 8] ^ (1U << (bit % 8)));
  }
  checkpoint::write_safetensors(path, tensors, file.metadata());
}

}  // namespace pgpt::test

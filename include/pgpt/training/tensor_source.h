#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "pgpt/checkpoint/safetensors.h"
#include "pgpt/parameter/shard_layout.h"

namespace pgpt::training {

/// Parts of a step in the order in which it computes them.
enum class Phase { kInput, kForward, kBackward, kMainGradient, kOptimizer };

/// Names one tensor of a step independently of the layout that computed it.
struct TensorKey {
  std::int64_t iteration = 0;  ///< 0 = initial weights
  Phase phase = Phase::kInput;
  std::int64_t position = 0;  ///< place inside the phase, from the name
  std::int64_t sample = -1;   ///< first sample of the global batch that it belongs to, or -1
  std::int64_t samples = 0;   ///< number of samples that share it (gradients of a micro-batch), or 0
  std::string kind;           ///< "logits", "main_grad", ...
  std::string name;           ///< parameter or activation; empty where the kind says all

  auto order() const { return std::tie(iteration, phase, position, kind, name, sample, samples); }
  bool operator<(const TensorKey& other) const { return order() < other.order(); }
  bool operator==(const TensorKey& other) const { return order() == other.order(); }
  /// "iteration 1, sample 0: main_grad.output_layer.weight".
  [[nodiscard]] std::string text() const;
  /// Kind and name alone: "main_grad.output_layer.weight".
  [[nodiscard]] std::string label() const;
};

/// Builds the key of a tensor of that kind and name; phase and position follow from them.
[[nodiscard]] TensorKey make_key(std::int64_t iteration, const std::string& kind, const std::string& name,
                                 std::int64_t sample = -1, std::int64_t samples = 0);

/// A tensor put together from the files of all ranks.
struct Assembled {
  at::Tensor tensor;     ///< logical shape, host memory, padding dropped
  double scale = 1.0;    ///< factor that makes gradients independent of the number of micro-batches and the loss scale
  std::string conflict;  ///< not empty: copies that must be equal are not, and which
};

/// Tensors of a run on disk: an evidence directory (all its ranks and iterations), or one safetensors file.
///
/// Plain files use the names iterN.rankR.tokens|labels|loss_mask|token_losses|logits|grad.NAME,
/// iterN.main_grad|clipped_main_grad|param|param_after|delta|fp32_param|master|exp_avg|exp_avg_sq.NAME, the latter also
/// with "final" for the last iteration of the file, and NAME alone for initial weights.
class TensorSource {
 public:
  /// Opens an evidence directory or a .safetensors file. `final_iteration` is what "final" means in a plain file that
  /// names no iteration. Throws DataError for missing or incomplete files.
  TensorSource(const std::string& path, std::optional<std::int64_t> final_iteration);

  [[nodiscard]] std::vector<TensorKey> keys() const;
  [[nodiscard]] bool contains(const TensorKey& key) const { return items_.count(key) != 0; }
  /// Reads and assembles one tensor. Throws DataError when the files do not make it whole.
  [[nodiscard]] Assembled read(const TensorKey& key) const;
  /// The rank whose file holds the element at these coordinates, where one rank alone does.
  [[nodiscard]] std::optional<int> owner(const TensorKey& key, const std::vector<std::int64_t>& coordinates) const;
  /// Weights before the first step, by parameter name, where the source knows them (undefined otherwise).
  [[nodiscard]] at::Tensor initial(const std::string& name) const;
  /// Renames the samples of an iteration: `order[s]` is the new number of sample s.
  void renumber_samples(std::int64_t iteration, const std::map<std::int64_t, std::int64_t>& order);

  /// The iteration of a source that was opened as one folder iter_NNNNNNN, else none.
  [[nodiscard]] const std::optional<std::int64_t>& single_iteration() const { return single_iteration_; }
  /// Takes such a source for another iteration, so that two iterations of one run can be compared.
  void renumber_iteration(std::int64_t iteration);

  [[nodiscard]] const std::string& path() const { return path_; }
  /// "GTP 2, data-parallel 2, 1 micro-batch of 1, BFloat16" or "plain safetensors".
  [[nodiscard]] const std::string& description() const { return description_; }
  /// Whether weights or activations are 16-bit floats, which sets the bounds that apply.
  [[nodiscard]] bool low_precision() const { return low_precision_; }
  /// Things the reader should know, e.g. checksums that do not fit.
  [[nodiscard]] const std::vector<std::string>& notes() const { return notes_; }

 private:
  /// One rank's part of a tensor.
  struct Piece {
    std::size_t file = 0;
    std::string tensor;
    int rank = 0;
    std::optional<parameter::ShardLayout> layout;  ///< none: the whole
    std::int64_t part = 0, parts = 1;              ///< sample `part` of `parts` in the first dimension
    std::int64_t column_part = 0;                  ///< tensor-parallel part of the last dimension
  };
  struct Item {
    std::vector<Piece> pieces;
    std::int64_t column_parts = 1;
    double scale = 1.0;
  };

  void open_evidence();
  void open_rank(const std::string& stem, std::int64_t iteration, int rank);
  void open_plain(std::optional<std::int64_t> final_iteration);
  [[nodiscard]] at::Tensor read_piece(const Piece& piece) const;

  std::string path_;
  std::string description_;
  bool low_precision_ = false;
  std::optional<std::int64_t> single_iteration_;
  std::vector<std::unique_ptr<checkpoint::SafetensorsFile>> files_;
  std::vector<std::map<std::string, std::string>>
      checksums_;  // per file: tensor -> CRC-32 as written, empty for plain files
  std::map<TensorKey, Item> items_;
  mutable std::vector<std::string> notes_;
};

}  // namespace pgpt::training

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pgpt/checkpoint/safetensors.h"
#include "pgpt/config/config.h"

// Models in the folder layout of the transformers library: config.json and safetensors files (docs/conversion.md).
namespace pgpt::checkpoint {

/// Architectures that have a counterpart here.
enum class HfFamily { kGpt2, kLlama, kMistral, kQwen2, kQwen3 };
/// The `model_type` of config.json, e.g. "llama".
[[nodiscard]] std::string family_name(HfFamily family);
/// Throws ConfigError listing the known names.
[[nodiscard]] HfFamily family_named(const std::string& name, const std::string& where);

/// Ids of special tokens, as far as they are known.
struct SpecialTokens {
  std::optional<std::int64_t> begin, end, pad;
};

/// What a config.json says.
struct HfConfig {
  HfFamily family = HfFamily::kLlama;
  config::ModelConfig model;                   ///< architecture; padded_vocab_size = vocab_size
  std::optional<std::int64_t> sliding_window;  ///< longest sequence for which its attention is the causal one here
};

/// Reads FOLDER/config.json. Throws DataError naming what has no counterpart here, with its value.
[[nodiscard]] HfConfig read_hf_config(const std::filesystem::path& folder);

/// The family that a model fits; `wanted` (may be empty) chooses where several do. Throws ConfigError with the reason
/// where none does.
[[nodiscard]] HfFamily choose_family(const config::ModelConfig& model, const std::string& wanted);
/// The text of config.json for `vocab_size` rows of vocabulary.
[[nodiscard]] std::string hf_config_text(HfFamily family, const config::ModelConfig& model, std::int64_t vocab_size,
                                         at::ScalarType dtype, const SpecialTokens& tokens);
/// The text of generation_config.json.
[[nodiscard]] std::string hf_generation_text(const SpecialTokens& tokens);

/// How a tensor here and its counterparts there hold the same numbers (spec/checkpoint.md 6).
struct HfLink {
  enum class Kind {
    kSame,
    kVocabulary,  ///< padding rows are cut there, zero here
    kGateUp,      ///< two: the halves of the rows
    kQkv,         ///< three: query groups taken apart
    kTransposed,  ///< [in, out] there
    kFusedQkv,    ///< [in, Q|K|V] there (a bias: [Q|K|V])
  };
  Kind kind = Kind::kSame;
  std::string native;
  std::vector<std::int64_t> native_shape;
  std::vector<std::string> names;                 ///< there
  std::vector<std::vector<std::int64_t>> shapes;  ///< there
};

/// All tensors of a model, in the order of its layers. `vocab_size` rows of vocabulary are kept there.
[[nodiscard]] std::vector<HfLink> hf_links(HfFamily family, const config::ModelConfig& model, std::int64_t vocab_size);
/// The counterparts of one tensor, contiguous. `native` has the shape that the link names.
[[nodiscard]] std::vector<at::Tensor> to_hf(const HfLink& link, const at::Tensor& native,
                                            const config::ModelConfig& model);
/// The tensor whose counterparts these are.
[[nodiscard]] at::Tensor from_hf(const HfLink& link, const std::vector<at::Tensor>& parts,
                                 const config::ModelConfig& model);

/// The weights of a folder: one safetensors file, or several with an index.
class HfWeights {
 public:
  /// Opens the files. Throws DataError naming what is missing.
  explicit HfWeights(const std::filesystem::path& folder);

  /// Throws DataError unless these are the weights of `links`: a missing tensor, one of another shape, or one that the
  /// model does not have.
  void check(const std::vector<HfLink>& links, HfFamily family, const config::ModelConfig& model) const;
  /// One tensor in new host memory, whatever prefix the files give its name.
  [[nodiscard]] at::Tensor read(const std::string& name) const;
  /// The type of most of the values.
  [[nodiscard]] at::ScalarType dtype() const;
  /// The tensor here that a link's counterparts make.
  [[nodiscard]] at::Tensor read_native(const HfLink& link, const config::ModelConfig& model) const;

 private:
  struct Place {
    std::string file, stored_name;
  };
  [[nodiscard]] const Place* find(const std::string& name) const;

  std::filesystem::path folder_;
  std::map<std::string, std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Place> places_;  ///< by the name in the files
};

/// Writes the weights as safetensors files of at most `shard_bytes` each (a larger tensor is alone in its file), with
/// an index when there is more than one; holds one file's tensors in memory. `read` yields the tensor here with that
/// name. Returns the number of files.
std::size_t write_hf_weights(const std::filesystem::path& folder, const std::vector<HfLink>& links,
                             const config::ModelConfig& model, at::ScalarType dtype, std::uint64_t shard_bytes,
                             const std::function<at::Tensor(const std::string&)>& read);

}  // namespace pgpt::checkpoint

#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "pgpt/checkpoint/manifest.h"
#include "pgpt/config/config.h"

// What exporting and importing share.
namespace pgpt::training {

/// A folder that appears whole or not at all: written under a hidden name beside it, removed unless published.
class NewFolder {
 public:
  /// Throws DataError when `target` exists with something in it, or cannot be made. `command` begins the messages.
  NewFolder(const std::string& command, const std::filesystem::path& target);
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;
  ~NewFolder();
  [[nodiscard]] const std::filesystem::path& path() const { return partial_; }
  /// Gives the folder its name, durably.
  void publish();

 private:
  std::filesystem::path target_, partial_;
  bool published_ = false;
};

/// "float32", "bfloat16" or "float16"; throws ConfigError for other names.
[[nodiscard]] at::ScalarType weight_type(const std::string& command, const std::string& name);

/// The whole file. Throws DataError.
[[nodiscard]] std::string read_text(const std::filesystem::path& path);

/// A tensor of a model that is imported, read when it is needed.
struct ImportedTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  std::function<at::Tensor()> read;
};

/// Writes a checkpoint of the tensors, each in its own type, under ROOT, with its tracker: ROOT/release, or with
/// `iteration` that of `manifest`, whose files and tensors are filled. Throws DataError when ROOT holds a checkpoint
/// already.
enum class ImportKind { kRelease, kIteration };
void write_imported(const std::filesystem::path& root, checkpoint::Manifest manifest,
                    const std::vector<ImportedTensor>& tensors, ImportKind kind);

/// A model of another program, opened.
struct ImportedModel {
  config::ModelConfig model;
  at::ScalarType dtype;
  std::vector<ImportedTensor> tensors;
};
/// Opens a GPT-2 model file of llm.c. The vocabulary is padded to a multiple of `divisor` rows. Throws DataError.
[[nodiscard]] ImportedModel open_llmc(const std::filesystem::path& path, std::int64_t divisor,
                                      config::TransformerImpl implementation);

}  // namespace pgpt::training

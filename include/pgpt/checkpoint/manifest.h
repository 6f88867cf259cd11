#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace pgpt::checkpoint {

/// A part of a tensor in one file: a box of the whole, row-major and contiguous there.
struct Piece {
  std::string file;                      ///< in the checkpoint's folder
  std::string key;                       ///< name in that safetensors file
  std::vector<std::int64_t> offset;      ///< of the box in the whole tensor
  std::vector<std::int64_t> shape;       ///< of the box
  std::vector<std::uint32_t> checksums;  ///< CRC-32C of each block of Manifest::block_bytes bytes
};

/// A whole tensor: its logical shape (no padding) and the pieces that cover it exactly.
struct TensorEntry {
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> shape;
  std::vector<Piece> pieces;
};

/// Size and header checksum of a file, so that truncation and damage are found before anything is read.
struct FileEntry {
  std::uint64_t bytes = 0;
  std::uint32_t header_checksum = 0;
};

/// Degrees of the run that saved.
struct Layout {
  std::int64_t world_size = 1, tensor = 1, pipeline = 1, context = 1, gtp = 1, replicate_data = 1;
  bool gtp_padding = false;  ///< NAME.gtp_padding tensors hold the random padding rows of GTP shards
};

/// Named values in a fixed order; what a schedule stores.
using StateList = std::vector<std::pair<std::string, std::variant<std::int64_t, double, std::string>>>;

struct ScalerState {
  double scale = 1;
  std::int64_t good_steps = 0, hysteresis = 0;
};

/// Positions of the random streams; seeds follow from --seed and a rank's coordinates.
struct RandomState {
  std::int64_t seed = 0;
  std::uint64_t hidden_dropout_offset = 0, attention_dropout_offset = 0;
};

/// Everything of a run that is no tensor. What is absent was left out with --no-save-optim or --no-save-rng.
struct RunState {
  std::int64_t iteration = 0;
  std::int64_t consumed_samples = 0, skipped_samples = 0, consumed_valid_samples = 0;
  double floating_point_operations = 0;
  std::string optimizer;  ///< "adam" or "sgd"; empty without optimizer state
  std::int64_t optimizer_steps = 0;
  StateList scheduler;
  std::optional<ScalerState> scaler;
  std::optional<RandomState> random;
};

/// The table of contents of a checkpoint.
struct Manifest {
  std::string program;  ///< what wrote it, with its version
  std::string libtorch;
  RunState state;
  Layout layout;
  std::map<std::string, std::string> arguments;  ///< the argument dump of the run that saved
  std::uint64_t block_bytes = 0;
  std::map<std::string, FileEntry> files;
  std::map<std::string, TensorEntry> tensors;

  /// Logical bytes of all tensors.
  [[nodiscard]] std::uint64_t tensor_bytes() const;
};

inline constexpr const char* kManifestName = "manifest.json";

/// Throws DataError naming the tensor whose pieces leave a hole, overlap, or name a file that is not listed.
void check_coverage(const Manifest& manifest, const std::string& where);

/// The text of manifest.json, with a checksum of itself.
[[nodiscard]] std::string manifest_text(const Manifest& manifest);
/// The manifest that a text describes, with or without a checksum of itself, which is not looked at; converters write
/// such texts. Throws DataError naming `where`.
[[nodiscard]] Manifest parse_manifest(const std::string& text, const std::string& where);
/// Reads and checks DIRECTORY/manifest.json. Throws DataError naming path and cause.
[[nodiscard]] Manifest read_manifest(const std::filesystem::path& directory);

/// "[8, 16]".
[[nodiscard]] std::string shape_text(const std::vector<std::int64_t>& shape);
[[nodiscard]] std::int64_t num_elements(const std::vector<std::int64_t>& shape);

}  // namespace pgpt::checkpoint

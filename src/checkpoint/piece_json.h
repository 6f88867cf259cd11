#pragma once

#include <nlohmann/json.hpp>

#include "pgpt/checkpoint/manifest.h"

// Pieces and files as JSON: in manifests, and between the ranks of a save.
namespace pgpt::checkpoint {

[[nodiscard]] nlohmann::ordered_json to_json(const FileEntry& file);
[[nodiscard]] nlohmann::ordered_json to_json(const TensorEntry& tensor);
/// Throw nlohmann's exceptions, or DataError for unknown types.
[[nodiscard]] FileEntry file_from_json(const nlohmann::ordered_json& json);
[[nodiscard]] TensorEntry tensor_from_json(const nlohmann::ordered_json& json);

}  // namespace pgpt::checkpoint

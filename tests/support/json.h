#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "support/text.h"

// Files of JSON; both throw for a file that is missing or malformed.
namespace pgpt::test {

/// A file with one JSON value.
inline nlohmann::json read_json(const std::filesystem::path& path) { return nlohmann::json::parse(read_text(path)); }

/// A file with one JSON value a line.
inline std::vector<nlohmann::json> read_json_lines(const std::filesystem::path& path) {
  std::vector<nlohmann::json> values;
  for (const std::string& line : read_lines(path)) values.push_back(nlohmann::json::parse(line));
  return values;
}

}  // namespace pgpt::test

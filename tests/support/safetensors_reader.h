#pragma once

// Reads whole safetensors files: 8 bytes of header length, a JSON header, raw little-endian data. No torch.

#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace pgpt::test {

/// One tensor as the file has it: dtype as in the file ("BF16", "F32", ...), shape, raw bytes.
struct StoredTensor {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::vector<char> bytes;
};

/// All tensors of a file by name; throws std::runtime_error when the file is missing or cut short.
inline std::map<std::string, StoredTensor> read_safetensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::uint64_t length = 0;
  file.read(reinterpret_cast<char*>(&length), sizeof(length));
  if (!file || length > (std::uint64_t{1} << 30)) throw std::runtime_error(path + ": no safetensors file");
  std::string header(length, '\0');
  file.read(header.data(), static_cast<std::streamsize>(length));
  const std::streamoff data = file.tellg();
  std::map<std::string, StoredTensor> tensors;
  const nlohmann::json entries = nlohmann::json::parse(header);
  for (const auto& [name, entry] : entries.items()) {
    if (name == "__metadata__") continue;
    const auto begin = entry.at("data_offsets").at(0).get<std::int64_t>(),
               end = entry.at("data_offsets").at(1).get<std::int64_t>();
    StoredTensor& tensor = tensors[name];
    tensor.dtype = entry.at("dtype").get<std::string>();
    tensor.shape = entry.at("shape").get<std::vector<std::int64_t>>();
    tensor.bytes.resize(static_cast<std::size_t>(end - begin));
    file.seekg(data + begin);
    file.read(tensor.bytes.data(), end - begin);
    if (!file) throw std::runtime_error(path + ": " + name + " is cut short");
  }
  return tensors;
}

}  // namespace pgpt::test

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace pgpt::checkpoint {

/// The format's name of a type, e.g. "BF16". Throws std::logic_error for types it does not know.
[[nodiscard]] std::string dtype_name(at::ScalarType dtype);
/// The type with that name, if there is one.
[[nodiscard]] std::optional<at::ScalarType> dtype_named(const std::string& name);

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Writes tensors (any device, copied to host one at a time) to a safetensors file that appears whole or not at all:
/// temporary file in the same folder, fsync, rename. Throws DataError naming path and cause (a full disk, for example)
/// and leaves no partial file.
void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {});

/// A safetensors file opened for reading; the header is checked against the file's size.
class SafetensorsFile {
 public:
  /// Throws DataError naming path, offset and what is wrong.
  explicit SafetensorsFile(const std::string& path);

  struct Entry {
    at::ScalarType dtype = at::kFloat;
    std::vector<std::int64_t> shape;
    std::uint64_t begin = 0, end = 0;  ///< byte range in the data section
  };
  [[nodiscard]] const std::map<std::string, Entry>& entries() const { return entries_; }
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const { return metadata_; }
  [[nodiscard]] bool contains(const std::string& name) const { return entries_.count(name) != 0; }
  /// First byte of the data section in the file.
  [[nodiscard]] std::uint64_t data_offset() const { return data_offset_; }
  /// Reads one tensor into new host memory. Throws DataError when the name is unknown or the file ends early.
  [[nodiscard]] at::Tensor read(const std::string& name) const;

 private:
  std::string path_;
  std::uint64_t data_offset_ = 0;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

/// Writes text to a file that appears whole or not at all, like write_safetensors.
void write_text_atomically(const std::string& path, const std::string& text);

}  // namespace pgpt::checkpoint

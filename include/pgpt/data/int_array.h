#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace pgpt::data {

/// A regular file mapped read-only; unmapped when the last owner goes.
class MappedFile {
 public:
  /// Throws DataError naming the path when it is absent, not a regular file or not readable.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] std::span<const std::byte> bytes() const { return {data_, size_}; }
  /// Modification time in nanoseconds since the epoch.
  [[nodiscard]] std::int64_t modified_ns() const { return modified_ns_; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  std::int64_t modified_ns_ = 0;
};

/// Element types of index arrays, as .npy files name them.
enum class IntType { kInt16, kInt32, kUint32, kInt64 };
[[nodiscard]] std::size_t bytes_of(IntType type);

/// One- or two-column integer array, either owned or a view into a mapped .npy file. Copies share the elements, which
/// are constant once the array was handed out.
class IntArray {
 public:
  IntArray() = default;
  /// Zeroed array of `rows` rows and `columns` columns (1 = one-dimensional).
  IntArray(IntType type, std::int64_t rows, std::int64_t columns = 1);

  /// Maps a version 1.0, C-order .npy file; throws DataError when it is not one.
  [[nodiscard]] static IntArray map_npy(const std::string& path);
  /// The header of this array's .npy file; bytes() follow it.
  [[nodiscard]] std::string npy_header() const;

  [[nodiscard]] IntType type() const { return type_; }
  [[nodiscard]] std::int64_t rows() const { return rows_; }
  [[nodiscard]] std::int64_t columns() const { return columns_; }
  [[nodiscard]] std::span<const std::byte> bytes() const {
    return {data_, static_cast<std::size_t>(rows_ * columns_) * bytes_of(type_)};
  }
  /// Element at flat (row-major) position `i`, not range-checked.
  [[nodiscard]] std::int64_t operator[](std::int64_t i) const;
  [[nodiscard]] std::int64_t at(std::int64_t row, std::int64_t column) const {
    return (*this)[row * columns_ + column];
  }

  /// Elements of an owned array, for filling it; T must match type().
  template <class T>
  [[nodiscard]] std::span<T> fill() {
    return {reinterpret_cast<T*>(owned_), static_cast<std::size_t>(rows_ * columns_)};
  }

 private:
  IntType type_ = IntType::kInt32;
  std::int64_t rows_ = 0;
  std::int64_t columns_ = 1;
  std::shared_ptr<const void> owner_;
  std::byte* owned_ = nullptr;
  const std::byte* data_ = nullptr;
};

}  // namespace pgpt::data

#include "pgpt/data/int_array.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <string_view>

#include "pgpt/base/error.h"

namespace pgpt::data {
namespace {

struct TypeName {
  IntType type;
  std::string_view npy;
};
constexpr std::array<TypeName, 4> kTypeNames = {
    {{IntType::kInt16, "<i2"}, {IntType::kInt32, "<i4"}, {IntType::kUint32, "<u4"}, {IntType::kInt64, "<i8"}}};

constexpr std::size_t kNpyPrefix = 10;  // magic, version, header length

template <class T>
std::int64_t load(const std::byte* data, std::int64_t i) {
  T value;
  std::memcpy(&value, data + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
  return value;
}

/// Text between `key` and the next of `stop`, or empty.
std::string_view field(std::string_view header, std::string_view key, char stop) {
  const auto begin = header.find(key);
  if (begin == std::string_view::npos) return {};
  const auto end = header.find(stop, begin + key.size());
  return end == std::string_view::npos ? std::string_view{}
                                       : header.substr(begin + key.size(), end - begin - key.size());
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  PGPT_CHECK(DataError, fd >= 0, "cannot open ", path, ": ", std::strerror(errno));
  struct stat info{};
  const bool known = ::fstat(fd, &info) == 0;
  const int error = errno;
  if (!known || !S_ISREG(info.st_mode)) {
    ::close(fd);
    throw DataError(concat("cannot read ", path, ": ", known ? "not a regular file" : std::strerror(error)));
  }
  size_ = static_cast<std::size_t>(info.st_size);
  modified_ns_ = static_cast<std::int64_t>(info.st_mtim.tv_sec) * 1000000000 + info.st_mtim.tv_nsec;
  if (size_ > 0) {
    void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
    const int map_error = errno;
    if (mapped == MAP_FAILED) {
      ::close(fd);
      throw DataError(concat("cannot map ", path, " (", size_, " bytes): ", std::strerror(map_error)));
    }
    data_ = static_cast<const std::byte*>(mapped);
  }
  ::close(fd);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

std::size_t bytes_of(IntType type) {
  switch (type) {
    case IntType::kInt16:
      return 2;
    case IntType::kInt64:
      return 8;
    default:
      return 4;
  }
}

IntArray::IntArray(IntType type, std::int64_t rows, std::int64_t columns)
    : type_(type), rows_(rows), columns_(columns) {
  const std::size_t size = static_cast<std::size_t>(rows * columns) * bytes_of(type);
  const std::shared_ptr<std::byte[]> storage(new std::byte[size > 0 ? size : 1]());
  owned_ = storage.get();
  data_ = owned_;
  owner_ = storage;
}

std::int64_t IntArray::operator[](std::int64_t i) const {
  switch (type_) {
    case IntType::kInt16:
      return load<std::int16_t>(data_, i);
    case IntType::kInt32:
      return load<std::int32_t>(data_, i);
    case IntType::kUint32:
      return load<std::uint32_t>(data_, i);
    default:
      return load<std::int64_t>(data_, i);
  }
}

std::string IntArray::npy_header() const {
  std::string text = "{'descr': '";
  for (const auto& name : kTypeNames) {
    if (name.type == type_) text += name.npy;
  }
  text += "', 'fortran_order': False, 'shape': (" + std::to_string(rows_) + ",";
  if (columns_ != 1) text += " " + std::to_string(columns_);
  text += "), }";
  // numpy pads with blanks so that the data starts at a multiple of 64; the line feed ends the header.
  while ((kNpyPrefix + text.size() + 1) % 64 != 0) text += ' ';
  text += '\n';
  std::string header("\x93NUMPY\x01\x00", 8);
  header += static_cast<char>(text.size() & 0xFFU);
  header += static_cast<char>(text.size() >> 8);
  return header + text;
}

IntArray IntArray::map_npy(const std::string& path) {
  auto file = std::make_shared<const MappedFile>(path);
  const std::string_view all(reinterpret_cast<const char*>(file->bytes().data()), file->bytes().size());
  PGPT_CHECK(DataError, all.size() >= kNpyPrefix && all.substr(0, 8) == std::string_view("\x93NUMPY\x01\x00", 8), path,
             " is not a version 1.0 .npy file");
  const std::size_t length =
      static_cast<unsigned char>(all[8]) + 256U * static_cast<std::size_t>(static_cast<unsigned char>(all[9]));
  PGPT_CHECK(DataError, all.size() >= kNpyPrefix + length, path, ": the .npy header is truncated");
  const std::string_view header = all.substr(kNpyPrefix, length);

  IntArray array;
  bool known = false;
  for (const auto& name : kTypeNames) {
    if (field(header, "'descr': '", '\'') == name.npy) array.type_ = name.type, known = true;
  }
  PGPT_CHECK(DataError, known, path, ": unknown element type in .npy header ", std::string(header));
  PGPT_CHECK(DataError, field(header, "'fortran_order': ", ',') == "False", path, ": not in C order");
  const std::string_view shape = field(header, "'shape': (", ')');
  const char* end = shape.data() + shape.size();
  auto [after, error] = std::from_chars(shape.data(), end, array.rows_);
  bool good = error == std::errc() && array.rows_ >= 0;
  if (good && after + 1 < end) {
    const auto second = std::from_chars(after + 2, end, array.columns_);
    good = second.ec == std::errc() && second.ptr == end && array.columns_ >= 1 && array.columns_ <= 2;
  }
  PGPT_CHECK(DataError, good, path, ": shape (", std::string(shape), ") in the .npy header cannot be used");
  // The header must be the very one that belongs to this type and shape, blanks included.
  PGPT_CHECK(DataError, all.substr(0, kNpyPrefix + length) == array.npy_header(), path, ": unexpected .npy header ",
             std::string(header));
  const std::size_t available = all.size() - kNpyPrefix - length;
  const std::size_t row_bytes = bytes_of(array.type_) * static_cast<std::size_t>(array.columns_);
  PGPT_CHECK(DataError, available % row_bytes == 0 && available / row_bytes == static_cast<std::size_t>(array.rows_),
             path, ": ", available, " bytes of data where the header promises ", array.rows_, " rows of ", row_bytes,
             " bytes");
  array.data_ = file->bytes().data() + kNpyPrefix + length;
  array.owner_ = std::move(file);
  return array;
}

}  // namespace pgpt::data

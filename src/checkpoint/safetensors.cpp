#include "pgpt/checkpoint/safetensors.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "pgpt/base/error.h"

namespace pgpt::checkpoint {
namespace {

using nlohmann::json;

constexpr std::pair<at::ScalarType, const char*> kDtypes[] = {
    {at::kBool, "BOOL"}, {at::kByte, "U8"},  {at::kChar, "I8"},       {at::kShort, "I16"}, {at::kInt, "I32"},
    {at::kLong, "I64"},  {at::kHalf, "F16"}, {at::kBFloat16, "BF16"}, {at::kFloat, "F32"}, {at::kDouble, "F64"}};
constexpr std::uint64_t kMaxHeader = std::uint64_t{1} << 30;

/// An output file under a temporary name; renamed by `publish`, removed otherwise.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& path)
      : path_(path), temporary_(path + ".tmp." + std::to_string(::getpid())) {
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    PGPT_CHECK(DataError, descriptor_ >= 0, "cannot create ", temporary_, ": ", std::strerror(errno));
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (!published_) ::unlink(temporary_.c_str());
  }
  void write(const void* data, std::size_t size) {
    const char* cursor = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t n = ::write(descriptor_, cursor, size);
      if (n < 0 && errno == EINTR) continue;
      PGPT_CHECK(DataError, n > 0, "cannot write ", path_, ": ", std::strerror(errno));
      cursor += n;
      size -= static_cast<std::size_t>(n);
    }
  }
  void publish() {
    PGPT_CHECK(DataError, ::fsync(descriptor_) == 0, "cannot write ", path_, ": ", std::strerror(errno));
    const int closed = ::close(descriptor_);
    descriptor_ = -1;
    PGPT_CHECK(DataError, closed == 0, "cannot write ", path_, ": ", std::strerror(errno));
    PGPT_CHECK(DataError, std::rename(temporary_.c_str(), path_.c_str()) == 0, "cannot rename ", temporary_, " to ",
               path_, ": ", std::strerror(errno));
    published_ = true;
  }

 private:
  std::string path_;
  std::string temporary_;
  int descriptor_ = -1;
  bool published_ = false;
};

}  // namespace

std::string dtype_name(at::ScalarType dtype) {
  for (const auto& [type, name] : kDtypes) {
    if (type == dtype) return name;
  }
  throw std::logic_error("no safetensors name for this dtype");
}

std::optional<at::ScalarType> dtype_named(const std::string& name) {
  for (const auto& [type, known] : kDtypes) {
    if (name == known) return type;
  }
  return std::nullopt;
}

void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  json header = json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    PGPT_ASSERT(!header.contains(name), "two tensors named ", name);
    const auto bytes = static_cast<std::uint64_t>(tensor.numel()) * tensor.element_size();
    header[name] = {{"dtype", dtype_name(tensor.scalar_type())},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // keeps the data section aligned
  TemporaryFile file(path);
  const std::uint64_t length = text.size();
  file.write(&length, sizeof length);
  file.write(text.data(), text.size());
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor host = tensor.to(at::kCPU).contiguous();
    file.write(host.data_ptr(), static_cast<std::size_t>(host.numel()) * host.element_size());
  }
  file.publish();
}

void write_text_atomically(const std::string& path, const std::string& text) {
  TemporaryFile file(path);
  file.write(text.data(), text.size());
  file.publish();
}

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  std::ifstream in(path, std::ios::binary);
  PGPT_CHECK(DataError, in.good(), "cannot open ", path, ": ", std::strerror(errno));
  in.seekg(0, std::ios::end);
  const auto size = static_cast<std::uint64_t>(in.tellg());
  in.seekg(0);
  std::uint64_t length = 0;
  in.read(reinterpret_cast<char*>(&length), sizeof length);
  PGPT_CHECK(DataError, in.good() && length <= kMaxHeader && sizeof length + length <= size, path,
             " is no safetensors file: header length ", length, " at offset 0, file size ", size);
  std::string text(length, '\0');
  in.read(text.data(), static_cast<std::streamsize>(length));
  PGPT_CHECK(DataError, in.good(), path, ": header ends early");
  data_offset_ = sizeof length + length;
  const json header = json::parse(text, nullptr, false);
  PGPT_CHECK(DataError, header.is_object(), path, ": header is not a JSON object");
  try {
    for (const auto& [name, value] : header.items()) {
      if (name == "__metadata__") {
        metadata_ = value.get<std::map<std::string, std::string>>();
        continue;
      }
      Entry entry;
      const auto type = value.at("dtype").get<std::string>();
      const std::optional<at::ScalarType> known = dtype_named(type);
      PGPT_CHECK(DataError, known, path, ": tensor ", name, " has unknown type ", type);
      entry.dtype = *known;
      entry.shape = value.at("shape").get<std::vector<std::int64_t>>();
      entry.begin = value.at("data_offsets").at(0).get<std::uint64_t>();
      entry.end = value.at("data_offsets").at(1).get<std::uint64_t>();
      std::uint64_t bytes = c10::elementSize(entry.dtype);
      for (const std::int64_t n : entry.shape) bytes *= static_cast<std::uint64_t>(n);
      PGPT_CHECK(DataError,
                 entry.begin <= entry.end && entry.end - entry.begin == bytes && data_offset_ + entry.end <= size, path,
                 ": tensor ", name, " claims bytes ", entry.begin, " to ", entry.end, " for ", bytes,
                 " bytes of data in a file of ", size, " bytes");
      entries_.emplace(name, std::move(entry));
    }
  } catch (const json::exception& e) {
    throw DataError(concat(path, ": malformed header: ", e.what()));
  }
}

at::Tensor SafetensorsFile::read(const std::string& name) const {
  const auto it = entries_.find(name);
  PGPT_CHECK(DataError, it != entries_.end(), path_, " holds no tensor named ", name);
  at::Tensor tensor = at::empty(it->second.shape, it->second.dtype);
  std::ifstream in(path_, std::ios::binary);
  in.seekg(static_cast<std::streamoff>(data_offset_ + it->second.begin));
  in.read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(it->second.end - it->second.begin));
  PGPT_CHECK(DataError, in.good() || tensor.numel() == 0, path_, ": file ends inside tensor ", name);
  return tensor;
}

}  // namespace pgpt::checkpoint

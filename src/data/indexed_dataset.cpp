#include "pgpt/data/indexed_dataset.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>

#include "file_util.h"
#include "pgpt/base/error.h"

namespace pgpt::data {
namespace {

constexpr std::string_view kMagic("MMIDIDX\0\0", 9);
constexpr std::int64_t kVersionAt = 9;
constexpr std::int64_t kTypeAt = 17;
constexpr std::int64_t kSequencesAt = 18;
constexpr std::int64_t kBoundariesAt = 26;
constexpr std::int64_t kHeaderBytes = 34;

// The arrays stand at odd offsets, so every value is copied out.
template <class T>
T load(const MappedFile& file, std::int64_t at) {
  T value;
  std::memcpy(&value, file.bytes().data() + at, sizeof(T));
  return value;
}

template <class T>
void widen(const std::byte* from, std::int64_t count, std::int64_t* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, from + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
    out[i] = static_cast<std::int64_t>(value);
  }
}

void widen(TokenType type, const std::byte* from, std::int64_t count, std::int64_t* out) {
  switch (type) {
    case TokenType::kUint8:
      return widen<std::uint8_t>(from, count, out);
    case TokenType::kInt8:
      return widen<std::int8_t>(from, count, out);
    case TokenType::kInt16:
      return widen<std::int16_t>(from, count, out);
    case TokenType::kInt32:
      return widen<std::int32_t>(from, count, out);
    case TokenType::kInt64:
      return widen<std::int64_t>(from, count, out);
    case TokenType::kUint16:
      return widen<std::uint16_t>(from, count, out);
  }
}

bool ends_with(const std::string& text, std::string_view end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

/// Tells which of the two files is missing, and guesses why.
void check_pair_exists(const std::string& prefix) {
  struct stat info{};
  std::string missing;
  std::string reason;
  for (const char* suffix : {".idx", ".bin"}) {
    const std::string path = prefix + suffix;
    if (::stat(path.c_str(), &info) == 0) continue;
    missing += (missing.empty() ? "" : " and ") + path;
    reason = std::strerror(errno);
  }
  if (missing.empty()) return;
  std::string hint;
  if (ends_with(prefix, ".bin") || ends_with(prefix, ".idx")) {
    hint = concat("; give the prefix without '", prefix.substr(prefix.size() - 4), "'");
  } else if (::stat(prefix.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) {
    hint = "; the prefix is a directory, give a file name without ending inside it";
  }
  throw DataError(concat("data prefix ", prefix, " needs ", prefix, ".idx and ", prefix, ".bin; cannot find ", missing,
                         " (", reason, ")", hint));
}

}  // namespace

std::int64_t bytes_of(TokenType type) {
  switch (type) {
    case TokenType::kUint8:
    case TokenType::kInt8:
      return 1;
    case TokenType::kInt16:
    case TokenType::kUint16:
      return 2;
    case TokenType::kInt32:
      return 4;
    default:
      return 8;
  }
}

std::string_view name_of(TokenType type) {
  switch (type) {
    case TokenType::kUint8:
      return "uint8";
    case TokenType::kInt8:
      return "int8";
    case TokenType::kInt16:
      return "int16";
    case TokenType::kInt32:
      return "int32";
    case TokenType::kInt64:
      return "int64";
    default:
      return "uint16";
  }
}

TokenType token_type_for_vocab(std::int64_t vocab_size) {
  return vocab_size > 0 && vocab_size < 65500 ? TokenType::kUint16 : TokenType::kInt32;
}

IndexedDataset::IndexedDataset(std::string prefix, bool map_bin) : prefix_(std::move(prefix)) {
  check_pair_exists(prefix_);
  idx_ = std::make_shared<const MappedFile>(prefix_ + ".idx");
  check_header();

  const std::string bin_path = prefix_ + ".bin";
  std::int64_t bin_bytes = 0;
  std::int64_t bin_modified = 0;
  if (map_bin) {
    bin_ = std::make_shared<const MappedFile>(bin_path);
    bin_bytes = static_cast<std::int64_t>(bin_->bytes().size());
    bin_modified = bin_->modified_ns();
    check_entries(bin_bytes);
  } else {
    const int fd = ::open(bin_path.c_str(), O_RDONLY | O_CLOEXEC);
    PGPT_CHECK(DataError, fd >= 0, "cannot open ", bin_path, ": ", std::strerror(errno));
    struct stat info{};
    try {
      PGPT_CHECK(DataError, ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode), "cannot read ", bin_path,
                 ": not a regular file");
      bin_bytes = info.st_size;
      bin_modified = static_cast<std::int64_t>(info.st_mtim.tv_sec) * 1000000000 + info.st_mtim.tv_nsec;
      check_entries(bin_bytes);
    } catch (...) {
      ::close(fd);
      throw;
    }
    bin_fd_ = fd;
  }
  stamp_ = concat("idx ", idx_->bytes().size(), " bytes, modified ", idx_->modified_ns(), "; bin ", bin_bytes,
                  " bytes, modified ", bin_modified, "; ", sequences_, " sequences");
}

IndexedDataset::~IndexedDataset() {
  if (bin_fd_ >= 0) ::close(bin_fd_);
}

void IndexedDataset::check_header() {
  const std::string path = prefix_ + ".idx";
  const auto bytes = static_cast<std::int64_t>(idx_->bytes().size());
  PGPT_CHECK(DataError, bytes >= kHeaderBytes, path, " is truncated: ", bytes, " bytes, the header alone needs ",
             kHeaderBytes);
  const std::string_view magic(reinterpret_cast<const char*>(idx_->bytes().data()), kMagic.size());
  PGPT_CHECK(DataError, magic == kMagic, path,
             " at offset 0: expected the magic bytes MMIDIDX, found something else; this is not a Megatron index file");
  const auto version = load<std::uint64_t>(*idx_, kVersionAt);
  PGPT_CHECK(DataError, version == 1, path, " at offset ", kVersionAt, ": expected version 1, found ", version);
  const auto code = load<std::uint8_t>(*idx_, kTypeAt);
  PGPT_CHECK(DataError, code >= 1 && code <= 8, path, " at offset ", kTypeAt,
             ": expected a token type code from 1 to 8, found ", static_cast<int>(code));
  PGPT_CHECK(DataError, code != 6 && code != 7, path, " at offset ", kTypeAt, ": token type code ",
             static_cast<int>(code), " is a floating-point type; token ids must be integers (codes 1-5 and 8)");
  type_ = static_cast<TokenType>(code);

  const auto sequences = load<std::uint64_t>(*idx_, kSequencesAt);
  const auto boundaries = load<std::uint64_t>(*idx_, kBoundariesAt);
  // Bounded before they are multiplied: both counts may be garbage.
  const auto most = static_cast<std::uint64_t>(bytes);
  const bool sane = sequences <= most && boundaries <= most;
  const std::uint64_t expected = sane ? kHeaderBytes + 12 * sequences + 8 * boundaries : 0;
  PGPT_CHECK(DataError, sane && (most == expected || most == expected + sequences), path, " has ", bytes,
             " bytes, but ", sequences, " sequences (offset ", kSequencesAt, ") and ", boundaries,
             " document boundaries (offset ", kBoundariesAt, ") need ", sane ? concat(expected) : std::string("more"),
             "; the file is truncated or damaged");
  PGPT_CHECK(DataError, boundaries >= 1, path, " at offset ", kBoundariesAt,
             ": expected at least 1 document boundary, found 0");
  sequences_ = static_cast<std::int64_t>(sequences);
  boundaries_ = static_cast<std::int64_t>(boundaries);
}

void IndexedDataset::check_entries(std::int64_t bin_bytes) {
  const std::string path = prefix_ + ".idx";
  const std::int64_t item = bytes_of(type_);
  std::int64_t used = 0;
  for (std::int64_t i = 0; i < sequences_; ++i) {
    const std::int64_t tokens = length(i);
    PGPT_CHECK(DataError, tokens >= 0, path, " at offset ", kHeaderBytes + 4 * i, ": length of sequence ", i,
               " must not be negative, found ", tokens);
    const std::int64_t begin = byte_offset(i);
    PGPT_CHECK(DataError, begin >= 0, path, " at offset ", kHeaderBytes + 4 * sequences_ + 8 * i,
               ": byte offset of sequence ", i, " must not be negative, found ", begin);
    PGPT_CHECK(DataError, begin <= bin_bytes && tokens * item <= bin_bytes - begin, prefix_, ".bin has ", bin_bytes,
               " bytes, but sequence ", i, " needs ", tokens * item, " bytes at offset ", begin, " (", path,
               " at offset ", kHeaderBytes + 4 * sequences_ + 8 * i,
               "); one of the files is truncated or they do not belong together");
    used = std::max(used, begin + tokens * item);
  }
  unused_bytes_ = bin_bytes - used;
  const std::int64_t boundaries_at = kHeaderBytes + 12 * sequences_;
  std::int64_t previous = 0;
  for (std::int64_t k = 0; k < boundaries_; ++k) {
    const std::int64_t value = boundary(k);
    PGPT_CHECK(DataError, k > 0 || value == 0, path, " at offset ", boundaries_at,
               ": the first document boundary must be 0, found ", value);
    PGPT_CHECK(DataError, value >= previous && value <= sequences_, path, " at offset ", boundaries_at + 8 * k,
               ": document boundary ", k, " must lie between its predecessor ", previous,
               " and the number of sequences ", sequences_, ", found ", value);
    previous = value;
  }
  PGPT_CHECK(DataError, previous == sequences_, path, " at offset ", boundaries_at + 8 * (boundaries_ - 1),
             ": the last document boundary must equal the number of sequences ", sequences_, ", found ", previous);
}

std::int64_t IndexedDataset::length(std::int64_t i) const { return load<std::int32_t>(*idx_, kHeaderBytes + 4 * i); }

std::int64_t IndexedDataset::byte_offset(std::int64_t i) const {
  return load<std::int64_t>(*idx_, kHeaderBytes + 4 * sequences_ + 8 * i);
}

std::int64_t IndexedDataset::boundary(std::int64_t k) const {
  return load<std::int64_t>(*idx_, kHeaderBytes + 12 * sequences_ + 8 * k);
}

void IndexedDataset::read(std::int64_t i, std::int64_t offset, std::int64_t count, std::int64_t* out) const {
  PGPT_ASSERT(i >= 0 && i < sequences_ && offset >= 0 && count >= 0 && offset + count <= length(i));
  const std::int64_t item = bytes_of(type_);
  const std::int64_t begin = byte_offset(i) + offset * item;
  if (bin_ != nullptr) {
    widen(type_, bin_->bytes().data() + begin, count, out);
    return;
  }
  std::vector<std::byte> buffer(static_cast<std::size_t>(count * item));
  std::size_t done = 0;
  while (done < buffer.size()) {
    const ssize_t got = ::pread(bin_fd_, buffer.data() + done, buffer.size() - done, begin + static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    PGPT_CHECK(DataError, got >= 0, "cannot read ", prefix_, ".bin at offset ", begin, ": ", std::strerror(errno));
    PGPT_CHECK(DataError, got > 0, prefix_, ".bin became shorter while it was in use: ", buffer.size(),
               " bytes were expected at offset ", begin, ", found ", done);
    done += static_cast<std::size_t>(got);
  }
  widen(type_, buffer.data(), count, out);
}

}  // namespace pgpt::data

#include <unistd.h>

#include <cstring>
#include <limits>

#include "file_util.h"
#include "pgpt/base/error.h"
#include "pgpt/data/indexed_dataset.h"

namespace pgpt::data {
namespace {

constexpr std::size_t kFlushAt = std::size_t{1} << 20;

template <class T>
void append_value(std::vector<char>& out, T value) {
  const std::size_t at = out.size();
  out.resize(at + sizeof(T));
  std::memcpy(out.data() + at, &value, sizeof(T));
}

template <class T>
bool append_token(std::vector<char>& out, std::int64_t token) {
  if (token < static_cast<std::int64_t>(std::numeric_limits<T>::min()) ||
      token > static_cast<std::int64_t>(std::numeric_limits<T>::max())) {
    return false;
  }
  append_value(out, static_cast<T>(token));
  return true;
}

bool append_token(std::vector<char>& out, TokenType type, std::int64_t token) {
  switch (type) {
    case TokenType::kUint8:
      return append_token<std::uint8_t>(out, token);
    case TokenType::kInt8:
      return append_token<std::int8_t>(out, token);
    case TokenType::kInt16:
      return append_token<std::int16_t>(out, token);
    case TokenType::kInt32:
      return append_token<std::int32_t>(out, token);
    case TokenType::kUint16:
      return append_token<std::uint16_t>(out, token);
    default:
      return append_token<std::int64_t>(out, token);
  }
}

}  // namespace

IndexedDatasetWriter::IndexedDatasetWriter(std::string prefix, TokenType type)
    : prefix_(std::move(prefix)),
      bin_temporary_(temporary_name(prefix_ + ".bin")),
      idx_temporary_(temporary_name(prefix_ + ".idx")),
      type_(type),
      boundaries_{0} {
  fd_ = create_file(bin_temporary_);
}

IndexedDatasetWriter::~IndexedDatasetWriter() {
  if (fd_ >= 0) ::close(fd_);
  if (!finished_) {
    ::unlink(bin_temporary_.c_str());
    ::unlink(idx_temporary_.c_str());
  }
}

void IndexedDatasetWriter::add_sequence(std::span<const std::int64_t> tokens) {
  PGPT_CHECK(DataError, tokens.size() <= static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()), prefix_,
             ": a sequence of ", tokens.size(), " tokens is too long for the index format; split the text");
  for (const std::int64_t token : tokens) {
    PGPT_CHECK(DataError, append_token(buffer_, type_, token), prefix_, ": token id ", token, " does not fit ",
               name_of(type_), "; give the right --vocab-size");
  }
  lengths_.push_back(static_cast<std::int32_t>(tokens.size()));
  if (buffer_.size() >= kFlushAt) flush();
}

void IndexedDatasetWriter::end_document() { boundaries_.push_back(static_cast<std::int64_t>(lengths_.size())); }

void IndexedDatasetWriter::append(const IndexedDataset& source) {
  PGPT_CHECK(DataError, source.token_type() == type_, source.name(), " holds ", name_of(source.token_type()),
             " tokens and ", prefix_, " ", name_of(type_), "; only equal types can be joined");
  std::vector<std::int64_t> tokens;
  std::int64_t next = 0;
  for (std::int64_t k = 1; k < source.boundaries(); ++k) {
    for (; next < source.boundary(k); ++next) {
      tokens.resize(static_cast<std::size_t>(source.length(next)));
      source.read(next, 0, source.length(next), tokens.data());
      add_sequence(tokens);
    }
    end_document();
  }
}

void IndexedDatasetWriter::flush() {
  write_all(fd_, buffer_, bin_temporary_);
  buffer_.clear();
}

void IndexedDatasetWriter::seal() {
  PGPT_ASSERT(!sealed_ && boundaries_.back() == static_cast<std::int64_t>(lengths_.size()),
              "the last document was not ended");
  flush();
  const int bin_fd = fd_;
  fd_ = -1;
  close_file(bin_fd, bin_temporary_, true);

  std::vector<char> index;
  const std::string_view magic("MMIDIDX\0\0", 9);
  index.insert(index.end(), magic.begin(), magic.end());
  append_value(index, std::uint64_t{1});
  append_value(index, static_cast<std::uint8_t>(type_));
  append_value(index, static_cast<std::uint64_t>(lengths_.size()));
  append_value(index, static_cast<std::uint64_t>(boundaries_.size()));
  for (const std::int32_t length : lengths_) append_value(index, length);
  std::int64_t offset = 0;
  for (const std::int32_t length : lengths_) {
    append_value(index, offset);
    offset += length * bytes_of(type_);
  }
  for (const std::int64_t boundary : boundaries_) append_value(index, boundary);
  const int fd = create_file(idx_temporary_);
  try {
    write_all(fd, index, idx_temporary_);
  } catch (...) {
    ::close(fd);
    throw;
  }
  close_file(fd, idx_temporary_, true);
  sealed_ = true;
}

void IndexedDatasetWriter::finish() {
  PGPT_ASSERT(!finished_, "the files were written already");
  if (!sealed_) seal();
  // An index left from before must not meet the new tokens.
  ::unlink((prefix_ + ".idx").c_str());
  rename_file(bin_temporary_, prefix_ + ".bin");
  rename_file(idx_temporary_, prefix_ + ".idx");
  finished_ = true;
  sync_directory_of(prefix_);
}

}  // namespace pgpt::data

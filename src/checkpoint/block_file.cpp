#include "block_file.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "pgpt/base/error.h"
#include "pgpt/checkpoint/directory.h"

namespace pgpt::checkpoint {
namespace {

/// Smaller files are left to the page cache.
constexpr std::uint64_t kDirectBytes = std::uint64_t{1} << 20;
/// Types have at most this alignment.
constexpr std::uint64_t kAlignment = 16;

std::uint64_t page_down(std::uint64_t n) { return n / kPage * kPage; }
std::uint64_t page_up(std::uint64_t n) { return page_down(n + kPage - 1); }

/// A second descriptor that bypasses the page cache, -1 where that is not possible.
int open_direct(const std::string& path, int flags, std::uint64_t size) {
#ifdef O_DIRECT
  if (size >= kDirectBytes) return ::open(path.c_str(), flags | O_DIRECT | O_CLOEXEC);
#else
  (void)path;
  (void)flags;
  (void)size;
#endif
  return -1;
}

/// A call again for as long as signals interrupt it (some file systems do not restart theirs).
template <class Call>
int unless_interrupted(const Call& call) {
  int result = call();
  while (result != 0 && errno == EINTR) result = call();
  return result;
}

void close_if_open(int& descriptor) {
  if (descriptor >= 0) ::close(descriptor);
  descriptor = -1;
}

}  // namespace

BlockBuffer::BlockBuffer(std::uint64_t block_bytes, bool pinned)
    // A page to find a boundary in, and one at each end of a block that begins and ends inside pages.
    : bytes_(at::empty({static_cast<std::int64_t>(block_bytes + 3 * kPage)},
                       at::TensorOptions().dtype(at::kByte).pinned_memory(pinned))) {
  char* begin = static_cast<char*>(bytes_.data_ptr());
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  first_ = begin + (page_up(address) - address);
}

OutputFile::OutputFile(std::string path, std::uint64_t size) : path_(std::move(path)) {
  cached_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  PGPT_CHECK(DataError, cached_ >= 0, "cannot create ", path_, ": ", std::strerror(errno));
  direct_ = open_direct(path_, O_WRONLY, size);
#ifdef __linux__
  // File systems that cannot reserve space are no error.
  const auto reserve = [&] { return ::fallocate(cached_, 0, 0, static_cast<off_t>(size)); };
  if (size > 0 && unless_interrupted(reserve) != 0 && errno != EOPNOTSUPP && errno != ENOSYS) {
    const int cause = errno;
    close_if_open(cached_);
    close_if_open(direct_);
    errno = cause;
    fail();
  }
#endif
}

OutputFile::~OutputFile() {
  close_if_open(cached_);
  close_if_open(direct_);
}

void OutputFile::fail() const {
  const int cause = errno;
  const char* advice = "";
  if (cause == ENOSPC || cause == EDQUOT) advice = "; free some space or write elsewhere";
  if (cause == EFBIG) advice = "; raise the limit for the size of files (ulimit -f)";
  throw DataError(concat("cannot write ", path_, ": ", std::strerror(cause), advice));
}

void OutputFile::write(const char* data, std::uint64_t size, std::uint64_t offset) {
  if (!direct()) {
    write_cached(data, size, offset);
    return;
  }
  const std::uint64_t begin = page_up(offset);
  const std::uint64_t end = page_down(offset + size);
  if (begin >= end) {
    keep(data, size, offset);
    return;
  }
  PGPT_ASSERT(reinterpret_cast<std::uintptr_t>(data) % kPage == offset % kPage, path_, " at byte ", offset);
  keep(data, begin - offset, offset);
  std::uint64_t at = begin;
  while (at < end && !refused_) {
    const ssize_t n = ::pwrite(direct_, data + (at - offset), end - at, static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EINVAL && errno != EFAULT) fail();  // some drivers' pinned memory cannot be used directly
    const std::uint64_t whole = n < 0 ? 0 : page_down(static_cast<std::uint64_t>(n));
    at += whole;
    if (whole == 0) refused_ = true;  // the file system wants larger units than pages, or none at all
  }
  write_cached(data + (at - offset), end - at, at);
  keep(data + (end - offset), offset + size - end, end);
}

void OutputFile::keep(const char* data, std::uint64_t size, std::uint64_t offset) {
  // The page cache would hold whole pages, which other threads may be writing past it.
  if (size == 0) return;
  const std::lock_guard lock(mutex_);
  kept_.emplace_back(offset, std::string(data, size));
}

void OutputFile::write_cached(const char* data, std::uint64_t size, std::uint64_t offset) const {
  if (size == 0) return;
  const std::uint64_t start = offset;
  while (size > 0) {
    const ssize_t n = ::pwrite(cached_, data, size, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail();
    data += n;
    offset += static_cast<std::uint64_t>(n);
    size -= static_cast<std::uint64_t>(n);
  }
#ifdef SYNC_FILE_RANGE_WRITE
  // Starts the transfer now, so that the final sync finds little left to do.
  (void)::sync_file_range(cached_, static_cast<off_t>(start), static_cast<off_t>(offset - start),
                          SYNC_FILE_RANGE_WRITE);
#else
  (void)start;
#endif
}

void OutputFile::finish() {
  std::sort(kept_.begin(), kept_.end());
  for (const auto& [offset, bytes] : kept_) write_cached(bytes.data(), bytes.size(), offset);
  if (unless_interrupted([&] { return ::fsync(cached_); }) != 0) fail();
  close_if_open(direct_);
  const int closed = ::close(cached_);
  cached_ = -1;
  if (closed != 0 && errno != EINTR) fail();  // Linux has closed it even then
}

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  cached_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  PGPT_CHECK(DataError, cached_ >= 0, "cannot open ", path_, ": ", std::strerror(errno), kAnotherCheckpoint);
  struct stat facts{};
  if (::fstat(cached_, &facts) != 0) {
    const int cause = errno;
    close_if_open(cached_);
    throw DataError(concat("cannot read ", path_, ": ", std::strerror(cause)));
  }
  size_ = static_cast<std::uint64_t>(facts.st_size);
  direct_ = open_direct(path_, O_RDONLY, size_);
}

InputFile::~InputFile() {
  close_if_open(cached_);
  close_if_open(direct_);
}

std::uint64_t InputFile::read_some(int descriptor, char* data, std::uint64_t size, std::uint64_t needed,
                                   std::uint64_t offset) const {
  std::uint64_t done = 0;
  while (done < needed) {
    const ssize_t n = ::pread(descriptor, data + done, size - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EINVAL || errno == EFAULT) && descriptor == direct_) {
      refused_ = true;
      return done;
    }
    PGPT_CHECK(DataError, n >= 0, "cannot read ", path_, " at byte ", offset + done, ": ", std::strerror(errno));
    auto more = static_cast<std::uint64_t>(n);
    if (descriptor == direct_ && done + more < needed) more = page_down(more);  // the next one starts at a page, too
    PGPT_CHECK(DataError, more > 0, path_, " ends at byte ", offset + done + static_cast<std::uint64_t>(n),
               ", in the middle of a tensor", kAnotherCheckpoint);
    done += more;
  }
  return done;
}

void InputFile::read(char* data, std::uint64_t size, std::uint64_t offset) const {
  (void)read_some(cached_, data, size, size, offset);
}

char* InputFile::read(const BlockBuffer& buffer, std::uint64_t size, std::uint64_t offset) const {
  char* first = buffer.place(0);
  if (direct_ >= 0 && !refused_) {
    const std::uint64_t begin = page_down(offset);
    const std::uint64_t needed = offset + size - begin;
    if (read_some(direct_, first, page_up(needed), needed, begin) >= needed) {
      char* data = buffer.place(offset);
      if (offset % kAlignment == 0) return data;
      std::memmove(first, data, size);
      return first;
    }
  }
  read(first, size, offset);
  return first;
}

}  // namespace pgpt::checkpoint

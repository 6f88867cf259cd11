#include "file_util.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "pgpt/base/error.h"
#include "pgpt/data/int_array.h"

namespace pgpt::data {

std::string temporary_name(const std::string& path) {
  static std::atomic<unsigned> counter{0};
  // The host name keeps nodes apart that share the folder: process ids repeat across them.
  char host[256] = {};
  ::gethostname(host, sizeof(host) - 1);
  return concat(path, ".tmp.", host, ".", ::getpid(), ".", counter.fetch_add(1));
}

void write_all(int fd, std::span<const char> bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    PGPT_CHECK(DataError, written > 0, "cannot write ", path, ": ", std::strerror(errno));
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

int create_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  PGPT_CHECK(DataError, fd >= 0, "cannot create ", path, ": ", std::strerror(errno));
  return fd;
}

void close_file(int fd, const std::string& path, bool durable) {
  const bool synced = !durable || ::fsync(fd) == 0;
  const int error = errno;
  const bool closed = ::close(fd) == 0;
  PGPT_CHECK(DataError, synced && closed, "cannot flush ", path, ": ", std::strerror(synced ? errno : error));
}

void rename_file(const std::string& from, const std::string& to) {
  PGPT_CHECK(DataError, std::rename(from.c_str(), to.c_str()) == 0, "cannot rename ", from, " to ", to, ": ",
             std::strerror(errno));
}

void sync_directory_of(const std::string& path) {
  const std::string directory = std::filesystem::path(path).parent_path().string();
  const int fd = ::open(directory.empty() ? "." : directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

std::string read_file(const std::string& path) {
  const MappedFile file(path);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

}  // namespace pgpt::data

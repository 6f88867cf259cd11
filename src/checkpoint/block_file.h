#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace pgpt::checkpoint {

/// Transfers of whole pages can go between disk and memory without the page cache. They must start at a multiple of
/// this in the file and in memory.
inline constexpr std::uint64_t kPage = 4096;

/// Host memory for one block of a file, pinned or not.
class BlockBuffer {
 public:
  BlockBuffer(std::uint64_t block_bytes, bool pinned);
  /// Where byte `offset` of a file has its place: whole pages of the file are whole pages of this memory.
  [[nodiscard]] char* place(std::uint64_t offset) const { return first_ + offset % kPage; }

 private:
  at::Tensor bytes_;
  char* first_ = nullptr;  // a page boundary
};

/// A file of known size that several threads fill by blocks. Where the file system can, whole pages bypass the page
/// cache: a checkpoint is read again only after a failure, and the cache would cost a copy and other programs' memory.
/// Errors are DataErrors that name path and cause.
class OutputFile {
 public:
  /// Reserves the space, so that a disk without room is noticed before anything is written.
  OutputFile(std::string path, std::uint64_t size);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  /// Whether `write` wants its data in a BlockBuffer's place for that offset.
  [[nodiscard]] bool direct() const { return direct_ >= 0; }
  void write(const char* data, std::uint64_t size, std::uint64_t offset);
  /// Writes from anywhere, through the page cache; not into pages that `write` touches.
  void write_cached(const char* data, std::uint64_t size, std::uint64_t offset) const;
  /// Writes what is left and syncs. To be called once, after the last write.
  void finish();

 private:
  void keep(const char* data, std::uint64_t size, std::uint64_t offset);
  [[noreturn]] void fail() const;

  std::string path_;
  int cached_ = -1, direct_ = -1;  // descriptors of the same file
  std::atomic<bool> refused_{false};
  std::mutex mutex_;
  std::vector<std::pair<std::uint64_t, std::string>> kept_;  // parts of pages, by offset; written by finish
};

/// A file that several threads read by blocks, past the page cache where the file system can.
/// Errors are DataErrors that name path, place and cause.
class InputFile {
 public:
  explicit InputFile(std::string path);
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;
  ~InputFile();

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::uint64_t size() const { return size_; }
  void read(char* data, std::uint64_t size, std::uint64_t offset) const;
  /// Reads a block into the buffer. Returns its first byte, aligned for any type.
  [[nodiscard]] char* read(const BlockBuffer& buffer, std::uint64_t size, std::uint64_t offset) const;

 private:
  /// Reads until `needed` of `size` bytes are there, or fewer when the system refuses this kind of transfer.
  [[nodiscard]] std::uint64_t read_some(int descriptor, char* data, std::uint64_t size, std::uint64_t needed,
                                        std::uint64_t offset) const;

  std::string path_;
  std::uint64_t size_ = 0;
  int cached_ = -1, direct_ = -1;
  mutable std::atomic<bool> refused_{false};
};

}  // namespace pgpt::checkpoint

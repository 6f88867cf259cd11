#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace pgpt::data {

/// A name beside `path` that no other process, thread or call uses.
[[nodiscard]] std::string temporary_name(const std::string& path);

/// Writes all bytes to `fd`; throws DataError naming `path`.
void write_all(int fd, std::span<const char> bytes, const std::string& path);

/// Creates `path` for writing; throws DataError naming it.
[[nodiscard]] int create_file(const std::string& path);

/// Closes `fd`, with `durable` after flushing it to the disk; throws DataError naming `path`.
void close_file(int fd, const std::string& path, bool durable);

/// Renames `from` over `to`; throws DataError naming both.
void rename_file(const std::string& from, const std::string& to);

/// Makes the entries of the directory that holds `path` durable; best effort.
void sync_directory_of(const std::string& path);

/// Whole contents of a file; throws DataError naming `path`.
[[nodiscard]] std::string read_file(const std::string& path);

}  // namespace pgpt::data

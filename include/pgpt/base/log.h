#pragma once

#include <string>

namespace pgpt::log {

/// Sets the rank of this process, which prefixes warnings and errors once `world_size` is above one.
void set_rank(int rank, int world_size);

/// Prints one time-stamped line to stdout on rank 0; other ranks print nothing. Flushed; thread safe.
void info(const std::string& text);
/// Prints one time-stamped line with the rank to stderr, on every rank that calls it. Flushed; thread safe.
void warn(const std::string& text);
/// As `warn`, for what ends the run.
void error(const std::string& text);
/// Prints `text` and a newline to stdout exactly as given, on every rank that calls it. Flushed; thread safe.
void line(const std::string& text);

/// Writes one error line straight to stderr in one system call: takes no lock and allocates little, so that a watchdog
/// can report while another thread is stuck inside the logger.
void emergency(const std::string& text) noexcept;

}  // namespace pgpt::log

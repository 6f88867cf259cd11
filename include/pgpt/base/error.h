#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace pgpt {

/// Process exit codes, as documented in README.md.
enum class ExitCode : int {
  kDone = 0,               ///< finished, or stopped by a signal after saving
  kMissingCheckpoint = 1,  ///< only with --exit-on-missing-checkpoint
  kConfiguration = 2,      ///< command line, configuration, environment or data is wrong
  kCommunication = 3,      ///< a collective failed or a peer was lost
  kDevice = 4,             ///< CUDA or NCCL failed
  kNonFinite = 5,          ///< loss or gradient became NaN or Inf
};

/// Base of all errors that end the program; `what()` is the one line the user reads.
class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  [[nodiscard]] ExitCode code() const noexcept { return code_; }

 private:
  ExitCode code_;
};

/// A wrong option, option combination or environment variable.
class ConfigError : public Error {
 public:
  explicit ConfigError(const std::string& m) : Error(ExitCode::kConfiguration, m) {}
};
/// A missing, malformed or exhausted input file.
class DataError : public Error {
 public:
  explicit DataError(const std::string& m) : Error(ExitCode::kConfiguration, m) {}
};
/// A failed rendezvous or collective, or a lost peer.
class CommError : public Error {
 public:
  explicit CommError(const std::string& m) : Error(ExitCode::kCommunication, m) {}
};
/// A failed CUDA or NCCL call.
class DeviceError : public Error {
 public:
  explicit DeviceError(const std::string& m) : Error(ExitCode::kDevice, m) {}
};
/// A NaN or Inf in a loss or gradient.
class NonFiniteError : public Error {
 public:
  explicit NonFiniteError(const std::string& m) : Error(ExitCode::kNonFinite, m) {}
};
/// Nothing to load although --exit-on-missing-checkpoint was given.
class MissingCheckpointError : public Error {
 public:
  explicit MissingCheckpointError(const std::string& m) : Error(ExitCode::kMissingCheckpoint, m) {}
};

/// An error that every rank throws at the same point of the run, so that all end in order and only one of them prints
/// it.
class AgreedError : public Error {
 public:
  AgreedError(ExitCode code, const std::string& message, bool speaks) : Error(code, message), speaks_(speaks) {}
  [[nodiscard]] bool speaks() const noexcept { return speaks_; }

 private:
  bool speaks_;
};

/// Joins all arguments with operator<< into one string.
template <class... Args>
[[nodiscard]] std::string concat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

}  // namespace pgpt

/// Throws `ErrorType` with the concatenated message unless `condition` holds; for anything a user or the environment
/// can cause.
#define PGPT_CHECK(ErrorType, condition, ...)                               \
  do {                                                                      \
    if (!(condition)) throw ::pgpt::ErrorType(::pgpt::concat(__VA_ARGS__)); \
  } while (false)

/// Throws std::logic_error unless `condition` holds; for programming errors, kept in release builds.
#define PGPT_ASSERT(condition, ...)                                                                             \
  do {                                                                                                          \
    if (!(condition))                                                                                           \
      throw std::logic_error(                                                                                   \
          ::pgpt::concat("internal error at ", __FILE__, ":", __LINE__, ": ", #condition, " ", ##__VA_ARGS__)); \
  } while (false)

#include "pgpt/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <atomic>
#include <ctime>
#include <memory>

namespace pgpt::log {
namespace {

std::atomic<int> process_rank{0};
std::atomic<int> process_world_size{1};

std::shared_ptr<spdlog::logger> make_logger(bool to_stderr, const char* pattern) {
  std::shared_ptr<spdlog::logger> logger;
  if (to_stderr) {
    logger = std::make_shared<spdlog::logger>("pgpt", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  } else {
    logger = std::make_shared<spdlog::logger>("pgpt", std::make_shared<spdlog::sinks::stdout_sink_mt>());
  }
  logger->set_pattern(pattern);
  logger->set_level(spdlog::level::trace);
  logger->flush_on(spdlog::level::trace);
  return logger;
}

// Never destroyed: threads may still log while static destructors run.
struct Loggers {
  std::shared_ptr<spdlog::logger> stamped_out = make_logger(false, "[%Y-%m-%d %H:%M:%S] %v");
  std::shared_ptr<spdlog::logger> stamped_err = make_logger(true, "[%Y-%m-%d %H:%M:%S] %l: %v");
  std::shared_ptr<spdlog::logger> bare = make_logger(false, "%v");
};

Loggers& loggers() {
  static auto* instance = new Loggers;
  return *instance;
}

std::string with_rank(const std::string& text) {
  if (process_world_size.load() <= 1) return text;
  return "rank " + std::to_string(process_rank.load()) + ": " + text;
}

}  // namespace

void set_rank(int rank, int world_size) {
  process_rank = rank;
  process_world_size = world_size;
}

void info(const std::string& text) {
  if (process_rank.load() == 0) loggers().stamped_out->log(spdlog::level::info, spdlog::string_view_t(text));
}

void warn(const std::string& text) {
  loggers().stamped_err->log(spdlog::level::warn, spdlog::string_view_t(with_rank(text)));
}

void error(const std::string& text) {
  loggers().stamped_err->log(spdlog::level::err, spdlog::string_view_t(with_rank(text)));
}

void line(const std::string& text) { loggers().bare->log(spdlog::level::info, spdlog::string_view_t(text)); }

void emergency(const std::string& text) noexcept {
  try {
    char stamp[32] = "";
    const std::time_t now = std::time(nullptr);
    std::tm local{};
    localtime_r(&now, &local);
    std::strftime(stamp, sizeof stamp, "[%Y-%m-%d %H:%M:%S] ", &local);
    const std::string message = stamp + std::string("error: ") + with_rank(text) + "\n";
    size_t written = 0;
    while (written < message.size()) {
      const ssize_t n = ::write(STDERR_FILENO, message.data() + written, message.size() - written);
      if (n <= 0) return;
      written += static_cast<size_t>(n);
    }
  } catch (...) {
    // Out of memory: the exit code still tells.
  }
}

}  // namespace pgpt::log

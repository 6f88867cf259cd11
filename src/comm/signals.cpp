#include "signals.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace pgpt::comm {
namespace {

// Handlers can only reach static data.
std::atomic<int> first_signal{0};
std::atomic<int64_t> first_time_ms{0};
struct sigaction previous_int;
struct sigaction previous_term;
bool installed = false;
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free);

int64_t now_ms() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1'000'000;
}

void handle(int number) {
  int none = 0;
  if (first_signal.compare_exchange_strong(none, number)) {
    first_time_ms = now_ms();
    return;
  }
  // One Ctrl-C often arrives twice: from the terminal and passed on by the launcher.
  if (now_ms() - first_time_ms < 300) return;
  _exit(128 + number);
}

}  // namespace

void install_signal_handlers() {
  if (installed) return;
  installed = true;
  first_signal = 0;
  struct sigaction action{};
  action.sa_handler = handle;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, &previous_int);
  sigaction(SIGTERM, &action, &previous_term);
}

void restore_signal_handlers() {
  if (!installed) return;
  sigaction(SIGINT, &previous_int, nullptr);
  sigaction(SIGTERM, &previous_term, nullptr);
  installed = false;
}

int noted_signal() noexcept { return first_signal.load(); }

}  // namespace pgpt::comm

#include "pgpt/training/exit_signals.h"

#include <signal.h>

#include <atomic>
#include <string>
#include <utility>

#include "pgpt/base/error.h"

namespace pgpt::training {
namespace {

// Handlers can only reach static data.
std::atomic<bool> exit_noted{false};
std::atomic<bool> save_noted{false};
static_assert(std::atomic<bool>::is_always_lock_free);
struct sigaction previous_exit;
struct sigaction previous_save;
int exit_number = 0;

void note_exit(int) { exit_noted = true; }
void note_save(int) { save_noted = true; }

int number_of(const std::string& name) {
  static constexpr std::pair<const char*, int> kNames[] = {
      {"SIGTERM", SIGTERM},     {"SIGINT", SIGINT},   {"SIGHUP", SIGHUP},    {"SIGQUIT", SIGQUIT}, {"SIGUSR1", SIGUSR1},
      {"SIGUSR2", SIGUSR2},     {"SIGALRM", SIGALRM}, {"SIGCONT", SIGCONT},  {"SIGTSTP", SIGTSTP}, {"SIGURG", SIGURG},
      {"SIGVTALRM", SIGVTALRM}, {"SIGXCPU", SIGXCPU}, {"SIGWINCH", SIGWINCH}};
  for (const auto& [known, number] : kNames) {
    if (name == known) return number;
  }
  throw ConfigError(concat("--exit-signal ", name, " is not a signal that can be handled"));
}

void install(int number, void (*handler)(int), struct sigaction& previous) {
  struct sigaction action{};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(number, &action, &previous);
}

}  // namespace

ExitSignals::ExitSignals(const config::TrainingConfig& training) {
  exit_noted = false;
  save_noted = false;
  exit_number = number_of(training.exit_signal);
  install(exit_number, note_exit, previous_exit);
  if (exit_number != SIGUSR1) install(SIGUSR1, note_save, previous_save);
}

ExitSignals::~ExitSignals() {
  sigaction(exit_number, &previous_exit, nullptr);
  if (exit_number != SIGUSR1) sigaction(SIGUSR1, &previous_save, nullptr);
}

bool ExitSignals::exit_requested() noexcept { return exit_noted; }
bool ExitSignals::save_requested() noexcept { return save_noted.exchange(false); }

}  // namespace pgpt::training

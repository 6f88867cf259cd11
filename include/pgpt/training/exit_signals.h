#pragma once

#include "pgpt/config/config.h"

namespace pgpt::training {

/// Notes --exit-signal, and SIGUSR1 (save and go on) unless that is the exit signal, for as long as it lives
/// (--exit-signal-handler). Handlers only set flags; other signals keep what they had. One at a time in a process.
class ExitSignals {
 public:
  explicit ExitSignals(const config::TrainingConfig& training);
  ~ExitSignals();
  ExitSignals(const ExitSignals&) = delete;
  ExitSignals& operator=(const ExitSignals&) = delete;

  /// Whether the exit signal has come.
  [[nodiscard]] static bool exit_requested() noexcept;
  /// Whether SIGUSR1 has come since the last call.
  [[nodiscard]] static bool save_requested() noexcept;
};

}  // namespace pgpt::training

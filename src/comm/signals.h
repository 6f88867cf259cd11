#pragma once

namespace pgpt::comm {

/// Installs handlers for SIGINT and SIGTERM: the first one is noted, a second one ends the process at once with 128 +
/// its number.
void install_signal_handlers();
/// Puts the previous handlers back.
void restore_signal_handlers();
/// The noted signal, or 0.
int noted_signal() noexcept;

}  // namespace pgpt::comm

#pragma once

#include <exception>

#include "pgpt/base/error.h"

namespace pgpt::training {

/// An error of libtorch or the standard library as one of this program's: one line without a C++ backtrace, with the
/// exit code of its kind (a full GPU says what needs less memory). Errors of this program come back unchanged.
[[nodiscard]] Error translate(const std::exception& error);

}  // namespace pgpt::training

#pragma once

#include <string>
#include <vector>

#include "pgpt/base/error.h"

namespace pgpt::training {

/// The whole life of the program: parse and validate `arguments` (without the program name), read the launch
/// environment, join the job, train, shut down. Errors are printed once and become exit codes; nothing is thrown.
[[nodiscard]] ExitCode launch(const std::vector<std::string>& arguments) noexcept;

}  // namespace pgpt::training

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "pgpt/comm/communicator.h"
#include "pgpt/comm/world.h"
#include "pgpt/config/config.h"

// Small collectives over all ranks that keep control flow and failures the same everywhere.
namespace pgpt::training {

/// Runs `work`, which must not communicate, on every rank; when it throws anywhere, all ranks throw an AgreedError that
/// the lowest failing rank prints.
void together(comm::Communicator& all, at::Device device, const std::function<void()>& work);

/// Largest value of each position over the ranks.
[[nodiscard]] std::vector<std::int64_t> agree_max(comm::Communicator& all, at::Device device,
                                                  const std::vector<std::int64_t>& values);

/// Every rank's text, by rank.
[[nodiscard]] std::vector<std::string> gather_texts(comm::Communicator& all, at::Device device,
                                                    const std::string& text);

/// Compares this rank's options with rank 0's; throws ConfigError with both values of those that differ. Places of
/// files may differ.
void check_same_options(const config::Config& config, comm::World& world);

}  // namespace pgpt::training

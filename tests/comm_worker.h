#pragma once

#include <memory>
#include <string>
#include <vector>

#include "pgpt/comm/world.h"

namespace comm_worker {

/// All ranks of a world.
[[nodiscard]] std::vector<int> everybody(const pgpt::comm::World& world);

/// One of the copy-engine scenarios, on a world of NCCL that it creates: "equal", "overlap", "fences", "automatic",
/// "endless", "capture", "bench". Throws on a wrong result.
void run_copy_engine(std::unique_ptr<pgpt::comm::World>& world, const pgpt::comm::LaunchEnvironment& env,
                     const pgpt::comm::WorldOptions& options, const std::string& scenario);

}  // namespace comm_worker

#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pgpt/config/config.h"
#include "pgpt/training/trainer.h"
#include "support/text.h"

namespace pgpt::test {

/// Parses a command line for a world of `ranks` ranks, as the program does, CPU and gloo.
[[nodiscard]] config::Config parse(const std::string& flags, int ranks);

/// Everything one rank of a run left behind.
struct RankResult {
  std::vector<training::StepReport> steps;
  std::vector<std::string> lines;
};

/// Runs `body(rank, trainer)` on `ranks` threads of this process, each with a Trainer over gloo; the first exception is
/// rethrown.
std::vector<RankResult> run_ranks(const config::Config& config, int ranks,
                                  const std::function<void(int rank, training::Trainer& trainer)>& body);
/// The same on worlds that the caller made, one a rank.
std::vector<RankResult> run_ranks(const config::Config& config, std::vector<std::unique_ptr<comm::World>> worlds,
                                  const std::function<void(int rank, training::Trainer& trainer)>& body);

}  // namespace pgpt::test

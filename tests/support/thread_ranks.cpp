#include "support/thread_ranks.h"

#include <exception>
#include <thread>

#include "pgpt/config/parse.h"

namespace pgpt::test {

config::Config parse(const std::string& flags, int ranks) {
  config::ParseContext context;
  context.world_size = ranks;
  context.machine.local_world_size = ranks;
  context.checkpoint_arguments = training::stored_arguments;
  return config::parse_command_line(split_words(flags), context).config;
}

std::vector<RankResult> run_ranks(const config::Config& config, int ranks,
                                  const std::function<void(int rank, training::Trainer& trainer)>& body) {
  return run_ranks(config, comm::World::connect_threads(ranks), body);
}

std::vector<RankResult> run_ranks(const config::Config& config, std::vector<std::unique_ptr<comm::World>> worlds,
                                  const std::function<void(int rank, training::Trainer& trainer)>& body) {
  const int ranks = static_cast<int>(worlds.size());
  std::vector<RankResult> results(static_cast<std::size_t>(ranks));
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto index = static_cast<std::size_t>(rank);
      RankResult& result = results[index];
      try {
        {
          training::Trainer trainer(config, *worlds[index], at::kCPU,
                                    [&](const std::string& line) { result.lines.push_back(line); });
          trainer.on_step = [&](const training::StepReport& report) { result.steps.push_back(report); };
          body(rank, trainer);
        }
        worlds[index]->shutdown();
      } catch (...) {
        failures[index] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  return results;
}

}  // namespace pgpt::test

#include "pgpt/training/launch.h"

#include <torch/version.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>

#include "pgpt/base/log.h"
#include "pgpt/comm/world.h"
#include "pgpt/config/parse.h"
#include "pgpt/data/tokenizer.h"
#include "pgpt/training/agreement.h"
#include "pgpt/training/device.h"
#include "pgpt/training/exit_signals.h"
#include "pgpt/training/library_errors.h"
#include "pgpt/training/startup_lines.h"
#include "pgpt/training/trainer.h"

namespace pgpt::training {
namespace {

bool built_with_cuda() {
#ifdef PGPT_WITH_CUDA
  return true;
#else
  return false;
#endif
}

comm::WorldOptions world_options(const config::Config& config, at::Device device) {
  comm::WorldOptions options;
  options.backend =
      config.parallel.backend == config::Backend::kNccl ? comm::BackendKind::kNccl : comm::BackendKind::kGloo;
  options.tensors_on_gpu = device.is_cuda();
  options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(config.parallel.timeout_minutes * 60'000.0));
  options.rendezvous_timeout = std::min<std::chrono::milliseconds>(options.timeout, options.rendezvous_timeout);
  return options;
}

void print_start(const config::Config& config, const comm::LaunchEnvironment& environment, at::Device device,
                 int threads) {
  for (const std::string& line : version_lines(TORCH_VERSION, "none (pretrain_gpt " + config::version() + ")", "none"))
    log::line(line);
  for (const std::string& notice : config.notices) log::line(notice);
  log::line(config::format_arguments(config));
  log::line(concat("> launched by ", environment.launcher, ": ", environment.world_size, " rank(s) on ",
                   device.is_cuda() ? "CUDA" : "CPU", ", backend ",
                   config.parallel.backend == config::Backend::kNccl ? "nccl" : "gloo", ", ", threads,
                   " CPU thread(s) a rank"));
}

/// Trains as one member of the job. Throws what went wrong; `world` outlives the call so that the caller can tell the
/// others.
void run(const config::Config& config, const comm::LaunchEnvironment& environment,
         std::unique_ptr<comm::World>& world) {
  const auto started = std::chrono::steady_clock::now();
  const int threads = configure_threads(environment);
  configure_numerics(config);
  const at::Device device = select_device(config, environment);
  const bool first = environment.rank == 0;
  if (first) print_start(config, environment, device, threads);
  if (first) log::line("> initializing torch distributed ...");
  world = comm::World::connect(environment, world_options(config, device));
  world->end_on_signals();
  check_same_options(config, *world);
  // After the above, which would end the job at once on the same signal.
  std::optional<ExitSignals> exit_signals;
  if (config.training.exit_signal_handler) exit_signals.emplace(config.training);
  if (first) {
    for (const std::string& line : parallel_size_lines(config.parallel)) log::line(line);
    log::line(seed_line(config.training.seed));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    log::line(initialization_time_line(seconds.count()));
    log::line(datetime_line(label::kInitialized, timestamp()));
  }
  Trainer trainer(config, *world, device, log::line);
  trainer.run();
}

}  // namespace

ExitCode launch(const std::vector<std::string>& arguments) noexcept {
  comm::LaunchEnvironment environment;
  std::unique_ptr<comm::World> world;
  bool speaks = true;
  try {
    environment = comm::read_launch_environment();
    log::set_rank(environment.rank, environment.world_size);
    // What follows fails alike on every rank of a node until the ranks have met.
    speaks = environment.local_rank == 0;
    config::ParseContext context;
    context.world_size = environment.world_size;
    context.local_rank = environment.local_rank;
    context.machine = {built_with_cuda(), comm::visible_gpus(), environment.local_world_size};
    context.checkpoint_arguments = stored_arguments;
    config::ParsedCommand command = config::parse_command_line(arguments, context);
    if (environment.rank == 0) {
      for (const std::string& warning : command.warnings) log::warn(warning);
    }
    if (command.action != config::ParsedCommand::Action::kRun) {
      if (environment.rank == 0) {
        std::fputs(command.text.c_str(), stdout);
        std::fflush(stdout);
      }
      return ExitCode::kDone;
    }
    if (command.config.data.tokenizer_type != "NullTokenizer") {
      const data::TokenizerFacts facts = data::resolve_tokenizer(command.config);
      config::apply_tokenizer(command.config, facts.vocab_size, facts.eod, facts.pad);
    }
    speaks = true;
    run(command.config, environment, world);
    if (world) world->shutdown();
    return ExitCode::kDone;
  } catch (const AgreedError& error) {
    if (error.speaks()) log::error(error.what());
    try {
      if (world) world->shutdown();
    } catch (const std::exception&) {
      // The run has failed already, and its own reason has been printed.
    }
    return error.code();
  } catch (const std::exception& error) {
    const Error failure = translate(error);
    // What every rank finds alike before they have met is said once a node; surprises are said by each.
    if (speaks || dynamic_cast<const Error*>(&error) == nullptr) log::error(failure.what());
    if (world) {
      world->announce_failure(failure.what());
      ::_exit(static_cast<int>(failure.code()));
    }
    return failure.code();
  }
}

}  // namespace pgpt::training

#pragma once

#include <functional>
#include <optional>
#include <string>

namespace pgpt::comm {

/// Rank, world and rendezvous as found in the environment.
struct LaunchEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  std::string master_address = "127.0.0.1";
  int master_port = 29500;
  bool store_from_agent = false;  ///< torchrun's agent hosts the store (TORCHELASTIC_USE_AGENT_STORE)
  std::string launcher = "none";  ///< "torchrun", "Open MPI", "MPICH", "Slurm", "environment" or "none"
  std::string job_id;  ///< the launcher's name of this job and attempt, the same on every rank; empty when it has none
};

/// Reads one variable; returns nothing when unset. Tests pass their own.
using GetEnvironment = std::function<std::optional<std::string>(const std::string& name)>;

/// Reads the launcher's variables: torchrun's names win, then Open MPI, MPICH/PMI, Slurm, else one rank.
///
/// A Slurm allocation alone (no srun step) is one rank. Ranks on one node need no MASTER_ADDR and MASTER_PORT: they
/// meet on 127.0.0.1 and a port derived from the job id. Throws ConfigError naming variable and value for missing,
/// malformed, out-of-range or contradicting ones.
[[nodiscard]] LaunchEnvironment read_launch_environment(const GetEnvironment& get);
/// The same from the process's own environment.
[[nodiscard]] LaunchEnvironment read_launch_environment();

}  // namespace pgpt::comm

#include "pgpt/comm/launch.h"

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "pgpt/base/error.h"

namespace pgpt::comm {
namespace {

constexpr int kDefaultPort = 29500;
constexpr int kMaxRanks = 1 << 24;

/// Typed access to the variables; every error names the variable and its value.
class Reader {
 public:
  explicit Reader(const GetEnvironment& get) : get_(get) {}

  std::optional<std::string> text(const std::string& name) const { return get_(name); }
  bool has(const std::string& name) const { return get_(name).has_value(); }

  std::optional<int> integer(const std::string& name, int lowest, int highest) const {
    const auto value = get_(name);
    if (!value) return std::nullopt;
    PGPT_CHECK(ConfigError, !value->empty(), "environment variable ", name,
               " is set but empty; unset it or give it an integer");
    int number = 0;
    const char* end = value->data() + value->size();
    const auto [stop, failure] = std::from_chars(value->data(), end, number);
    PGPT_CHECK(ConfigError, failure != std::errc::invalid_argument && stop == end, "environment variable ", name, "=",
               *value, " is not an integer");
    PGPT_CHECK(ConfigError, failure == std::errc() && number >= lowest && number <= highest, "environment variable ",
               name, "=", *value, " is out of range: it must lie in ", lowest, "..", highest);
    return number;
  }

  int required(const std::string& name, int lowest, int highest, const std::string& because) const {
    const auto number = integer(name, lowest, highest);
    PGPT_CHECK(ConfigError, number.has_value(), "environment variable ", name, " is not set although ", because,
               "; export ", name);
    return *number;
  }

 private:
  const GetEnvironment& get_;
};

std::string setting(const Reader& env, const std::string& name) {
  return name + "=" + env.text(name).value_or("(unset)");
}

/// A launcher's rank and size variables.
struct RankNames {
  std::string launcher, rank, size;
};

/// Reads rank and size under these names, with rank < size.
void read_rank_and_size(const Reader& env, const RankNames& names, LaunchEnvironment& out) {
  out.launcher = names.launcher;
  out.world_size = env.required(names.size, 1, kMaxRanks, setting(env, names.rank) + " is");
  out.rank = env.required(names.rank, 0, kMaxRanks, setting(env, names.size) + " is");
  PGPT_CHECK(ConfigError, out.rank < out.world_size, "environment variable ", setting(env, names.rank),
             " is out of range: it must be below ", setting(env, names.size));
}

void check_local(const Reader& env, const std::string& rank_name, const std::string& size_name,
                 const LaunchEnvironment& out) {
  PGPT_CHECK(ConfigError, out.local_rank < out.local_world_size, "environment variable ", setting(env, rank_name),
             " is out of range: it must be below ", setting(env, size_name), " (", out.local_world_size,
             " ranks on this node)");
  PGPT_CHECK(ConfigError, out.local_world_size <= out.world_size, "environment variable ", setting(env, size_name),
             " contradicts the ", out.world_size, " ranks of the whole job");
  PGPT_CHECK(ConfigError, out.local_rank <= out.rank || out.local_world_size < out.world_size, "environment variable ",
             setting(env, rank_name), " contradicts rank ", out.rank, " of a job on one node");
}

/// One launcher set RANK and WORLD_SIZE, another its own names: both must tell the same.
void check_agreement(const Reader& env, const RankNames& other, const LaunchEnvironment& out) {
  if (!env.has(other.rank) || !env.has(other.size)) return;
  const int rank = *env.integer(other.rank, 0, kMaxRanks);
  const int size = *env.integer(other.size, 1, kMaxRanks);
  PGPT_CHECK(ConfigError, rank == out.rank && size == out.world_size, "environment variables ", setting(env, "RANK"),
             " ", setting(env, "WORLD_SIZE"), " contradict ", setting(env, other.rank), " ", setting(env, other.size),
             " of ", other.launcher, "; unset one set");
}

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.rfind("127.", 0) == 0;
}

/// Ranks per node from Slurm's list such as "2(x3),1", for node `node`.
int slurm_tasks_of_node(const Reader& env, const std::string& name, int node) {
  const std::string list = *env.text(name);
  const auto malformed = [&] {
    return ConfigError(concat("environment variable ", name, "=", list, " is not a list like 4(x2),3"));
  };
  size_t at = 0;
  const auto number = [&]() {
    int value = 0;
    const auto [stop, failure] = std::from_chars(list.data() + at, list.data() + list.size(), value);
    if (failure != std::errc() || value < 1) throw malformed();
    at = static_cast<size_t>(stop - list.data());
    return value;
  };
  int first = 0;
  while (true) {
    const int tasks = number();
    int nodes = 1;
    if (list.compare(at, 2, "(x") == 0) {
      at += 2;
      nodes = number();
      if (at >= list.size() || list[at] != ')') throw malformed();
      ++at;
    }
    if (node < first + nodes) return tasks;
    first += nodes;
    if (at == list.size()) break;
    if (list[at] != ',') throw malformed();
    ++at;
  }
  throw ConfigError(concat("environment variable ", setting(env, "SLURM_NODEID"), " is out of range: ", name, "=", list,
                           " has ", first, " nodes"));
}

const RankNames kTorchrun{"torchrun", "RANK", "WORLD_SIZE"};
const RankNames kOpenMpi{"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"};
const RankNames kMpich{"MPICH", "PMI_RANK", "PMI_SIZE"};

bool either(const Reader& env, const RankNames& names) { return env.has(names.rank) || env.has(names.size); }

/// True inside an srun step. The batch script's own shell has SLURM_PROCID=0 too, but no step variables.
bool in_slurm_step(const Reader& env) {
  const auto procid = env.integer("SLURM_PROCID", 0, kMaxRanks);
  if (!procid) return false;
  return *procid > 0 || env.has("SLURM_STEP_ID") || env.has("SLURM_STEPID") || env.has("SLURM_STEP_NUM_TASKS") ||
         env.has("SLURM_STEP_NODELIST");
}

/// A job of one rank may name either alone: the other's default, 0 or 1, is then the only value there is.
bool is_alone(const Reader& env) {
  if (env.has("RANK") && env.has("WORLD_SIZE")) return false;
  return env.integer("RANK", 0, kMaxRanks).value_or(0) == 0 && env.integer("WORLD_SIZE", 1, kMaxRanks).value_or(1) == 1;
}

void read_torchrun(const Reader& env, LaunchEnvironment& out) {
  if (!is_alone(env)) read_rank_and_size(env, kTorchrun, out);
  const bool elastic = env.has("TORCHELASTIC_RUN_ID");
  out.launcher = elastic ? "torchrun" : "environment";
  if (elastic) {
    out.job_id = *env.text("TORCHELASTIC_RUN_ID") + "/" + env.text("TORCHELASTIC_RESTART_COUNT").value_or("0");
    const auto agent = env.text("TORCHELASTIC_USE_AGENT_STORE");
    PGPT_CHECK(ConfigError, !agent || *agent == "True" || *agent == "False",
               "environment variable TORCHELASTIC_USE_AGENT_STORE=", agent.value_or(""), " is neither True nor False");
    out.store_from_agent = agent.value_or("False") == "True";
  } else {
    // Under a real torchrun the other names belong to the launcher of its agents; by hand they must agree.
    check_agreement(env, kOpenMpi, out);
    check_agreement(env, kMpich, out);
  }
  const auto address = env.text("MASTER_ADDR");
  const bool one_node = !address || is_loopback(*address);
  const auto local_rank = env.integer("LOCAL_RANK", 0, kMaxRanks);
  const auto local_size = env.integer("LOCAL_WORLD_SIZE", 1, kMaxRanks);
  // Without LOCAL_RANK the reference takes 0; on one node the rank itself is the better answer.
  out.local_rank = local_rank.value_or(one_node ? out.rank : 0);
  out.local_world_size = local_size.value_or(one_node ? out.world_size : out.local_rank + 1);
  check_local(env, "LOCAL_RANK", "LOCAL_WORLD_SIZE", out);
}

void read_open_mpi(const Reader& env, LaunchEnvironment& out) {
  read_rank_and_size(env, kOpenMpi, out);
  const std::string because = setting(env, "OMPI_COMM_WORLD_RANK") + " is";
  out.local_rank = env.required("OMPI_COMM_WORLD_LOCAL_RANK", 0, kMaxRanks, because);
  out.local_world_size = env.required("OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMaxRanks, because);
  check_local(env, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", out);
  for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}) {
    if (out.job_id.empty()) out.job_id = env.text(name).value_or("");
  }
}

void read_slurm_local(const Reader& env, LaunchEnvironment& out) {
  out.local_rank = env.required("SLURM_LOCALID", 0, kMaxRanks, setting(env, "SLURM_PROCID") + " is");
  const int node = env.integer("SLURM_NODEID", 0, kMaxRanks).value_or(0);
  std::string source = "SLURM_NTASKS";
  out.local_world_size = out.world_size;
  if (env.has("SLURM_STEP_TASKS_PER_NODE")) {
    source = "SLURM_STEP_TASKS_PER_NODE";
    out.local_world_size = slurm_tasks_of_node(env, source, node);
  } else if (env.has("SLURM_NTASKS_PER_NODE")) {
    source = "SLURM_NTASKS_PER_NODE";
    out.local_world_size = *env.integer(source, 1, kMaxRanks);
    if (out.local_world_size > out.world_size) out.local_world_size = out.world_size;
  } else if (env.has("SLURM_TASKS_PER_NODE")) {
    source = "SLURM_TASKS_PER_NODE";
    out.local_world_size = slurm_tasks_of_node(env, source, node);
  }
  check_local(env, "SLURM_LOCALID", source, out);
}

std::string slurm_job_id(const Reader& env) {
  const auto job = env.text("SLURM_JOB_ID");
  if (!job) return "";
  const auto step = env.has("SLURM_STEP_ID") ? env.text("SLURM_STEP_ID") : env.text("SLURM_STEPID");
  return *job + "." + step.value_or("0");
}

void read_mpich(const Reader& env, LaunchEnvironment& out) {
  read_rank_and_size(env, kMpich, out);
  if (!env.has("MPI_LOCALRANKID") && !env.has("MPI_LOCALNRANKS") && in_slurm_step(env)) {
    // srun --mpi=pmi2 sets the PMI names and leaves the node's share to Slurm's own.
    read_slurm_local(env, out);
    out.job_id = slurm_job_id(env);
    return;
  }
  const std::string because = setting(env, "PMI_RANK") + " is";
  out.local_rank = env.required("MPI_LOCALRANKID", 0, kMaxRanks, because);
  out.local_world_size = env.required("MPI_LOCALNRANKS", 1, kMaxRanks, because);
  check_local(env, "MPI_LOCALRANKID", "MPI_LOCALNRANKS", out);
}

void read_slurm(const Reader& env, LaunchEnvironment& out) {
  const std::string size_name = env.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS"
                                : env.has("SLURM_NTASKS")       ? "SLURM_NTASKS"
                                : env.has("SLURM_NPROCS")       ? "SLURM_NPROCS"
                                                                : "SLURM_NTASKS";
  read_rank_and_size(env, {"Slurm", "SLURM_PROCID", size_name}, out);
  read_slurm_local(env, out);
  out.job_id = slurm_job_id(env);
}

int port_of_job(const std::string& job_id) {
  if (job_id.empty()) return kDefaultPort;
  uint64_t hash = 14695981039346656037ull;  // FNV-1a: the same on every host and compiler
  for (const char c : job_id) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return 10000 + static_cast<int>(hash % 20000);  // below the kernel's range of outgoing ports
}

void read_rendezvous(const Reader& env, LaunchEnvironment& out) {
  const auto address = env.text("MASTER_ADDR");
  const auto port = env.integer("MASTER_PORT", 1, 65535);
  PGPT_CHECK(ConfigError, !address || !address->empty(), "environment variable MASTER_ADDR is set but empty");
  const bool one_node = out.local_world_size == out.world_size;
  if (!one_node && (!address || !port)) {
    const std::string missing = !address && !port ? "MASTER_ADDR and MASTER_PORT are"
                                : !address        ? "MASTER_ADDR is"
                                                  : "MASTER_PORT is";
    throw ConfigError(concat(
        missing, " not set although the ", out.world_size, " ranks span several nodes (", out.local_world_size,
        " on this one): export MASTER_ADDR=<host of rank 0> and MASTER_PORT=<free port there> on every rank",
        out.launcher == "Slurm" ? ", e.g. MASTER_ADDR=$(scontrol show hostnames \"$SLURM_STEP_NODELIST\" | head -n 1)"
        : out.launcher == "Open MPI" ? ", e.g. with mpirun -x MASTER_ADDR -x MASTER_PORT"
                                     : ""));
  }
  PGPT_CHECK(ConfigError, !out.store_from_agent || (address && port),
             "environment variable TORCHELASTIC_USE_AGENT_STORE=True needs ", !address ? "MASTER_ADDR" : "MASTER_PORT",
             ", which is not set");
  out.master_address = address.value_or("127.0.0.1");
  out.master_port = port.value_or(port_of_job(out.job_id));
}

}  // namespace

LaunchEnvironment read_launch_environment(const GetEnvironment& get) {
  const Reader env(get);
  LaunchEnvironment out;
  if (either(env, kTorchrun)) {
    read_torchrun(env, out);
  } else if (either(env, kOpenMpi)) {
    read_open_mpi(env, out);
  } else if (either(env, kMpich)) {
    read_mpich(env, out);
  } else if (in_slurm_step(env)) {
    read_slurm(env, out);
  } else {
    PGPT_CHECK(ConfigError, !env.has("LOCAL_RANK"), "environment variable ", setting(env, "LOCAL_RANK"),
               " is set but RANK and WORLD_SIZE are not; export all three or none");
    return out;
  }
  read_rendezvous(env, out);
  return out;
}

LaunchEnvironment read_launch_environment() {
  return read_launch_environment([](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  });
}

}  // namespace pgpt::comm

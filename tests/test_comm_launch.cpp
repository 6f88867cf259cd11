// Launch environments of every launcher, right and wrong.
#include <map>

#include "pgpt/base/error.h"
#include "pgpt/comm/launch.h"
#include "support/catch.h"
#include "support/text.h"

namespace {

using pgpt::comm::LaunchEnvironment;
using pgpt::test::contains;
using Variables = std::map<std::string, std::string>;

LaunchEnvironment read(const Variables& variables) {
  return pgpt::comm::read_launch_environment([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}

Variables with(Variables base, const Variables& changes, const std::vector<std::string>& removed = {}) {
  for (const auto& [name, value] : changes) base[name] = value;
  for (const auto& name : removed) base.erase(name);
  return base;
}

std::string refusal(const Variables& variables) {
  return pgpt::test::error_of<pgpt::ConfigError>([&] { read(variables); });
}

struct Expected {
  std::string launcher;
  int rank, world_size, local_rank, local_world_size;
};

void check(const Variables& variables, const Expected& expected) {
  const auto env = read(variables);
  CHECK(env.launcher == expected.launcher);
  CHECK(env.rank == expected.rank);
  CHECK(env.world_size == expected.world_size);
  CHECK(env.local_rank == expected.local_rank);
  CHECK(env.local_world_size == expected.local_world_size);
}

const Variables kTorchrun{{"RANK", "3"},
                          {"WORLD_SIZE", "4"},
                          {"LOCAL_RANK", "1"},
                          {"LOCAL_WORLD_SIZE", "2"},
                          {"MASTER_ADDR", "node0"},
                          {"MASTER_PORT", "1234"},
                          {"TORCHELASTIC_RUN_ID", "job7"},
                          {"TORCHELASTIC_RESTART_COUNT", "2"},
                          {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
const Variables kPlain{{"RANK", "1"}, {"WORLD_SIZE", "2"}};
const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                         {"PMIX_NAMESPACE", "3141"}};
const Variables kMpich{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
const Variables kSlurm{{"SLURM_JOB_ID", "99"},
                       {"SLURM_STEP_ID", "0"},
                       {"SLURM_PROCID", "5"},
                       {"SLURM_NTASKS", "7"},
                       {"SLURM_LOCALID", "1"},
                       {"SLURM_NODEID", "2"},
                       {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                       {"MASTER_ADDR", "node0"},
                       {"MASTER_PORT", "1234"}};

}  // namespace

TEST_CASE("each launcher's variables give rank, world and place on the node", "[cpu]") {
  check({}, {"none", 0, 1, 0, 1});
  check(kTorchrun, {"torchrun", 3, 4, 1, 2});
  check(kPlain, {"environment", 1, 2, 1, 2});
  check({{"WORLD_SIZE", "1"}}, {"environment", 0, 1, 0, 1});
  check({{"RANK", "0"}}, {"environment", 0, 1, 0, 1});
  check(with(kPlain, {{"MASTER_ADDR", "node0"}, {"MASTER_PORT", "5"}}), {"environment", 1, 2, 0, 1});
  check(kOpenMpi, {"Open MPI", 1, 2, 1, 2});
  check(kMpich, {"MPICH", 1, 2, 1, 2});
  check(kSlurm, {"Slurm", 5, 7, 1, 2});
  check(with(kSlurm, {{"SLURM_PROCID", "6"}, {"SLURM_LOCALID", "0"}, {"SLURM_NODEID", "3"}}), {"Slurm", 6, 7, 0, 1});
  check(with(kSlurm, {{"SLURM_NTASKS_PER_NODE", "2"}}, {"SLURM_STEP_TASKS_PER_NODE"}), {"Slurm", 5, 7, 1, 2});
  // srun --mpi=pmi2: rank and size from PMI, the place on the node from Slurm.
  check(with(kSlurm, {{"PMI_RANK", "5"}, {"PMI_SIZE", "7"}}), {"MPICH", 5, 7, 1, 2});
}

TEST_CASE("rank 1 of two under Slurm's three basic variables is enough on one node", "[cpu]") {
  check({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_LOCALID", "1"}, {"SLURM_JOB_ID", "4"}},
        {"Slurm", 1, 2, 1, 2});
}

TEST_CASE("a Slurm allocation without srun is one rank", "[cpu]") {
  check({{"SLURM_JOB_ID", "99"}, {"SLURM_NTASKS", "8"}, {"SLURM_TASKS_PER_NODE", "4(x2)"}}, {"none", 0, 1, 0, 1});
  // The batch script itself has SLURM_PROCID=0 as well, but is no step.
  check({{"SLURM_JOB_ID", "99"}, {"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}},
        {"none", 0, 1, 0, 1});
}

TEST_CASE("torchrun's names win over those of the launcher that started its agents", "[cpu]") {
  Variables both = kTorchrun;
  for (const auto& [name, value] : kOpenMpi) both[name] = value;
  for (const auto& [name, value] : kSlurm) both.emplace(name, value);
  check(both, {"torchrun", 3, 4, 1, 2});
}

TEST_CASE("a wrapper may export torchrun's names under mpirun as long as both agree", "[cpu]") {
  Variables both = kPlain;
  for (const auto& [name, value] : kOpenMpi) both[name] = value;
  check(both, {"environment", 1, 2, 1, 2});
  CHECK(contains(refusal(with(both, {{"RANK", "0"}})),
                 "RANK=0 WORLD_SIZE=2 contradict OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2"));
  CHECK(contains(refusal(with(both, {{"WORLD_SIZE", "4"}})), "WORLD_SIZE=4"));
}

TEST_CASE("the agent's store is used when torchrun offers it, and the job id names run and restart", "[cpu]") {
  const auto env = read(kTorchrun);
  CHECK(env.store_from_agent);
  CHECK(env.job_id == "job7/2");
  CHECK(env.master_address == "node0");
  CHECK(env.master_port == 1234);
  CHECK_FALSE(read(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).store_from_agent);
}

TEST_CASE("ranks on one node meet on the loopback at a port of the job id", "[cpu]") {
  const auto first = read(kOpenMpi);
  CHECK(first.master_address == "127.0.0.1");
  CHECK(first.master_port >= 10000);
  CHECK(first.master_port < 30000);
  CHECK(read(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}})).master_port ==
        first.master_port);
  CHECK(read(with(kOpenMpi, {{"PMIX_NAMESPACE", "3142"}})).master_port != first.master_port);
  CHECK(read(kPlain).master_port == 29500);
  CHECK(read(with(kPlain, {{"MASTER_PORT", "777"}})).master_port == 777);
}

TEST_CASE("ranks on several nodes without MASTER_ADDR or MASTER_PORT are told what to export", "[cpu]") {
  const auto mpi = with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "4"}});
  CHECK(contains(refusal(mpi), "MASTER_ADDR and MASTER_PORT are not set"));
  CHECK(contains(refusal(with(mpi, {{"MASTER_ADDR", "node0"}})), "MASTER_PORT is not set"));
  CHECK(contains(refusal(with(mpi, {{"MASTER_PORT", "1"}})), "MASTER_ADDR is not set"));
  CHECK(contains(refusal(with(kSlurm, {}, {"MASTER_ADDR"})), "scontrol show hostnames"));
  CHECK(read(with(mpi, {{"MASTER_ADDR", "node0"}, {"MASTER_PORT", "1"}})).master_address == "node0");
}

TEST_CASE("missing, malformed, out-of-range and contradicting variables are refused by name and value", "[cpu]") {
  struct Case {
    Variables variables;
    std::string named;
  };
  const std::vector<Case> cases{
      {with(kPlain, {}, {"RANK"}), "RANK is not set although WORLD_SIZE=2 is"},
      {{{"WORLD_SIZE", "0"}}, "WORLD_SIZE=0"},
      {with(kPlain, {}, {"WORLD_SIZE"}), "WORLD_SIZE is not set although RANK=1 is"},
      {with(kPlain, {{"RANK", "two"}}), "RANK=two is not an integer"},
      {with(kPlain, {{"RANK", ""}}), "RANK is set but empty"},
      {with(kPlain, {{"RANK", "1x"}}), "RANK=1x is not an integer"},
      {with(kPlain, {{"RANK", " 1"}}), "RANK= 1 is not an integer"},
      {with(kPlain, {{"RANK", "1.0"}}), "RANK=1.0 is not an integer"},
      {with(kPlain, {{"RANK", "-1"}}), "RANK=-1 is out of range"},
      {with(kPlain, {{"RANK", "2"}}), "RANK=2 is out of range: it must be below WORLD_SIZE=2"},
      {with(kPlain, {{"RANK", "99999999999999999999"}}), "RANK=99999999999999999999 is out of range"},
      {with(kPlain, {{"WORLD_SIZE", "0"}}), "WORLD_SIZE=0 is out of range"},
      {with(kPlain, {{"WORLD_SIZE", "1e3"}}), "WORLD_SIZE=1e3 is not an integer"},
      {with(kTorchrun, {{"LOCAL_RANK", "2"}}), "LOCAL_RANK=2 is out of range: it must be below LOCAL_WORLD_SIZE=2"},
      {with(kTorchrun, {{"LOCAL_RANK", "x"}}), "LOCAL_RANK=x is not an integer"},
      {with(kTorchrun, {{"LOCAL_WORLD_SIZE", "5"}}), "LOCAL_WORLD_SIZE=5 contradicts the 4 ranks"},
      {with(kTorchrun, {{"MASTER_PORT", "0"}}), "MASTER_PORT=0 is out of range"},
      {with(kTorchrun, {{"MASTER_PORT", "65536"}}), "MASTER_PORT=65536 is out of range"},
      {with(kTorchrun, {{"MASTER_PORT", "http"}}), "MASTER_PORT=http is not an integer"},
      {with(kTorchrun, {{"MASTER_ADDR", ""}}), "MASTER_ADDR is set but empty"},
      {with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "maybe"}}), "TORCHELASTIC_USE_AGENT_STORE=maybe"},
      {with(kTorchrun, {{"LOCAL_WORLD_SIZE", "4"}}, {"MASTER_ADDR"}), "needs MASTER_ADDR"},
      {{{"LOCAL_RANK", "0"}}, "LOCAL_RANK=0 is set but RANK and WORLD_SIZE are not"},
      {with(kOpenMpi, {}, {"OMPI_COMM_WORLD_RANK"}),
       "OMPI_COMM_WORLD_RANK is not set although OMPI_COMM_WORLD_SIZE=2 is"},
      {with(kOpenMpi, {}, {"OMPI_COMM_WORLD_SIZE"}), "OMPI_COMM_WORLD_SIZE is not set"},
      {with(kOpenMpi, {}, {"OMPI_COMM_WORLD_LOCAL_RANK"}), "OMPI_COMM_WORLD_LOCAL_RANK is not set"},
      {with(kOpenMpi, {}, {"OMPI_COMM_WORLD_LOCAL_SIZE"}), "OMPI_COMM_WORLD_LOCAL_SIZE is not set"},
      {with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "7"}}), "OMPI_COMM_WORLD_RANK=7 is out of range"},
      {with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_RANK", "2"}}), "OMPI_COMM_WORLD_LOCAL_RANK=2 is out of range"},
      {with(kMpich, {}, {"PMI_SIZE"}), "PMI_SIZE is not set although PMI_RANK=1 is"},
      {with(kMpich, {}, {"MPI_LOCALRANKID"}), "MPI_LOCALRANKID is not set"},
      {with(kMpich, {{"PMI_RANK", "a"}}), "PMI_RANK=a is not an integer"},
      {with(kSlurm, {}, {"SLURM_NTASKS"}), "SLURM_NTASKS is not set although SLURM_PROCID=5 is"},
      {with(kSlurm, {{"SLURM_PROCID", "7"}}), "SLURM_PROCID=7 is out of range: it must be below SLURM_NTASKS=7"},
      {with(kSlurm, {{"SLURM_PROCID", "x"}}), "SLURM_PROCID=x is not an integer"},
      {with(kSlurm, {}, {"SLURM_LOCALID"}), "SLURM_LOCALID is not set"},
      {with(kSlurm, {{"SLURM_LOCALID", "2"}}),
       "SLURM_LOCALID=2 is out of range: it must be below SLURM_STEP_TASKS_PER_NODE=2(x3),1"},
      {with(kSlurm, {{"SLURM_NODEID", "4"}}), "SLURM_NODEID=4 is out of range"},
      {with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "2(y3)"}}), "SLURM_STEP_TASKS_PER_NODE=2(y3) is not a list"},
      {with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", ""}}), "SLURM_STEP_TASKS_PER_NODE= is not a list"},
      {with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "2(x"}}), "SLURM_STEP_TASKS_PER_NODE=2(x is not a list"},
  };
  for (const auto& c : cases) {
    const std::string text = refusal(c.variables);
    INFO("expected: " << c.named << "\ngot: " << text);
    CHECK(contains(text, c.named));
    CHECK_FALSE(contains(text, "\n"));
  }
}

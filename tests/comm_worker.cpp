// One rank for the process tests of test_comm_processes.cpp: comm_worker SCENARIO [ARGUMENT...].
#include "comm_worker.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "pgpt/base/error.h"
#include "pgpt/base/log.h"
#include "pgpt/comm/world.h"

std::vector<int> comm_worker::everybody(const pgpt::comm::World& world) {
  std::vector<int> ranks(static_cast<size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

namespace {

using namespace pgpt;
using comm_worker::everybody;
using std::chrono::milliseconds;

milliseconds from_environment(const char* name, int fallback) {
  const char* value = std::getenv(name);
  return milliseconds(value != nullptr ? std::atoi(value) : fallback);
}

comm::WorldOptions options() {
  comm::WorldOptions result;
  result.rendezvous_timeout = from_environment("PGPT_TEST_RENDEZVOUS_MS", 30'000);
  result.timeout = from_environment("PGPT_TEST_TIMEOUT_MS", 30'000);
  return result;
}

void say(const std::string& text) { log::line(text); }

/// One sum over all ranks, checked.
void sum_once(comm::Communicator& group) {
  at::Tensor value = at::full({1000}, group.rank() + 1, at::kFloat);
  group.all_reduce(value, comm::ReduceOp::kSum).wait();
  const float expected = static_cast<float>(group.size() * (group.size() + 1)) / 2;
  if (!at::equal(value, at::full({1000}, expected, at::kFloat))) throw std::runtime_error("wrong sum");
}

/// Every collective once, with several in flight, in the given device's memory; throws on a wrong result.
void check_collectives(comm::World& world, comm::Communicator& group, at::Device device) {
  const int size = group.size();
  const int self = group.rank();
  const auto require = [](bool condition, const char* what) {
    if (!condition) throw std::runtime_error(std::string("wrong result of ") + what);
  };
  const auto on_device = [&](at::ScalarType dtype) { return at::TensorOptions().device(device).dtype(dtype); };
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t n : {0, 5, 4096}) {
      const at::Tensor own = at::full({n}, self + 1, on_device(dtype));
      at::Tensor gathered = at::zeros({n * size}, on_device(dtype));
      at::Tensor summed = own.clone();
      at::Tensor averaged = own.clone();
      at::Tensor largest = own.clone();
      const at::Tensor spread =
          at::arange(size, on_device(dtype)).repeat_interleave(n) + self;  // part r holds r + self
      at::Tensor scattered = at::zeros({n}, on_device(dtype));
      at::Tensor exchanged = at::zeros({n * size}, on_device(dtype));
      at::Tensor sent_around = own.clone();
      std::vector<comm::Pending> pending;
      pending.push_back(group.all_gather(gathered, own));
      pending.push_back(group.all_reduce(summed, comm::ReduceOp::kSum));
      pending.push_back(group.all_reduce(averaged, comm::ReduceOp::kAverage));
      pending.push_back(group.all_reduce(largest, comm::ReduceOp::kMax));
      pending.push_back(group.reduce_scatter(scattered, spread, comm::ReduceOp::kSum));
      pending.push_back(group.all_to_all(exchanged, spread));
      pending.push_back(group.broadcast(sent_around, size - 1));
      for (auto& p : pending) {
        require(p.active(), "active");
        p.wait();
      }
      at::Tensor received = at::zeros({n}, on_device(dtype));
      if (self % 2 == 0 && self + 1 < size) group.send(own, self + 1).wait();
      if (self % 2 == 1) {
        group.receive(received, self - 1).wait();
        require(at::equal(received, at::full({n}, self, on_device(dtype))), "send and receive");
      }
      const double total = size * (size + 1) / 2.0;
      require(at::equal(gathered, (at::arange(size, on_device(dtype)) + 1).repeat_interleave(n)), "all_gather");
      require(at::equal(summed, at::full({n}, total, on_device(dtype))), "sum");
      require(at::equal(averaged, at::full({n}, total / size, on_device(dtype))), "average");
      require(at::equal(largest, at::full({n}, size, on_device(dtype))), "maximum");
      require(at::equal(scattered, at::full({n}, size * self + size * (size - 1) / 2.0, on_device(dtype))),
              "reduce_scatter");
      require(at::equal(exchanged, at::arange(size, on_device(dtype)).repeat_interleave(n) + self), "all_to_all");
      require(at::equal(sent_around, at::full({n}, size, on_device(dtype))), "broadcast");
    }
  }
  auto fast = world.create_group("fast", everybody(world), {.high_priority = true});
  fast->barrier();
}

void run(std::unique_ptr<comm::World>& world, const std::vector<std::string>& arguments) {
  const std::string scenario = arguments.at(0);
  const auto env = comm::read_launch_environment();
  if (scenario == "cycles") {
    const int count = std::stoi(arguments.at(1));
    for (int i = 0; i < count; ++i) {
      world = comm::World::connect(env, options());
      auto all = world->create_group("data", everybody(*world));
      sum_once(*all);
      world->shutdown();
      world.reset();
    }
    say("rank " + std::to_string(env.rank) + " done");
    return;
  }
  if (scenario == "collectives") {  // BACKEND (nccl or gloo) DEVICE (cpu or cuda)
    auto wanted = options();
    wanted.backend = arguments.at(1) == "nccl" ? comm::BackendKind::kNccl : comm::BackendKind::kGloo;
    wanted.tensors_on_gpu = arguments.at(2) == "cuda";
    at::Device device(at::kCPU);
    if (wanted.tensors_on_gpu) {
      const int gpus = comm::visible_gpus();
      comm::check_device_assignment(env, wanted.backend, gpus);
      device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(env.local_rank % gpus));
      c10::impl::VirtualGuardImpl(at::kCUDA).setDevice(device);
    }
    world = comm::World::connect(env, wanted);
    {
      auto all = world->create_group("data", everybody(*world));
      check_collectives(*world, *all, device);
    }
    world->shutdown();
    say("rank " + std::to_string(env.rank) + " done");
    return;
  }
  if (scenario == "copy-engine") {  // SCENARIO
    comm_worker::run_copy_engine(world, env, options(), arguments.at(1));
    return;
  }
  world = comm::World::connect(env, options());
  auto all = world->create_group("data", everybody(*world));
  sum_once(*all);
  say("rank " + std::to_string(env.rank) + " of " + std::to_string(env.world_size) + " connected by " + env.launcher);
  const int victim = arguments.size() > 1 ? std::stoi(arguments.at(1)) : 0;
  if (scenario == "once") {
    all->barrier();
  } else if (scenario == "throw") {
    if (world->rank() == victim) throw DataError("the disk is on fire");
    all->barrier();
  } else if (scenario == "loop") {
    world->end_on_signals();
    for (int step = 1;; ++step) {
      world->set_activity("training step " + std::to_string(step));
      sum_once(*all);
      if (step == 3) say("looping");
      std::this_thread::sleep_for(milliseconds(5));
    }
  } else if (scenario == "idle") {  // the victim stays away from the collective but lives
    world->set_activity(world->rank() == victim ? "a long nap" : "training step 7");
    if (world->rank() == victim) {
      if (arguments.size() > 2) world->set_slow(milliseconds(std::stoi(arguments.at(2))));
      std::this_thread::sleep_for(milliseconds(arguments.size() > 3 ? std::stoi(arguments.at(3)) : 60'000));
      world->set_slow(milliseconds(0));
    }
    all->barrier();
  } else {
    throw ConfigError("unknown scenario " + scenario);
  }
  all.reset();
  world->shutdown();
  say("rank " + std::to_string(env.rank) + " done");
}

}  // namespace

int main(int argc, char** argv) {
  std::unique_ptr<comm::World> world;
  int code = 0;
  try {
    run(world, {argv + 1, argv + argc});
  } catch (const Error& error) {
    log::error(error.what());
    code = static_cast<int>(error.code());
    if (world) world->announce_failure(error.what());
  } catch (const std::exception& error) {
    log::error(error.what());
    code = 1;
    if (world) world->announce_failure(error.what());
  }
  if (code != 0) ::_exit(code);
  return 0;
}

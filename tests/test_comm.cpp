// Collectives on ranks that are threads of this process, against the same sums computed in one place.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <atomic>
#include <exception>
#include <functional>
#include <numeric>
#include <thread>

#include "pgpt/base/error.h"
#include "pgpt/comm/world.h"
#include "support/catch.h"
#include "support/text.h"

namespace {

using namespace pgpt;
using comm::Communicator;
using comm::Pending;
using comm::ReduceOp;
using comm::World;
using test::contains;

std::vector<int> first_ranks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// Runs `body` on `size` ranks, each a thread; rethrows the first exception.
void on_ranks(int size, const std::function<void(World&)>& body,
              std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  auto worlds = World::connect_threads(size, timeout);
  std::vector<std::exception_ptr> failures(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      const auto index = static_cast<size_t>(r);
      try {
        const at::NoGradGuard no_grad;
        body(*worlds[index]);
        worlds[index]->shutdown();
      } catch (...) {
        failures[index] = std::current_exception();
      }
      worlds[index].reset();
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

/// Catch2's assertions are not for several threads: ranks throw instead.
void expect(bool condition, const std::string& text) {
  if (!condition) throw std::runtime_error(text);
}

/// Rank r's data: small integers, so that every dtype's sum over four ranks is exact (below 8 bits of mantissa).
at::Tensor data_of(int rank, int64_t numel, at::ScalarType dtype) {
  return (at::arange(numel, at::kLong) * (rank + 1) % 13 - (dtype == at::kByte ? 0 : 5)).to(dtype);
}

at::Tensor reduced(int size, int64_t numel, at::ScalarType dtype, ReduceOp op) {
  at::Tensor result = data_of(0, numel, at::kDouble == dtype ? dtype : dtype).to(at::kDouble);
  for (int r = 1; r < size; ++r) {
    const at::Tensor next = data_of(r, numel, dtype).to(at::kDouble);
    result = op == ReduceOp::kMax   ? at::maximum(result, next)
             : op == ReduceOp::kMin ? at::minimum(result, next)
                                    : result + next;
  }
  if (op == ReduceOp::kAverage) result = result / size;  // 2 and 4 ranks: exact in every floating-point dtype
  return result.to(dtype);
}

const std::vector<at::ScalarType> kReducible{at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kInt, at::kLong};
const std::vector<at::ScalarType> kMovable{at::kFloat, at::kDouble, at::kBFloat16, at::kHalf,          at::kInt,
                                           at::kLong,  at::kByte,   at::kBool,     at::kFloat8_e4m3fn, at::kShort};
const std::vector<int64_t> kSizes{0, 1, 7, 1000};

std::string label(const char* what, int size, at::ScalarType dtype, int64_t numel, ReduceOp op = ReduceOp::kSum) {
  return concat(what, " on ", size, " ranks, ", dtype, ", ", numel, " elements, op ", static_cast<int>(op));
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() &&
         at::equal(a.contiguous().view({-1}).view(at::kByte), b.contiguous().view({-1}).view(at::kByte));
}

}  // namespace

TEST_CASE("all_reduce equals the serial result for every dtype and operation", "[cpu][dist]") {
  for (const int size : {2, 4}) {
    on_ranks(size, [size](World& world) {
      auto group = world.create_group("all", first_ranks(size));
      for (const auto dtype : kReducible) {
        for (const int64_t numel : kSizes) {
          for (const auto op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMax, ReduceOp::kMin}) {
            if (op == ReduceOp::kAverage && !at::isFloatingType(dtype)) continue;
            at::Tensor tensor = data_of(group->rank(), numel, dtype);
            Pending pending = group->all_reduce(tensor, op);
            expect(pending.active(), "active before wait");
            pending.wait();
            expect(!pending.active(), "not active after wait");
            pending.wait();
            expect(same_bytes(tensor, reduced(size, numel, dtype, op)), label("all_reduce", size, dtype, numel, op));
          }
        }
      }
    });
  }
}

TEST_CASE("reduce_scatter equals the serial result, also when the output is a part of the input", "[cpu][dist]") {
  for (const int size : {2, 4}) {
    on_ranks(size, [size](World& world) {
      auto group = world.create_group("all", first_ranks(size));
      for (const auto dtype : kReducible) {
        for (const int64_t numel : kSizes) {
          for (const auto op : {ReduceOp::kSum, ReduceOp::kAverage}) {
            if (op == ReduceOp::kAverage && !at::isFloatingType(dtype)) continue;
            for (const bool in_place : {false, true}) {
              at::Tensor input = data_of(group->rank(), numel * size, dtype);
              at::Tensor output =
                  in_place ? input.narrow(0, group->rank() * numel, numel) : at::empty({numel}, input.options());
              group->reduce_scatter(output, input, op).wait();
              const at::Tensor expected =
                  reduced(size, numel * size, dtype, op).narrow(0, group->rank() * numel, numel);
              expect(same_bytes(output, expected),
                     label(in_place ? "reduce_scatter in place" : "reduce_scatter", size, dtype, numel, op));
            }
          }
        }
      }
    });
  }
}

TEST_CASE("reduce_scatter_add equals reduce_scatter and an addition, bit for bit", "[cpu][dist]") {
  for (const int size : {1, 2, 3}) {
    on_ranks(size, [size](World& world) {
      auto group = world.create_group("all", first_ranks(size));
      group->share({at::zeros({3})});  // nothing to do here, but allowed everywhere
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
        for (const auto accumulator_dtype : {dtype, at::kFloat}) {
          if (dtype == at::kDouble && accumulator_dtype != dtype) continue;
          for (const int64_t numel : kSizes) {
            for (const bool overwrite : {false, true}) {
              auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(23 + world.rank()));
              const at::Tensor input =
                  at::randn({numel * size}, generator, at::TensorOptions().dtype(at::kFloat)).to(dtype);
              at::Tensor accumulator =
                  at::randn({numel}, generator, at::TensorOptions().dtype(at::kFloat)).to(accumulator_dtype);
              at::Tensor part = at::empty({numel}, input.options());
              group->reduce_scatter(part, input, ReduceOp::kSum).wait();
              const at::Tensor expected = overwrite ? part.to(accumulator_dtype) : accumulator.clone().add_(part);
              Pending pending = group->reduce_scatter_add(accumulator, input, overwrite);
              expect(pending.active() == (size > 1), "in flight unless the rank is alone");
              pending.wait();
              expect(same_bytes(accumulator, expected), label("reduce_scatter_add", size, dtype, numel));
            }
          }
        }
      }
    });
  }
}

TEST_CASE("reduce_scatter_others leaves out this rank's part", "[cpu][dist]") {
  for (const int size : {1, 2, 3}) {
    on_ranks(size, [size](World& world) {
      auto group = world.create_group("all", first_ranks(size));
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
        for (const int64_t numel : kSizes) {
          // Small integers: every sum is exact.
          const at::Tensor input = data_of(group->rank(), numel * size, at::kLong).remainder(17).to(dtype);
          at::Tensor sum = at::empty({numel}, input.options());
          group->reduce_scatter(sum, input, ReduceOp::kSum).wait();
          const at::Tensor others = sum - input.narrow(0, group->rank() * numel, numel);
          at::Tensor accumulator = at::full({numel}, 3, input.options());
          group->reduce_scatter_others(accumulator, input, /*overwrite=*/false).wait();
          expect(same_bytes(accumulator, others + 3), label("reduce_scatter_others", size, dtype, numel));
          group->reduce_scatter_others(accumulator, input, /*overwrite=*/true).wait();
          expect(same_bytes(accumulator, others.clone()),
                 label("reduce_scatter_others, replacing", size, dtype, numel));
        }
      }
    });
  }
}

TEST_CASE("all_gather, broadcast, all_to_all, send and receive move every dtype bit for bit", "[cpu][dist]") {
  for (const int size : {2, 4}) {
    on_ranks(size, [size](World& world) {
      auto group = world.create_group("all", first_ranks(size));
      const int self = group->rank();
      for (const auto dtype : kMovable) {
        for (const int64_t numel : kSizes) {
          std::vector<at::Tensor> parts;
          for (int r = 0; r < size; ++r) parts.push_back(data_of(r, numel, at::kLong).to(dtype));
          const at::Tensor& own = parts[static_cast<size_t>(self)];
          const at::Tensor all = at::cat(parts);
          const at::Tensor fenced = at::empty({size * numel}, own.options());
          group->fence().wait();
          group->all_gather_fenced(fenced, own).wait();
          expect(same_bytes(fenced, all), label("all_gather_fenced", size, dtype, numel));

          at::Tensor gathered = at::empty({numel * size}, own.options());
          group->all_gather(gathered, own).wait();
          expect(same_bytes(gathered, all), label("all_gather", size, dtype, numel));

          at::Tensor in_place = at::zeros({numel * size}, at::kFloat).to(dtype);
          at::Tensor slot = in_place.narrow(0, self * numel, numel);
          slot.copy_(own);
          group->all_gather(in_place, slot).wait();
          expect(same_bytes(in_place, all), label("all_gather in place", size, dtype, numel));

          for (int root = 0; root < size; ++root) {
            at::Tensor tensor = own.clone();
            group->broadcast(tensor, root).wait();
            expect(same_bytes(tensor, parts[static_cast<size_t>(root)]), label("broadcast", size, dtype, numel));
          }

          // Rank s sends part d = its data shifted by d.
          const auto part = [&](int source, int target) {
            return data_of(source + 3 * target, numel, at::kLong).to(dtype);
          };
          std::vector<at::Tensor> outgoing;
          std::vector<at::Tensor> incoming;
          for (int r = 0; r < size; ++r) {
            outgoing.push_back(part(self, r));
            incoming.push_back(part(r, self));
          }
          at::Tensor received = at::empty({numel * size}, own.options());
          group->all_to_all(received, at::cat(outgoing)).wait();
          expect(same_bytes(received, at::cat(incoming)), label("all_to_all", size, dtype, numel));

          const int next = (self + 1) % size;
          const int previous = (self + size - 1) % size;
          at::Tensor from_previous = at::empty({numel}, own.options());
          Pending sent = group->send(own, next);
          Pending arriving = group->receive(from_previous, previous);
          arriving.wait();
          sent.wait();
          expect(same_bytes(from_previous, parts[static_cast<size_t>(previous)]),
                 label("send/receive", size, dtype, numel));
        }
      }
    });
  }
}

TEST_CASE("several collectives may be in flight and finish in any order of waiting", "[cpu][dist]") {
  on_ranks(2, [](World& world) {
    auto first = world.create_group("first", {0, 1});
    auto second = world.create_group("second", {1, 0});
    expect(second->rank() == 1 - world.rank(), "rank follows the order of the list");
    std::vector<at::Tensor> tensors;
    std::vector<Pending> pending;
    for (int i = 0; i < 20; ++i) {
      tensors.push_back(at::full({257}, i + world.rank(), at::kFloat));
      pending.push_back((i % 2 == 0 ? first : second)->all_reduce(tensors.back(), ReduceOp::kSum));
    }
    for (size_t i = pending.size(); i-- > 0;) pending[i].wait();
    for (int i = 0; i < 20; ++i) {
      expect(at::equal(tensors[static_cast<size_t>(i)], at::full({257}, 2 * i + 1, at::kFloat)), concat("tensor ", i));
    }
    Pending moved = first->all_reduce(tensors[0], ReduceOp::kMax);
    Pending target = std::move(moved);
    expect(!moved.active() && target.active(), "a moved handle is empty");  // NOLINT(bugprone-use-after-move)
    target.wait();
  });
}

TEST_CASE("sums of random data repeat bit for bit and agree on all ranks", "[cpu][dist]") {
  constexpr int kRanks = 4;
  std::vector<at::Tensor> results(kRanks * 2);
  for (int repeat = 0; repeat < 2; ++repeat) {
    on_ranks(kRanks, [&](World& world) {
      auto group = world.create_group("all", first_ranks(kRanks));
      auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(17 + world.rank()));
      at::Tensor tensor = at::randn({10'007}, generator, at::TensorOptions().dtype(at::kFloat));
      group->all_reduce(tensor, ReduceOp::kSum).wait();
      results[static_cast<size_t>(repeat * kRanks + world.rank())] = tensor;
    });
  }
  for (size_t i = 1; i < results.size(); ++i) CHECK(same_bytes(results[0], results[i]));
}

TEST_CASE("groups may be disjoint parts of the world, and a group of one needs no partner", "[cpu][dist]") {
  on_ranks(4, [](World& world) {
    const int r = world.rank();
    auto pairs = world.create_group("pairs", r < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3});
    auto columns = world.create_group("columns", r % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{1, 3});
    auto alone = world.create_group("alone", {r});
    expect(pairs->global_ranks() == (r < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3}), "members");
    expect(pairs->name() == "pairs" && pairs->size() == 2 && pairs->rank() == r % 2 && columns->rank() == r / 2,
           "coordinates");

    at::Tensor value = at::full({3}, r, at::kFloat);
    pairs->all_reduce(value, ReduceOp::kSum).wait();
    expect(value[0].item<float>() == (r < 2 ? 1 : 5), "sum over the pair");
    columns->all_reduce(value, ReduceOp::kSum).wait();
    expect(value[0].item<float>() == 6, "sum over the column of pair sums");

    expect(alone->size() == 1 && alone->rank() == 0, "one rank");
    at::Tensor input = at::arange(5, at::kFloat);
    at::Tensor output = at::zeros({5}, at::kFloat);
    Pending pending = alone->all_gather(output, input);
    expect(!pending.active() && at::equal(output, input), "all_gather of one is a copy at launch");
    output.zero_();
    expect(!alone->reduce_scatter(output, input, ReduceOp::kAverage).active() && at::equal(output, input),
           "reduce_scatter of one");
    output.zero_();
    expect(!alone->all_to_all(output, input).active() && at::equal(output, input), "all_to_all of one");
    expect(!alone->all_reduce(output, ReduceOp::kAverage).active() && at::equal(output, input), "all_reduce of one");
    expect(!alone->broadcast(output, 0).active() && at::equal(output, input), "broadcast of one");
    expect(!alone->all_gather(output, output).active() && at::equal(output, input), "in place");
    alone->barrier();
    pairs->barrier();
  });
}

TEST_CASE("a barrier returns only after every rank has reached it", "[cpu][dist]") {
  std::atomic<int> arrived{0};
  on_ranks(3, [&](World& world) {
    auto group = world.create_group("all", first_ranks(3));
    for (int round = 1; round <= 5; ++round) {
      if (world.rank() == round % 3) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ++arrived;
      group->barrier();
      expect(arrived >= 3 * round, "everybody has arrived");
      group->barrier();
    }
  });
  CHECK(arrived == 15);
}

TEST_CASE("misuse is an internal error, on every rank before anything is sent", "[cpu][dist]") {
  on_ranks(2, [](World& world) {
    auto group = world.create_group("all", {0, 1});
    auto alone = world.create_group("alone", {world.rank()});
    const auto refused = [](const std::function<void()>& call) {
      try {
        call();
      } catch (const std::logic_error&) {
        return true;
      }
      return false;
    };
    at::Tensor four = at::zeros({4});
    for (auto* g : {group.get(), alone.get()}) {
      expect(refused([&] { g->all_gather(at::zeros({3}), four).wait(); }), "size of all_gather");
      expect(refused([&] { g->reduce_scatter(at::zeros({3}), four, ReduceOp::kSum).wait(); }),
             "size of reduce_scatter");
      expect(refused([&] { g->all_reduce(at::zeros({4, 4}).t().narrow(0, 0, 2), ReduceOp::kSum).wait(); }),
             "not contiguous");
      expect(refused([&] { g->all_reduce(at::zeros({4}, at::kInt), ReduceOp::kAverage).wait(); }),
             "average of integers");
      expect(refused([&] { g->broadcast(four, g->size()).wait(); }), "root out of range");
      expect(refused([&] { g->send(four, g->rank()).wait(); }), "send to itself");
    }
    expect(refused([&] { group->reduce_scatter(at::zeros({2}), four, ReduceOp::kMax).wait(); }),
           "maximum in reduce_scatter");
    expect(refused([&] { group->all_to_all(at::zeros({3}), at::zeros({3})).wait(); }), "parts of all_to_all");
    expect(refused([&] { world.create_group("other", {1 - world.rank()}); }), "group without the caller");
    expect(refused([&] { world.create_group("outside", {0, 1, 2}); }), "rank outside the world");
  });
}

TEST_CASE("in a world of threads a collective that a rank never joins fails at the timeout and names itself",
          "[cpu][dist]") {
  std::string text;
  const auto start = std::chrono::steady_clock::now();
  try {
    on_ranks(
        2,
        [](World& world) {
          auto group = world.create_group("pair", {0, 1});
          if (world.rank() == 0) group->all_reduce(at::zeros({4}), ReduceOp::kSum).wait();
        },
        std::chrono::milliseconds(700));
  } catch (const CommError& error) {
    text = error.what();
  }
  CHECK(contains(text, "all_reduce #1 of group 'pair' failed"));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
}

TEST_CASE("what rank 0 shares reaches every rank, whatever the others hand in", "[cpu][dist]") {
  const std::string text("zero\0byte", 9);
  on_ranks(3, [&](World& world) {
    expect(world.share("a", world.rank() == 0 ? text : "mine") == text, "another text");
    expect(world.share("b", std::to_string(world.rank())) == "0", "keys are mixed up");
  });
  on_ranks(1, [&](World& world) { expect(world.share("a", text) == text, "alone"); });
}

TEST_CASE("more local ranks than GPUs with nccl is a configuration error that points to gloo", "[cpu]") {
  comm::LaunchEnvironment env;
  env.world_size = env.local_world_size = 2;
  CHECK_NOTHROW(comm::check_device_assignment(env, comm::BackendKind::kGloo, 0));
  CHECK_NOTHROW(comm::check_device_assignment(env, comm::BackendKind::kGloo, 1));
  for (const int gpus : {0, 1}) {
    std::string text;
    try {
      comm::check_device_assignment(env, comm::BackendKind::kNccl, gpus);
    } catch (const ConfigError& error) {
      text = error.what();
    }
    CHECK(contains(text, "--distributed-backend gloo"));
  }
#ifdef PGPT_WITH_CUDA
  CHECK_NOTHROW(comm::check_device_assignment(env, comm::BackendKind::kNccl, 2));
#endif
}

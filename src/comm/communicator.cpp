#include "pgpt/comm/communicator.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <exception>

#include "backend.h"
#include "pgpt/base/error.h"
#include "pgpt/base/log.h"

namespace pgpt::comm {

Pending::Pending() = default;
Pending::Pending(Pending&&) noexcept = default;
Pending::Pending(std::unique_ptr<State> state) : state_(std::move(state)) {}

Pending& Pending::operator=(Pending&& other) noexcept {
  if (this != &other) {
    Pending dropped(std::move(*this));
    state_ = std::move(other.state_);
  }
  return *this;
}

Pending::~Pending() {
  if (state_ && std::uncaught_exceptions() == 0) log::warn("a collective was dropped without waiting for it");
}

void Pending::wait() {
  if (!state_) return;
  const auto state = std::move(state_);
  state->finish();
}

bool Pending::active() const noexcept { return state_ != nullptr; }

namespace {

/// What a waiting stream does with a sum that has arrived.
void store(const at::Tensor& accumulator, const at::Tensor& sum, bool overwrite) {
  if (overwrite) {
    accumulator.copy_(sum);
  } else {
    accumulator.add_(sum);
  }
}

/// A reduce-scatter into a temporary, which the waiting stream then adds.
struct AddedState final : Pending::State {
  Pending sum;
  at::Tensor part, accumulator;
  bool overwrite = false;

  void finish() override {
    const at::NoGradGuard no_grad;
    sum.wait();
    store(accumulator, part, overwrite);
  }
};

/// Every rank's part, of which the waiting stream adds up the others'.
struct OthersState final : Pending::State {
  Pending parts_arrive;
  at::Tensor parts, accumulator;  // [ranks, n], [n]
  int rank = 0;
  bool overwrite = false;

  void finish() override {
    const at::NoGradGuard no_grad;
    parts_arrive.wait();
    at::Tensor sum;
    for (int r = 0; r < parts.size(0); ++r) {
      if (r == rank) continue;
      const at::Tensor part = parts[r].to(at::promoteTypes(parts.scalar_type(), at::kFloat));
      sum = sum.defined() ? sum.add_(part) : part.clone();
    }
    store(accumulator, sum.to(parts.scalar_type()).view(accumulator.sizes()), overwrite);
  }
};

}  // namespace

Pending Communicator::reduce_scatter_others(at::Tensor accumulator, at::Tensor input, bool overwrite) {
  check_scatter_add(accumulator, input, size());
  if (size() == 1) {
    if (overwrite) accumulator.zero_();
    return {};
  }
  auto state = std::make_unique<OthersState>();
  state->parts = at::empty({size(), accumulator.numel()}, input.options());
  state->parts_arrive = all_to_all(state->parts, input);
  state->accumulator = std::move(accumulator);
  state->rank = rank();
  state->overwrite = overwrite;
  return Pending(std::move(state));
}

Pending Communicator::reduce_scatter_add(at::Tensor accumulator, at::Tensor input, bool overwrite) {
  check_scatter_add(accumulator, input, size());
  if (overwrite && accumulator.scalar_type() == input.scalar_type()) {
    return reduce_scatter(std::move(accumulator), std::move(input), ReduceOp::kSum);
  }
  auto state = std::make_unique<AddedState>();
  state->part = at::empty(accumulator.sizes(), input.options());
  state->accumulator = std::move(accumulator);
  state->overwrite = overwrite;
  state->sum = reduce_scatter(state->part, std::move(input), ReduceOp::kSum);
  if (!state->sum.active()) {
    state->finish();
    return {};
  }
  return Pending(std::move(state));
}

Pending Communicator::all_gather_fenced(at::Tensor output, at::Tensor input) {
  return all_gather(std::move(output), std::move(input));
}

Pending Communicator::fence() { return {}; }

void Communicator::share(const std::vector<at::Tensor>& /*tensors*/) {}

c10d::Backend& BackendGroup::open() const {
  PGPT_ASSERT(backend, "group ", record->name, " was used after its world's shutdown");
  return *backend;
}

CommError BackendGroup::failed(const char* operation, uint64_t sequence, const std::exception& error) const {
  if (watchdog != nullptr) return CommError(watchdog->explain(*record, operation, sequence, brief(error)).text);
  return CommError(concat(operation, " #", sequence, " of group '", record->name, "' failed: ", brief(error)));
}

void check_contiguous(const at::Tensor& tensor) {
  PGPT_ASSERT(tensor.defined() && tensor.is_contiguous(), "tensor is not contiguous");
}

void check_same_size(const at::Tensor& output, const at::Tensor& input, int size) {
  check_contiguous(output);
  check_contiguous(input);
  PGPT_ASSERT(output.scalar_type() == input.scalar_type(), "dtypes differ: ", output.scalar_type(), " and ",
              input.scalar_type());
  PGPT_ASSERT(output.numel() == input.numel() && input.numel() % size == 0, "sizes ", output.numel(), " and ",
              input.numel(), " for ", size, " ranks");
}

void check_gather(const at::Tensor& output, const at::Tensor& input, int size) {
  check_contiguous(output);
  check_contiguous(input);
  PGPT_ASSERT(output.scalar_type() == input.scalar_type(), "dtypes differ: ", output.scalar_type(), " and ",
              input.scalar_type());
  PGPT_ASSERT(output.numel() == input.numel() * size, "output has ", output.numel(), " elements, input ", input.numel(),
              ", ranks ", size);
}

void check_reduce(const at::Tensor& tensor, ReduceOp op) {
  check_contiguous(tensor);
  PGPT_ASSERT(op != ReduceOp::kAverage || tensor.is_floating_point(), "the average of ", tensor.scalar_type(),
              " is not defined");
  PGPT_ASSERT(tensor.scalar_type() != at::kBool && !tensor.is_complex(), "cannot reduce ", tensor.scalar_type());
}

void check_scatter(const at::Tensor& output, const at::Tensor& input, int size, ReduceOp op) {
  check_gather(input, output, size);
  check_reduce(input, op);
  PGPT_ASSERT(op == ReduceOp::kSum || op == ReduceOp::kAverage, "reduce_scatter takes sum or average");
}

void check_scatter_add(const at::Tensor& accumulator, const at::Tensor& input, int size) {
  check_contiguous(accumulator);
  check_reduce(input, ReduceOp::kSum);
  PGPT_ASSERT(accumulator.scalar_type() == input.scalar_type() || accumulator.scalar_type() == at::kFloat,
              "an accumulator of ", accumulator.scalar_type(), " for ", input.scalar_type());
  PGPT_ASSERT(input.numel() == accumulator.numel() * size, "accumulator has ", accumulator.numel(), " elements, input ",
              input.numel(), ", ranks ", size);
}

at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

namespace {

/// A group of one rank: results are copied at once and nothing is ever in flight.
class SingleCommunicator final : public Communicator {
 public:
  explicit SingleCommunicator(GroupPtr record) : record_(std::move(record)) {}

  [[nodiscard]] int rank() const override { return 0; }
  [[nodiscard]] int size() const override { return 1; }
  [[nodiscard]] const std::string& name() const override { return record_->name; }
  [[nodiscard]] const std::vector<int>& global_ranks() const override { return record_->ranks; }

  Pending all_gather(at::Tensor output, at::Tensor input) override {
    check_gather(output, input, 1);
    return copied(output, input);
  }
  Pending reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    check_scatter(output, input, 1, op);
    return copied(output, input);
  }
  Pending all_reduce(at::Tensor tensor, ReduceOp op) override {
    check_reduce(tensor, op);
    return {};
  }
  Pending broadcast(at::Tensor tensor, int root) override {
    check_contiguous(tensor);
    PGPT_ASSERT(root == 0, "root ", root, " in a group of one");
    return {};
  }
  Pending all_to_all(at::Tensor output, at::Tensor input) override {
    check_same_size(output, input, 1);
    return copied(output, input);
  }
  Pending send(at::Tensor /*tensor*/, int peer) override { PGPT_ASSERT(false, "send to ", peer, " in a group of one"); }
  Pending receive(at::Tensor /*tensor*/, int peer) override {
    PGPT_ASSERT(false, "receive from ", peer, " in a group of one");
  }
  void barrier() override { synchronize_device(); }

 private:
  static Pending copied(const at::Tensor& output, const at::Tensor& input) {
    const at::NoGradGuard no_grad;
    if (output.data_ptr() != input.data_ptr()) output.view({-1}).copy_(input.view({-1}));
    return {};
  }

  GroupPtr record_;
};

}  // namespace

std::unique_ptr<Communicator> make_single_communicator(GroupPtr record) {
  return std::make_unique<SingleCommunicator>(std::move(record));
}

}  // namespace pgpt::comm

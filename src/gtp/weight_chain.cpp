#include "pgpt/gtp/weight_chain.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <optional>

#include "pgpt/base/error.h"

namespace pgpt::gtp {
namespace {

constexpr std::size_t kNumPasses = 3;

const char* pass_name(Pass pass) {
  switch (pass) {
    case Pass::kForward:
      return "forward";
    case Pass::kBackward:
      return "backward";
    case Pass::kRecompute:
      return "recompute";
  }
  return "?";
}

std::size_t index_of(Pass pass) { return static_cast<std::size_t>(pass); }

}  // namespace

/// A gather buffer and what it holds now.
struct GatheredWeight::Slot {
  at::Tensor buffer;  // flat, weight dtype, as large as the largest weight that uses it
  std::uint64_t generation = 0;
  std::string holds;
};

struct WeightChain::Gather {
  comm::Pending pending;
  at::Tensor whole;  // [padded rows, columns] view of the slot
  std::uint64_t generation = 0;
};

struct WeightChain::Scatter {
  comm::Pending pending;
  at::Tensor shard;  // reduced part, or with fp32 accumulation all peers' parts [peers, shard elements]
  bool sum_parts = false;
};

const at::Tensor& GatheredWeight::get() const {
  if (slot_) {
    PGPT_ASSERT(slot_->generation == generation_, "stale read of a gathered weight: its buffer now holds ",
                slot_->holds);
  }
  return tensor_;
}

WeightChain::WeightChain(std::vector<UseSpec> uses, comm::Communicator& gather, comm::Communicator& scatter,
                         const ChainOptions& options, GradientReady on_gradient_ready)
    : uses_(std::move(uses)),
      gather_(gather),
      scatter_(scatter),
      options_(options),
      on_gradient_ready_(std::move(on_gradient_ready)),
      scatters_(uses_.size()),
      last_in_backward_(uses_.size(), true) {
  PGPT_ASSERT(gather_.size() == scatter_.size(), "both directions span the same peers");
  for (std::size_t i = 0; i < uses_.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (uses_[j].weight == uses_[i].weight) last_in_backward_[i] = false;
    }
  }
  if (!distributed()) return;
  for (std::size_t i = 0; i < kNumPasses * uses_.size(); ++i) gathers_.push_back(std::make_unique<Gather>());
  bool recomputes = false;
  std::int64_t largest[2] = {0, 0};
  for (std::size_t i = 0; i < uses_.size(); ++i) {
    recomputes = recomputes || uses_[i].recompute_group >= 0;
    largest[i % 2] = std::max(largest[i % 2], uses_[i].weight->num_elements() * gather_.size());
  }
  const at::TensorOptions tensor_options = uses_.front().weight->weight.options();
  for (std::size_t pass = 0; pass < kNumPasses; ++pass) {
    for (std::size_t parity = 0; parity < 2; ++parity) {
      auto slot = std::make_shared<GatheredWeight::Slot>();
      // Forward has ended before backward starts, so both directions share memory; recompute runs inside backward and
      // needs its own.
      if (pass == index_of(Pass::kBackward)) {
        slot = slots_[parity];
      } else if (pass == index_of(Pass::kForward) || recomputes) {
        slot->buffer = at::empty({largest[parity]}, tensor_options);
      }
      slots_.push_back(std::move(slot));
    }
  }
}

WeightChain::~WeightChain() = default;

bool WeightChain::distributed() const { return gather_.size() > 1; }

WeightChain::Gather& WeightChain::gather_state(UseId use, Pass pass) {
  return *gathers_[index_of(pass) * uses_.size() + use];
}

std::ptrdiff_t WeightChain::next_use(UseId use, Pass pass) const {
  const auto current = static_cast<std::ptrdiff_t>(use);
  const auto count = static_cast<std::ptrdiff_t>(uses_.size());
  const std::ptrdiff_t next = pass == Pass::kBackward ? current - 1 : current + 1;
  if (next < 0 || next >= count) return -1;
  const UseSpec& spec = uses_[static_cast<std::size_t>(next)];
  if (!spec.prefetch) return -1;
  if (pass == Pass::kBackward && !spec.read_in_backward) return -1;
  if (pass == Pass::kRecompute && spec.recompute_group != uses_[use].recompute_group) return -1;
  return next;
}

void WeightChain::launch_gather(UseId use, Pass pass) {
  const UseSpec& spec = uses_[use];
  Gather& state = gather_state(use, pass);
  GatheredWeight::Slot& slot = *slots_[index_of(pass) * 2 + use % 2];
  const at::Tensor& shard = spec.weight->weight;
  const std::int64_t elements = shard.numel() * gather_.size();
  ++slot.generation;
  slot.holds = spec.label;
  state.generation = slot.generation;
  state.whole = slot.buffer.narrow(0, 0, elements).view({shard.size(0) * gather_.size(), shard.size(1)});
  state.pending = gather_.all_gather(state.whole, shard);
  ++counters_.gathers;
}

GatheredWeight WeightChain::read(UseId use, Pass pass) {
  const UseSpec& spec = uses_.at(use);
  GatheredWeight result;
  if (!distributed()) {
    result.tensor_ = spec.weight->weight;
    return result;
  }
  std::ptrdiff_t& in_flight = in_flight_[index_of(pass)];
  if (in_flight >= 0 && in_flight != static_cast<std::ptrdiff_t>(use)) {
    PGPT_ASSERT(false, "out of order in the ", pass_name(pass), " pass: ", spec.label, " is read while ",
                uses_[static_cast<std::size_t>(in_flight)].label, " was prefetched");
  }
  Gather& state = gather_state(use, pass);
  if (in_flight < 0) launch_gather(use, pass);
  in_flight = -1;
  state.pending.wait();
  if (options_.prefetch) {
    if (const std::ptrdiff_t next = next_use(use, pass); next >= 0) {
      launch_gather(static_cast<UseId>(next), pass);
      ++counters_.prefetched_gathers;
      in_flight = next;
    }
  }
  result.tensor_ = state.whole.narrow(0, 0, spec.weight->layout.logical_shape.at(0));
  result.slot_ = slots_[index_of(pass) * 2 + use % 2];
  result.generation_ = state.generation;
  return result;
}

void WeightChain::end_pass(Pass pass) const {
  const std::ptrdiff_t in_flight = in_flight_[index_of(pass)];
  PGPT_ASSERT(in_flight < 0, "the ", pass_name(pass), " pass ended with a gather of ",
              uses_[static_cast<std::size_t>(in_flight)].label, " in flight");
}

void WeightChain::contribution_added(UseId use) {
  if (last_in_backward_[use] && on_gradient_ready_) on_gradient_ready_(*uses_[use].weight);
}

void WeightChain::gradient_added(UseId use) {
  PGPT_ASSERT(!distributed(), "fused accumulation needs the whole main gradient");
  contribution_added(use);
}

void WeightChain::add_gradient(UseId use, at::Tensor gradient) {
  const UseSpec& spec = uses_.at(use);
  parameter::Parameter& weight = *spec.weight;
  if (!distributed()) {
    weight.main_gradient.add_(gradient);
    contribution_added(use);
    return;
  }
  // A weight with two uses: its earlier reduce-scatter of this microbatch ends before the next starts.
  for (std::size_t other = 0; other < uses_.size(); ++other) {
    if (uses_[other].weight == spec.weight && scatters_[other]) finish_scatter(other);
  }
  const std::int64_t peers = scatter_.size();
  if (options_.mean) gradient.mul_(1.0 / static_cast<double>(peers));
  const std::int64_t shard_rows = weight.weight.size(0);
  const std::int64_t columns = weight.weight.size(1);
  const std::int64_t padding = shard_rows * peers - gradient.size(0);
  at::Tensor whole = gradient;
  if (padding > 0) {
    whole = at::empty({shard_rows * peers, columns}, gradient.options());
    whole.narrow(0, 0, gradient.size(0)).copy_(gradient);
    whole.narrow(0, gradient.size(0), padding).zero_();
  }
  auto scatter = std::make_unique<Scatter>();
  // fp32 gradients are already summed in fp32, and two parts have one addition only: the plain collective loses
  // nothing.
  scatter->sum_parts = options_.fp32_accumulation && peers > 2 && whole.scalar_type() != at::kFloat;
  if (scatter->sum_parts) {
    scatter->shard = at::empty({peers, shard_rows * columns}, whole.options());
    scatter->pending = scatter_.all_to_all(scatter->shard, whole);
  } else {
    scatter->shard = at::empty({shard_rows, columns}, whole.options());
    scatter->pending = scatter_.reduce_scatter(scatter->shard, whole, comm::ReduceOp::kSum);
  }
  ++counters_.scatters;
  scatters_[use] = std::move(scatter);
  if (use == 0 || !options_.async_scatter) finish_scatter(use);
  if (use + 1 < uses_.size() && scatters_[use + 1]) finish_scatter(use + 1);
}

void WeightChain::finish_scatter(UseId use) {
  const std::unique_ptr<Scatter> scatter = std::move(scatters_[use]);
  scatter->pending.wait();
  parameter::Parameter& weight = *uses_[use].weight;
  at::Tensor shard = scatter->shard;
  if (scatter->sum_parts) {
    const at::ScalarType dtype = shard.scalar_type();
    shard = shard.to(at::kFloat).sum(0).to(dtype).view(weight.weight.sizes());
  }
  weight.main_gradient.add_(shard);
  contribution_added(use);
}

void WeightChain::finish_gradients() {
  for (std::size_t use = uses_.size(); use-- > 0;) {
    if (scatters_[use]) finish_scatter(use);
  }
}

}  // namespace pgpt::gtp

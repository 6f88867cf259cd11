#include "pgpt/gtp/weight_chain.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

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
  bool complete = false;  // of a kept weight: it is there and current
};

struct WeightChain::Scatter {
  comm::Pending pending;
  at::Tensor parts;           // with fp32 accumulation: all peers' parts [peers, shard elements]
  std::function<void()> own;  // with split products: this rank's rows, when the peers' parts are there
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
      last_in_backward_(uses_.size(), true),
      kept_(uses_.size()) {
  PGPT_ASSERT(gather_.size() == scatter_.size(), "both directions span the same peers");
  for (std::size_t i = 0; i < uses_.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (uses_[j].weight == uses_[i].weight) last_in_backward_[i] = false;
    }
  }
  if (!distributed()) return;
  gathers_.resize(kNumPasses * uses_.size());
  PGPT_ASSERT(options_.kept_uses <= uses_.size(), options_.kept_uses, " kept of ", uses_.size());
  const at::TensorOptions tensor_options = uses_.front().weight->weight.options();
  bool recomputes = false;
  std::int64_t largest[2] = {0, 0};
  std::int64_t largest_gradient[2] = {0, 0};  // bytes
  for (std::size_t i = 0; i < uses_.size(); ++i) {
    recomputes = recomputes || uses_[i].recompute_group >= 0;
    const std::int64_t elements = uses_[i].weight->num_elements() * gather_.size();
    if (i + options_.kept_uses >= uses_.size()) {
      // A tied weight is kept once.
      for (std::size_t j = 0; j < i && !kept_[i]; ++j) {
        if (uses_[j].weight == uses_[i].weight) kept_[i] = kept_[j];
      }
      if (!kept_[i]) {
        kept_[i] = std::make_shared<GatheredWeight::Slot>();
        kept_[i]->buffer = at::empty({elements}, tensor_options);
      }
    } else {
      largest[i % 2] = std::max(largest[i % 2], elements);
    }
    largest_gradient[i % 2] = std::max(largest_gradient[i % 2],
                                       elements * static_cast<std::int64_t>(c10::elementSize(uses_[i].gradient_dtype)));
  }
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
  for (std::size_t parity = 0; parity < 2; ++parity) {
    staging_[parity] = at::empty({largest_gradient[parity]}, tensor_options.dtype(at::kByte));
  }
  scatter_.share({staging_[0], staging_[1]});
}

WeightChain::~WeightChain() = default;

bool WeightChain::distributed() const { return gather_.size() > 1; }

comm::Pending& WeightChain::pending_gather(UseId use, Pass pass) {
  return gathers_[index_of(pass) * uses_.size() + use];
}

const std::shared_ptr<GatheredWeight::Slot>& WeightChain::slot_of(UseId use, Pass pass) const {
  return kept_[use] ? kept_[use] : slots_[index_of(pass) * 2 + use % 2];
}

at::Tensor WeightChain::whole_weight(UseId use, Pass pass) const {
  const at::Tensor& shard = uses_[use].weight->weight;
  const std::int64_t rows = shard.size(0) * gather_.size();
  return slot_of(use, pass)->buffer.narrow(0, 0, rows * shard.size(1)).view({rows, shard.size(1)});
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
  if (slot_of(static_cast<UseId>(next), pass)->complete) return -1;
  return next;
}

void WeightChain::launch_gather(UseId use, Pass pass) {
  const UseSpec& spec = uses_[use];
  GatheredWeight::Slot& slot = *slot_of(use, pass);
  ++slot.generation;
  slot.holds = spec.label;
  if (!reading_) reading_since_ = gather_.fence();
  reading_ = true;
  pending_gather(use, pass) = gather_.all_gather_fenced(whole_weight(use, pass), spec.weight->weight);
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
  const std::shared_ptr<GatheredWeight::Slot>& slot = slot_of(use, pass);
  if (!slot->complete) {
    if (in_flight < 0) launch_gather(use, pass);
    in_flight = -1;
    reading_since_.wait();
    pending_gather(use, pass).wait();
    slot->complete = kept_[use] != nullptr;
  }
  if (options_.prefetch) {
    if (const std::ptrdiff_t next = next_use(use, pass); next >= 0) {
      launch_gather(static_cast<UseId>(next), pass);
      ++counters_.prefetched_gathers;
      in_flight = next;
    }
  }
  result.tensor_ = whole_weight(use, pass).narrow(0, 0, spec.weight->layout.logical_shape.at(0));
  result.slot_ = slot;
  result.generation_ = slot->generation;
  return result;
}

void WeightChain::release_weights() {
  if (!reading_) return;
  gather_.fence().wait();
  reading_ = false;
  for (const auto& slot : kept_) {
    if (slot) slot->complete = false;
  }
}

void WeightChain::end_pass(Pass pass) const {
  const std::ptrdiff_t in_flight = in_flight_[index_of(pass)];
  PGPT_ASSERT(in_flight < 0, "the ", pass_name(pass), " pass ended with a gather of ",
              uses_[static_cast<std::size_t>(in_flight)].label, " in flight");
}

void WeightChain::GradientTarget::write(at::Tensor gradient) const {
  if (scale != 1.0) gradient.mul_(scale);
  if (overwrite) {
    tensor.copy_(gradient);
  } else {
    tensor.add_(gradient);
  }
}

at::Tensor WeightChain::whole_gradient(UseId use) const {
  const at::ScalarType dtype = uses_[use].gradient_dtype;
  const at::Tensor& shard = uses_[use].weight->weight;
  const std::int64_t rows = shard.size(0) * scatter_.size();
  const std::int64_t bytes = rows * shard.size(1) * static_cast<std::int64_t>(c10::elementSize(dtype));
  return staging_[use % 2].narrow(0, 0, bytes).view(dtype).view({rows, shard.size(1)});
}

WeightChain::GradientTarget WeightChain::gradient_target(UseId use) {
  const UseSpec& spec = uses_.at(use);
  parameter::Parameter& weight = *spec.weight;
  if (!distributed()) {
    if (weight.main_gradient.scalar_type() == spec.gradient_dtype) {
      written_ = weight.main_gradient;
      return {written_, 1.0, weight.take_first_contribution()};
    }
    written_ = at::empty(weight.main_gradient.sizes(), weight.main_gradient.options().dtype(spec.gradient_dtype));
    return {written_, 1.0, true};
  }
  for (std::size_t other = 0; other < uses_.size(); ++other) {
    // The buffer must be free, and the earlier reduce-scatter of a weight with two uses ends before its next starts.
    if (scatters_[other] && (other % 2 == use % 2 || uses_[other].weight == spec.weight)) finish_scatter(other);
  }
  written_ = whole_gradient(use);
  const std::int64_t rows = weight.layout.logical_shape.at(0);
  if (rows < written_.size(0)) written_.narrow(0, rows, written_.size(0) - rows).zero_();
  return {written_.narrow(0, 0, rows), options_.mean ? 1.0 / static_cast<double>(scatter_.size()) : 1.0, true};
}

void WeightChain::gradient_written(UseId use) {
  const at::Tensor whole = std::exchange(written_, at::Tensor());
  PGPT_ASSERT(whole.defined(), uses_.at(use).label, ": gradient_written without gradient_target");
  parameter::Parameter& weight = *uses_[use].weight;
  if (!distributed()) {
    if (!whole.is_same(weight.main_gradient)) weight.add_to_main_gradient(whole);
    contribution_added(use);
    return;
  }
  auto scatter = std::make_unique<Scatter>();
  // fp32 gradients are already summed in fp32, and two parts have one addition only: the plain collective loses
  // nothing.
  if (options_.fp32_accumulation && scatter_.size() > 2 && whole.scalar_type() != at::kFloat) {
    scatter->parts = at::empty({scatter_.size(), weight.num_elements()}, whole.options());
    scatter->pending = scatter_.all_to_all(scatter->parts, whole);
  } else {
    scatter->pending = scatter_.reduce_scatter_add(weight.main_gradient, whole, weight.take_first_contribution());
  }
  launched(use, std::move(scatter));
}

void WeightChain::launched(UseId use, std::unique_ptr<Scatter> scatter) {
  ++counters_.scatters;
  scatters_[use] = std::move(scatter);
  if (!options_.async_scatter) finish_scatter(use);
  // The chain's first use ends a microbatch: what is ready belongs to it and not to the next one.
  if (use == 0) finish_gradients();
}

void WeightChain::add_product(UseId use, Product product) {
  const UseSpec& spec = uses_.at(use);
  parameter::Parameter& weight = *spec.weight;
  // 16-bit parts would be rounded once more.
  const bool split = options_.split_products && distributed() && weight.awaits_gradient &&
                     spec.gradient_dtype == weight.main_gradient.scalar_type() &&
                     c10::elementSize(spec.gradient_dtype) >= c10::elementSize(at::kFloat);
  const GradientTarget target = gradient_target(use);
  if (!split) {
    product(target.tensor, 0, target.scale, target.overwrite);
    return gradient_written(use);
  }
  const at::Tensor whole = std::exchange(written_, at::Tensor());
  const std::int64_t rows = target.tensor.size(0), shard_rows = weight.weight.size(0);
  const std::int64_t own = std::min(rows, scatter_.rank() * shard_rows), own_end = std::min(rows, own + shard_rows);
  const auto compute = [&](std::int64_t first, std::int64_t end) {
    if (first < end) product(target.tensor.narrow(0, first, end - first), first, target.scale, /*overwrite=*/true);
  };
  compute(0, own);
  compute(own_end, rows);
  auto scatter = std::make_unique<Scatter>();
  scatter->pending = scatter_.reduce_scatter_others(weight.main_gradient, whole, weight.take_first_contribution());
  if (own < own_end) {
    scatter->own = [product = std::move(product), &weight, own, count = own_end - own, scale = target.scale] {
      product(weight.main_gradient.view(weight.weight.sizes()).narrow(0, 0, count), own, scale, /*overwrite=*/false);
    };
  }
  launched(use, std::move(scatter));
}

void WeightChain::contribution_added(UseId use) {
  if (last_in_backward_[use] && on_gradient_ready_) on_gradient_ready_(*uses_[use].weight);
}

void WeightChain::finish_scatter(UseId use) {
  const std::unique_ptr<Scatter> scatter = std::move(scatters_[use]);
  scatter->pending.wait();
  parameter::Parameter& weight = *uses_[use].weight;
  if (scatter->own) scatter->own();
  if (scatter->parts.defined()) {
    const at::ScalarType dtype = scatter->parts.scalar_type();
    weight.add_to_main_gradient(scatter->parts.to(at::kFloat).sum(0).to(dtype).view(weight.weight.sizes()));
  }
  contribution_added(use);
}

void WeightChain::finish_gradients() {
  for (std::size_t use = uses_.size(); use-- > 0;) {
    if (scatters_[use]) finish_scatter(use);
  }
}

}  // namespace pgpt::gtp

#include "pgpt/parameter/gradient_reducer.h"

#include <ATen/ATen.h>

#include "pgpt/base/error.h"

namespace pgpt::parameter {

GradientReducer::GradientReducer(ParameterStore& store, comm::Communicator& replicate_data, comm::Communicator& gtp,
                                 const ReducerOptions& options)
    : store_(store), replicate_data_(replicate_data), gtp_(gtp), options_(options) {
  in_flight_.resize(store_.buckets().size());
  if (options_.check_non_finite) non_finite_ = at::zeros({}, store_.gradients().options().dtype(at::kFloat));
}

void GradientReducer::begin_step() {
  for (Parameter& parameter : store_.parameters()) parameter.awaits_gradient = true;
  last_microbatch_ = false;
  launched_.assign(store_.buckets().size(), false);
  missing_.clear();
  for (const Bucket& bucket : store_.buckets()) missing_.push_back(bucket.parameters.size());
}

void GradientReducer::begin_last_microbatch() { last_microbatch_ = true; }

void GradientReducer::parameter_ready(Parameter& parameter) {
  if (!last_microbatch_ || !options_.overlap) return;
  std::size_t& missing = missing_.at(static_cast<std::size_t>(parameter.bucket));
  PGPT_ASSERT(missing > 0, parameter.spec.name, " reported its gradient twice in one microbatch");
  if (--missing == 0) launch(static_cast<std::size_t>(parameter.bucket));
}

void GradientReducer::launch(std::size_t index) {
  const Bucket& bucket = store_.buckets()[index];
  launched_[index] = true;
  for (const std::size_t member : bucket.parameters) {
    Parameter& parameter = store_.parameters()[member];
    if (parameter.take_first_contribution()) parameter.main_gradient.zero_();  // nothing used it in this step
  }
  at::Tensor gradients = store_.gradients().narrow(0, bucket.begin, bucket.end - bucket.begin);
  if (replicate_data_.size() == 1) return;
  const int ranks = replicate_data_.size();
  // Averages are sums of scaled parts. For powers of two a scaling anywhere has the same bits, so the collective does
  // it and saves a pass over the gradients.
  const bool exact_anywhere = (ranks & (ranks - 1)) == 0;
  if (!options_.per_token_loss && !exact_anywhere) gradients.mul_(1.0 / static_cast<double>(ranks));
  const bool average = !options_.per_token_loss && exact_anywhere;
  in_flight_[index] = replicate_data_.all_reduce(gradients, average ? comm::ReduceOp::kAverage : comm::ReduceOp::kSum);
}

void GradientReducer::note_backward(const at::Tensor& input_gradient) {
  if (options_.check_non_finite) at::maximum_out(non_finite_, non_finite_, kernels::has_non_finite(input_gradient));
}

void GradientReducer::finish() {
  for (std::size_t i = 0; i < store_.buckets().size(); ++i) {
    if (!launched_[i]) launch(i);
  }
  for (comm::Pending& pending : in_flight_) pending.wait();
  if (gtp_.size() == 1) return;
  // All parameters of a replicated stretch are whole on every GTP peer, so the stretch is one collective without a
  // copy.
  std::vector<comm::Pending> completions;
  for (const Bucket& bucket : store_.buckets()) {
    const std::int64_t length = bucket.replicated_end - bucket.replicated_begin;
    if (length == 0) continue;
    completions.push_back(gtp_.all_reduce(store_.gradients().narrow(0, bucket.replicated_begin, length),
                                          options_.per_token_loss ? comm::ReduceOp::kSum : comm::ReduceOp::kAverage));
  }
  for (comm::Pending& pending : completions) pending.wait();
}

}  // namespace pgpt::parameter

#include "pgpt/parameter/parameter_store.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "pgpt/base/error.h"

namespace pgpt::parameter {
namespace {

constexpr std::int64_t kParameterAlignment = 64;
constexpr std::int64_t kBucketAlignment = 128;

std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

std::int64_t product(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

}  // namespace

ParameterStore::ParameterStore(std::vector<ParameterSpec> specs, const StoreOptions& options) : options_(options) {
  parameters_.reserve(specs.size());
  for (ParameterSpec& spec : specs) {
    Parameter parameter;
    parameter.layout.logical_shape = spec.shape;
    if (spec.gtp_sharded && options_.gtp_size > 1) {
      parameter.layout.cuts.push_back({mesh::Axis::kGtp, 0, options_.gtp_rank, options_.gtp_size,
                                       gtp_padding(spec.shape.at(0), options_.gtp_size)});
    }
    parameter.gtp_duplicate = parameter.layout.cuts.empty() && options_.gtp_rank != 0;
    parameter.spec = std::move(spec);
    parameters_.push_back(std::move(parameter));
  }

  std::vector<std::size_t> order(parameters_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [this](std::size_t a, std::size_t b) {
    return parameters_[a].spec.first_use > parameters_[b].spec.first_use;
  });

  const std::int64_t bucket_unit = std::lcm(options_.data_shards, kBucketAlignment);
  std::int64_t offset = 0;
  for (std::size_t next = 0; next < order.size();) {
    Bucket bucket;
    bucket.begin = offset;
    std::int64_t elements = 0;
    while (next < order.size() &&
           (bucket.parameters.empty() || options_.bucket_elements == 0 || elements < options_.bucket_elements)) {
      elements += product(parameters_[order[next]].layout.local_shape());
      bucket.parameters.push_back(order[next++]);
    }
    std::stable_partition(bucket.parameters.begin(), bucket.parameters.end(),
                          [this](std::size_t i) { return parameters_[i].sharded(); });
    bucket.replicated_begin = -1;
    for (const std::size_t i : bucket.parameters) {
      Parameter& parameter = parameters_[i];
      offset = round_up(offset, kParameterAlignment);
      if (!parameter.sharded() && bucket.replicated_begin < 0) bucket.replicated_begin = offset;
      parameter.offset = offset;
      parameter.bucket = static_cast<std::int64_t>(buckets_.size());
      offset += product(parameter.layout.local_shape());
    }
    bucket.replicated_end = offset;
    if (bucket.replicated_begin < 0) bucket.replicated_begin = offset;
    offset = round_up(offset, bucket_unit);
    bucket.end = offset;
    buckets_.push_back(std::move(bucket));
  }

  weights_ = at::zeros({offset}, at::TensorOptions(options_.device).dtype(options_.weight_dtype));
  gradients_ = at::zeros({offset}, at::TensorOptions(options_.device).dtype(options_.gradient_dtype));
  for (Parameter& parameter : parameters_) {
    const std::vector<std::int64_t> shape = parameter.layout.local_shape();
    parameter.weight = weights_.narrow(0, parameter.offset, product(shape)).view(shape);
    parameter.main_gradient = gradients_.narrow(0, parameter.offset, product(shape)).view(shape);
  }
}

void ParameterStore::initialize(RandomStreams& streams) {
  for (Parameter& parameter : parameters_) draw(parameter, streams);
}

void ParameterStore::draw(Parameter& parameter, RandomStreams& streams) {
  const ParameterSpec& spec = parameter.spec;
  if (spec.init == InitRule::kOnes) {
    parameter.weight.fill_(1);
    return;
  }
  if (spec.init == InitRule::kZeros || !options_.initialize) {
    parameter.weight.zero_();
    return;
  }
  const ShardLayout::Range rows = parameter.layout.local_range(0);
  const std::int64_t kept = rows.end - rows.begin;
  // Keeps this rank's rows of a whole draw; padding rows stay zero.
  const auto keep_rows = [&](const at::Tensor& whole) {
    if (kept > 0) parameter.weight.narrow(0, 0, kept).copy_(whole.narrow(0, rows.begin, kept));
  };
  const double bound = std::sqrt(6.0 / static_cast<double>(spec.shape.at(0) + spec.shape.at(1)));
  const bool xavier = spec.init == InitRule::kXavierUniform || spec.init == InitRule::kXavierPositionTable;
  const bool table = spec.init == InitRule::kPositionTable || spec.init == InitRule::kXavierPositionTable;
  if (table || options_.host_initialization) {
    at::Tensor whole = at::empty(spec.shape, at::kFloat);
    // The embedding module's own constructor fills a position table first (spec/model.md 9.2).
    if (table) whole.normal_(0.0, 1.0, streams.host);
    if (xavier) {
      whole.uniform_(-bound, bound, streams.host);
    } else {
      whole.normal_(0.0, spec.std, streams.host);
    }
    keep_rows(whole);
    return;
  }
  const bool shard_only = spec.shard_drawn && parameter.sharded() && !options_.layout_invariant;
  kernels::PhiloxState& stream = shard_only ? streams.gtp_shards : streams.model_parallel;
  at::Tensor drawn = shard_only ? parameter.weight : at::empty(spec.shape, parameter.weight.options());
  if (xavier) {
    kernels::philox_uniform_(drawn, bound, stream, options_.sm_count);
  } else {
    kernels::philox_normal_(drawn, spec.std, stream, options_.sm_count);
  }
  if (!shard_only) keep_rows(drawn);
}

Parameter& ParameterStore::find(const std::string& name) {
  const auto it =
      std::find_if(parameters_.begin(), parameters_.end(), [&](const Parameter& p) { return p.spec.name == name; });
  PGPT_ASSERT(it != parameters_.end(), "no parameter named ", name);
  return *it;
}

bool ParameterStore::contains(const std::string& name) const {
  return std::any_of(parameters_.begin(), parameters_.end(), [&](const Parameter& p) { return p.spec.name == name; });
}

void Parameter::add_to_main_gradient(const at::Tensor& gradient) {
  const at::Tensor part = gradient.view(main_gradient.sizes());
  if (take_first_contribution()) {
    main_gradient.copy_(part);
  } else {
    main_gradient.add_(part);
  }
}

std::int64_t ParameterStore::num_local_parameters() const {
  std::int64_t n = 0;
  for (const Parameter& parameter : parameters_) n += parameter.num_elements();
  return n;
}

}  // namespace pgpt::parameter

#include "pgpt/training/batch.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "pgpt/base/error.h"

namespace pgpt::training {
namespace {

template <class T>
at::Tensor host_tensor(const std::vector<T>& values, at::IntArrayRef shape, at::ScalarType dtype, bool pinned) {
  at::Tensor host = at::empty(shape, at::TensorOptions().dtype(dtype).pinned_memory(pinned));
  PGPT_ASSERT(static_cast<std::size_t>(host.numel()) == values.size());
  std::copy(values.begin(), values.end(), static_cast<T*>(host.data_ptr()));
  return host;
}

model::Batch on_host(const data::MicroBatch& batch, const LossScaling& scaling, bool pinned) {
  const std::int64_t b = batch.micro_batch;
  const std::int64_t s = batch.seq_length;
  model::Batch result;
  result.tokens = host_tensor(batch.tokens, {b, s}, at::kLong, pinned);
  result.labels = host_tensor(batch.labels, {b * s}, at::kLong, pinned);
  result.position_ids = host_tensor(batch.position_ids, {b, s}, at::kLong, pinned);
  result.loss_mask = host_tensor(batch.loss_mask, {b * s}, at::kFloat, pinned);
  if (!batch.cu_seqlens.empty()) {
    result.segments = kernels::make_attention_segments(batch.cu_seqlens, b, s, pinned);
    if (batch.restart_positions) {
      const std::int32_t* const starts = result.segments.starts.const_data_ptr<std::int32_t>();
      std::vector<std::int32_t> positions(static_cast<std::size_t>(b * s));
      for (std::int64_t i = 0; i < b * s; ++i)
        positions[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i % s) - starts[i];
      result.rope_positions = host_tensor(positions, {b, s}, at::kInt, pinned);
    }
  }
  // d(objective)/d(token loss) as autograd would form it: loss_scale / M, then / count, then * mask, in fp32.
  float upstream = static_cast<float>(scaling.loss_scale);
  if (!scaling.per_token) {
    const auto count = std::max<std::int64_t>(batch.statistics.valid_tokens, 1);
    upstream = upstream / static_cast<float>(scaling.num_microbatches) / static_cast<float>(count);
  }
  std::vector<float> scale(batch.loss_mask);
  for (float& value : scale) value *= upstream;
  result.gradient_scale = host_tensor(scale, {b * s}, at::kFloat, pinned);
  return result;
}

constexpr at::Tensor model::Batch::* kParts[] = {&model::Batch::tokens,         &model::Batch::labels,
                                                 &model::Batch::position_ids,   &model::Batch::loss_mask,
                                                 &model::Batch::gradient_scale, &model::Batch::rope_positions};

}  // namespace

model::Batch to_device(const data::MicroBatch& batch, const LossScaling& scaling, at::Device device) {
  model::Batch result = on_host(batch, scaling, device.is_cuda());
  if (!device.is_cuda()) return result;
  for (const auto part : kParts) {
    if ((result.*part).defined()) result.*part = (result.*part).to(device, /*non_blocking=*/true);
  }
  result.segments = result.segments.to(device);
  return result;
}

void to_device(const data::MicroBatch& batch, const LossScaling& scaling, model::Batch& into) {
  const model::Batch host = on_host(batch, scaling, into.tokens.is_cuda());
  PGPT_ASSERT(!host.segments.defined() && !into.segments.defined(), "segments change their shape");
  for (const auto part : kParts) {
    PGPT_ASSERT((host.*part).defined() == (into.*part).defined(), "batches of different parts in one place");
    if ((host.*part).defined()) (into.*part).copy_(host.*part, /*non_blocking=*/true);
  }
}

}  // namespace pgpt::training

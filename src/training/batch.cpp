#include "pgpt/training/batch.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "pgpt/base/error.h"

namespace pgpt::training {
namespace {

template <class T>
at::Tensor upload(const std::vector<T>& values, at::IntArrayRef shape, at::ScalarType dtype, at::Device device) {
  at::Tensor host = at::empty(shape, at::TensorOptions().dtype(dtype).pinned_memory(device.is_cuda()));
  PGPT_ASSERT(static_cast<std::size_t>(host.numel()) == values.size());
  std::copy(values.begin(), values.end(), static_cast<T*>(host.data_ptr()));
  return device.is_cuda() ? host.to(device, /*non_blocking=*/true) : host;
}

}  // namespace

model::Batch to_device(const data::MicroBatch& batch, const LossScaling& scaling, at::Device device) {
  const std::int64_t b = batch.micro_batch;
  const std::int64_t s = batch.seq_length;
  model::Batch result;
  result.tokens = upload(batch.tokens, {b, s}, at::kLong, device);
  result.labels = upload(batch.labels, {b * s}, at::kLong, device);
  result.position_ids = upload(batch.position_ids, {b, s}, at::kLong, device);
  result.loss_mask = upload(batch.loss_mask, {b * s}, at::kFloat, device);
  if (!batch.attention_mask.empty()) {
    result.attention_mask = upload(batch.attention_mask, {b, 1, s, s}, at::kByte, device).to(at::kBool);
  }
  // d(objective)/d(token loss) as autograd would form it: loss_scale / M, then / count, then * mask, in fp32.
  float upstream = static_cast<float>(scaling.loss_scale);
  if (!scaling.per_token) {
    const auto count = std::max<std::int64_t>(batch.statistics.valid_tokens, 1);
    upstream = upstream / static_cast<float>(scaling.num_microbatches) / static_cast<float>(count);
  }
  std::vector<float> scale(batch.loss_mask);
  for (float& value : scale) value *= upstream;
  result.gradient_scale = upload(scale, {b * s}, at::kFloat, device);
  return result;
}

}  // namespace pgpt::training

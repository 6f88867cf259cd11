// Softmax cross entropy over the padded vocabulary, a block of tokens at a time.

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "fast.h"
#include "parallel.h"
#include "tensor_math.h"

namespace pgpt::kernels {
namespace {

void check_labels(const at::Tensor& labels, std::int64_t vocabulary) {
  PGPT_ASSERT(labels.scalar_type() == at::kLong, "labels must be int64");
  if (labels.is_cuda() || labels.numel() == 0) return;
  const auto [low, high] = at::aminmax(labels);
  const auto lowest = low.item<std::int64_t>(), highest = high.item<std::int64_t>();
  PGPT_CHECK(DataError, lowest >= 0 && highest < vocabulary, "the data holds the label ", lowest < 0 ? lowest : highest,
             " but the padded vocabulary has ", vocabulary,
             " entries: check --vocab-size and the tokenizer of the data");
}

// Losses of all tokens; with `scale` the logits are replaced by their gradient.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& scale) {
  const std::int64_t tokens = logits.size(0), vocabulary = logits.size(1);
  check_labels(labels, vocabulary);
  const at::ScalarType type = detail::compute_type(logits);
  const at::Tensor losses = at::empty({tokens}, logits.options().dtype(type));
  const bool in_place = scale.defined() && logits.scalar_type() == type;
  const auto one_block = [&](std::int64_t first, std::int64_t count) {
    const at::Tensor block = logits.narrow(0, first, count);
    const at::Tensor target = labels.narrow(0, first, count).unsqueeze(1);
    at::Tensor values = in_place ? block : detail::widen_copy(block);
    values = values.sub_(at::amax(values, {1}, true));
    const at::Tensor target_value = at::gather(values, 1, target);
    values = values.exp_();
    const at::Tensor sum = at::sum(values, {1}, true);
    losses.narrow(0, first, count).copy_((at::log(sum) - target_value).squeeze(1));
    if (!scale.defined()) return;
    values = values.div_(sum);
    values = values.scatter_(1, target, at::gather(values, 1, target) - 1);
    values = values.mul_(scale.narrow(0, first, count).unsqueeze(1));
    if (!in_place) block.copy_(values);
  };
  // Elements of one block: 512 KiB of fp32 on CPU, which stay in a core's cache from pass to pass; 256 MiB on CUDA,
  // where a block costs launches.
  const std::int64_t elements = std::int64_t{1} << (logits.is_cuda() ? 26 : 17);
  const std::int64_t rows = std::max<std::int64_t>(1, elements / std::max<std::int64_t>(1, vocabulary));
  const std::int64_t blocks = (tokens + rows - 1) / rows;
  const auto some_blocks = [&](std::int64_t begin, std::int64_t end) {
    const at::NoGradGuard no_grad;  // a thread's own setting
    for (std::int64_t i = begin; i < end; ++i) one_block(i * rows, std::min(rows, tokens - i * rows));
  };
  if (logits.is_cuda()) {
    some_blocks(0, blocks);
  } else {
    detail::parallel_for(0, blocks, 1, some_blocks);
  }
  return losses;
}

}  // namespace

at::Tensor cross_entropy_forward(const at::Tensor& logits, const at::Tensor& labels, const Policy& policy) {
  if constexpr (fast::kBuilt) {
    if (auto losses = fast::cross_entropy(logits, labels, {}, policy)) return *losses;
  }
  return cross_entropy(logits, labels, {});
}

at::Tensor cross_entropy_forward_backward_(at::Tensor& logits, const at::Tensor& labels, const at::Tensor& scale,
                                           const Policy& policy) {
  if constexpr (fast::kBuilt) {
    if (auto losses = fast::cross_entropy(logits, labels, scale, policy)) return *losses;
  }
  return cross_entropy(logits, labels, scale);
}

}  // namespace pgpt::kernels

// Softmax cross entropy over the padded vocabulary, a block of tokens at a time.

#include <algorithm>

#include "fast.h"
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
  // Elements of one block: 16 MiB of fp32 on CPU, 256 MiB on CUDA where a block costs launches.
  const std::int64_t elements = std::int64_t{1} << (logits.is_cuda() ? 26 : 22);
  const std::int64_t rows = std::max<std::int64_t>(1, elements / std::max<std::int64_t>(1, vocabulary));
  for (std::int64_t first = 0; first < tokens; first += rows) {
    const std::int64_t count = std::min(rows, tokens - first);
    const at::Tensor block = logits.narrow(0, first, count);
    const at::Tensor target = labels.narrow(0, first, count).unsqueeze(1);
    at::Tensor values = detail::widen_copy(block);
    values = values.sub_(at::amax(values, {1}, true));
    const at::Tensor target_value = at::gather(values, 1, target);
    values = values.exp_();
    const at::Tensor sum = at::sum(values, {1}, true);
    losses.narrow(0, first, count).copy_((at::log(sum) - target_value).squeeze(1));
    if (!scale.defined()) continue;
    values = values.div_(sum);
    values = values.scatter_(1, target, at::gather(values, 1, target) - 1);
    block.copy_(values.mul_(scale.narrow(0, first, count).unsqueeze(1)));
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

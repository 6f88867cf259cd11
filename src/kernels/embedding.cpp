// Table look-up and its dense gradient.

#include "fast.h"
#include "parallel.h"
#include "tensor_math.h"

namespace pgpt::kernels {
namespace {

void check_ids(const at::Tensor& ids, std::int64_t rows) {
  PGPT_ASSERT(ids.scalar_type() == at::kLong, "ids must be int64");
  // On CUDA the kernels themselves trap; reading the range here would stop the host.
  if (ids.is_cuda() || ids.numel() == 0) return;
  const auto [low, high] = at::aminmax(ids);
  const auto lowest = low.item<std::int64_t>(), highest = high.item<std::int64_t>();
  PGPT_CHECK(DataError, lowest >= 0 && highest < rows, "the data holds the token or position ",
             lowest < 0 ? lowest : highest, " but the table has ", rows,
             " rows: check --vocab-size, --max-position-embeddings and the tokenizer of the data");
}

// sums[id] += dy over all tokens in their order. Threads own columns, so no two of them meet and the bits do not depend
// on their number.
template <class Sum, class Gradient>
void add_rows(Sum* sums, const Gradient* dy, const std::int64_t* ids, std::int64_t tokens, std::int64_t width) {
  detail::parallel_for(0, width, 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      Sum* row = sums + ids[t] * width;
      const Gradient* from = dy + t * width;
      for (std::int64_t c = begin; c < end; ++c) row[c] += static_cast<Sum>(from[c]);
    }
  });
}

void add_dense_gradient(at::Tensor& sums, const at::Tensor& dy, const at::Tensor& ids) {
  check_ids(ids, sums.size(0));
  const at::Tensor flat_ids = ids.reshape({-1}).contiguous();
  if (dy.is_cuda()) {
    // Accumulating index_put sorts the ids: no atomics, the same bits each time.
    const c10::List<std::optional<at::Tensor>> index({flat_ids});
    sums.index_put_(index, detail::widen(dy), true);
    return;
  }
  const at::Tensor rows = dy.contiguous();
  const auto* id = flat_ids.const_data_ptr<std::int64_t>();
  const std::int64_t tokens = flat_ids.numel(), width = dy.size(-1);
  switch (dy.scalar_type()) {
    case at::kBFloat16:
      return add_rows(sums.mutable_data_ptr<float>(), rows.const_data_ptr<at::BFloat16>(), id, tokens, width);
    case at::kHalf:
      return add_rows(sums.mutable_data_ptr<float>(), rows.const_data_ptr<at::Half>(), id, tokens, width);
    case at::kFloat:
      return add_rows(sums.mutable_data_ptr<float>(), rows.const_data_ptr<float>(), id, tokens, width);
    default:
      return add_rows(sums.mutable_data_ptr<double>(), rows.const_data_ptr<double>(), id, tokens, width);
  }
}

}  // namespace

at::Tensor embedding_forward(const at::Tensor& table, const at::Tensor& ids) {
  check_ids(ids, table.size(0));
  if constexpr (fast::kBuilt) {
    if (auto y = fast::embedding_forward(table, ids)) return *y;
  }
  return table.index_select(0, ids.reshape({-1}));
}

at::Tensor embedding_gradient(const at::Tensor& dy, const at::Tensor& ids, std::int64_t rows, const Policy& policy) {
  if constexpr (fast::kBuilt) {
    if (auto gradient = fast::embedding_gradient(dy, ids, rows, policy)) return *gradient;
  }
  at::Tensor sums = at::zeros({rows, dy.size(-1)}, dy.options().dtype(detail::compute_type(dy)));
  add_dense_gradient(sums, dy, ids);
  return sums.to(dy.scalar_type());
}

void accumulate_embedding_gradient(at::Tensor& main_gradient, const at::Tensor& dy, const at::Tensor& ids,
                                   const Policy& policy) {
  if constexpr (fast::kBuilt) {
    if (fast::accumulate_embedding_gradient(main_gradient, dy, ids, policy)) return;
  }
  main_gradient.add_(embedding_gradient(dy, ids, main_gradient.size(0), policy));
}

}  // namespace pgpt::kernels

#include "parallel.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>

namespace pgpt::kernels::detail {

void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                  const std::function<void(std::int64_t, std::int64_t)>& function) {
  const std::int64_t items = end - begin;
  if (items <= 0) return;
  if (items <= grain || at::get_num_threads() == 1 || at::in_parallel_region()) {
    function(begin, end);
    return;
  }
  // An iteration over a byte an item, whose address tells the item: for_each is compiled in libtorch.
  at::Tensor bytes = at::empty({items}, at::kByte);
  const auto* first = static_cast<const char*>(bytes.const_data_ptr());
  at::TensorIterator iterator = at::TensorIterator::nullary_op(bytes);
  iterator.for_each(
      [&](char** data, const std::int64_t* strides, std::int64_t columns, std::int64_t rows) {
        for (std::int64_t row = 0; row < rows; ++row) {
          const std::int64_t item = begin + (data[0] + row * strides[1] - first);
          function(item, item + columns);
        }
      },
      grain);
}

}  // namespace pgpt::kernels::detail

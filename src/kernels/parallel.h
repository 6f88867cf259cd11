#pragma once

#include <cstdint>
#include <functional>

namespace pgpt::kernels::detail {

/// Calls function(first, last) for disjoint stretches of [begin, end) of at least `grain` items on libtorch's own CPU
/// threads, and waits; an exception of any of them is thrown here. (at::parallel_for runs on one thread wherever its
/// caller is not compiled for OpenMP, as this project is not: it would bring a second OpenMP runtime beside
/// libtorch's.)
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                  const std::function<void(std::int64_t, std::int64_t)>& function);

}  // namespace pgpt::kernels::detail

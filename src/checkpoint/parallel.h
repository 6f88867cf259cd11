#pragma once

#include <cstddef>
#include <functional>

namespace pgpt::checkpoint {

/// Calls work(worker, task) for every task below `tasks`, on up to `threads` threads; the first exception stops the
/// rest and is thrown. Signals stay with the calling thread.
void parallel_tasks(std::size_t tasks, int threads, const std::function<void(int worker, std::size_t task)>& work);

}  // namespace pgpt::checkpoint

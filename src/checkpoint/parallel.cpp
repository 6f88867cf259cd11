#include "parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace pgpt::checkpoint {

void parallel_tasks(std::size_t tasks, int threads, const std::function<void(int worker, std::size_t task)>& work) {
  std::atomic<std::size_t> next{0};
  std::atomic<bool> stop{false};
  std::exception_ptr failure;
  std::mutex mutex;
  const auto run = [&](int worker) {
    while (!stop) {
      const std::size_t task = next.fetch_add(1);
      if (task >= tasks) return;
      try {
        work(worker, task);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
        stop = true;
      }
    }
  };
  const int count = static_cast<int>(std::min<std::size_t>(static_cast<std::size_t>(std::max(threads, 1)), tasks));
  std::vector<std::thread> others;
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int worker = 1; worker < count; ++worker) others.emplace_back(run, worker);
  } catch (...) {
    // Fewer threads than wanted do the same work.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  run(0);
  for (std::thread& thread : others) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace pgpt::checkpoint

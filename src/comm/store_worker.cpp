#include "store_worker.h"

#include <pthread.h>
#include <signal.h>

namespace pgpt::comm {
namespace {

/// Helper threads leave signals to the main thread.
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace

StoreWorker::StoreWorker() : thread_([shared = shared_] { run(shared); }) {}

StoreWorker::~StoreWorker() { stop(std::chrono::milliseconds(200)); }

std::future<void> StoreWorker::submit(Task task) {
  std::packaged_task<void()> packaged(std::move(task));
  auto future = packaged.get_future();
  {
    const std::lock_guard lock(shared_->mutex);
    if (!shared_->stopping) shared_->queue.push_back(std::move(packaged));
  }
  shared_->changed.notify_all();
  return future;
}

void StoreWorker::every(std::chrono::milliseconds interval, Task task) {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->periodic = std::move(task);
    shared_->interval = interval;
    shared_->next_periodic = std::chrono::steady_clock::now();
  }
  shared_->changed.notify_all();
}

void StoreWorker::stop(std::chrono::milliseconds grace) {
  if (!thread_.joinable()) return;
  bool finished = false;
  {
    std::unique_lock lock(shared_->mutex);
    shared_->stopping = true;
    shared_->changed.notify_all();
    finished = shared_->changed.wait_for(lock, grace, [this] { return shared_->finished; });
  }
  if (finished) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void StoreWorker::run(const std::shared_ptr<Shared>& shared) {
  block_signals();
  std::unique_lock lock(shared->mutex);
  while (!shared->stopping) {
    if (!shared->queue.empty()) {
      auto task = std::move(shared->queue.front());
      shared->queue.pop_front();
      lock.unlock();
      task();
      task = {};  // drops what the task owns before the lock is taken again
      lock.lock();
    } else if (!shared->periodic) {
      shared->changed.wait(lock);
    } else if (std::chrono::steady_clock::now() < shared->next_periodic) {
      shared->changed.wait_until(lock, shared->next_periodic);
    } else {
      const Task periodic = shared->periodic;
      lock.unlock();
      bool failed = false;
      try {
        periodic();
      } catch (...) {
        failed = true;  // the task has recorded why
      }
      lock.lock();
      if (failed) shared->periodic = nullptr;
      shared->next_periodic = std::chrono::steady_clock::now() + shared->interval;
    }
  }
  shared->queue.clear();
  shared->periodic = nullptr;
  shared->finished = true;
  shared->changed.notify_all();
}

}  // namespace pgpt::comm

#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

namespace pgpt::comm {

/// One thread for everything that may block inside the store. Nobody waits for it without a limit: when a call never
/// returns, because the store's host is stopped or silent, the thread is abandoned (detached) and the process goes on
/// to its end.
class StoreWorker {
 public:
  using Task = std::function<void()>;

  StoreWorker();
  /// As `stop` with a grace of 200 ms.
  ~StoreWorker();
  StoreWorker(const StoreWorker&) = delete;
  StoreWorker& operator=(const StoreWorker&) = delete;

  /// Queues a task; what it throws is kept in the future. Tasks must own everything that they touch.
  std::future<void> submit(Task task);
  /// Runs `task` every `interval` between other tasks, until it throws or `stop`.
  void every(std::chrono::milliseconds interval, Task task);
  /// Takes no more tasks and joins the thread if it comes back within `grace`, else abandons it.
  void stop(std::chrono::milliseconds grace);

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::packaged_task<void()>> queue;
    Task periodic;
    std::chrono::milliseconds interval{0};
    std::chrono::steady_clock::time_point next_periodic;
    bool stopping = false;
    bool finished = false;
  };
  static void run(const std::shared_ptr<Shared>& shared);

  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::thread thread_;
};

}  // namespace pgpt::comm

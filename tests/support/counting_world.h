#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "pgpt/comm/world.h"

/// A world whose collectives are counted, for tests of how much a run communicates.
namespace pgpt::test {

/// Hands everything to another communicator and counts the launches.
class CountingCommunicator final : public comm::Communicator {
 public:
  CountingCommunicator(std::unique_ptr<comm::Communicator> inner, std::atomic<std::int64_t>& count)
      : inner_(std::move(inner)), count_(count) {}

  [[nodiscard]] int rank() const override { return inner_->rank(); }
  [[nodiscard]] int size() const override { return inner_->size(); }
  [[nodiscard]] const std::string& name() const override { return inner_->name(); }
  [[nodiscard]] const std::vector<int>& global_ranks() const override { return inner_->global_ranks(); }
  [[nodiscard]] comm::Pending all_gather(at::Tensor output, at::Tensor input) override {
    return counted().all_gather(output, input);
  }
  [[nodiscard]] comm::Pending all_gather_fenced(at::Tensor output, at::Tensor input) override {
    return counted().all_gather_fenced(output, input);
  }
  [[nodiscard]] comm::Pending fence() override { return counted().fence(); }
  [[nodiscard]] comm::Pending reduce_scatter(at::Tensor output, at::Tensor input, comm::ReduceOp op) override {
    return counted().reduce_scatter(output, input, op);
  }
  [[nodiscard]] comm::Pending reduce_scatter_add(at::Tensor accumulator, at::Tensor input, bool overwrite) override {
    return counted().reduce_scatter_add(accumulator, input, overwrite);
  }
  [[nodiscard]] comm::Pending all_reduce(at::Tensor tensor, comm::ReduceOp op) override {
    return counted().all_reduce(tensor, op);
  }
  [[nodiscard]] comm::Pending broadcast(at::Tensor tensor, int root) override {
    return counted().broadcast(tensor, root);
  }
  [[nodiscard]] comm::Pending all_to_all(at::Tensor output, at::Tensor input) override {
    return counted().all_to_all(output, input);
  }
  [[nodiscard]] comm::Pending send(at::Tensor tensor, int peer) override { return counted().send(tensor, peer); }
  [[nodiscard]] comm::Pending receive(at::Tensor tensor, int peer) override { return counted().receive(tensor, peer); }
  void share(const std::vector<at::Tensor>& tensors) override { counted().share(tensors); }
  [[nodiscard]] bool copies_shared() const override { return inner_->copies_shared(); }
  void barrier() override { counted().barrier(); }

 private:
  comm::Communicator& counted() {
    ++count_;
    return *inner_;
  }
  std::unique_ptr<comm::Communicator> inner_;
  std::atomic<std::int64_t>& count_;
};

/// Hands everything to another world; `count`, which must outlive it, grows with every collective of its groups.
class CountingWorld final : public comm::World {
 public:
  CountingWorld(std::unique_ptr<comm::World> inner, std::atomic<std::int64_t>& count)
      : inner_(std::move(inner)), count_(count) {}

  [[nodiscard]] int rank() const override { return inner_->rank(); }
  [[nodiscard]] int size() const override { return inner_->size(); }
  std::unique_ptr<comm::Communicator> create_group(const std::string& name, const std::vector<int>& ranks,
                                                   const comm::GroupOptions& options) override {
    return std::make_unique<CountingCommunicator>(inner_->create_group(name, ranks, options), count_);
  }
  void set_timeout(std::chrono::milliseconds timeout) override { inner_->set_timeout(timeout); }
  void set_activity(const std::string& activity) override { inner_->set_activity(activity); }
  void set_slow(std::chrono::milliseconds allowance) override { inner_->set_slow(allowance); }
  void announce_failure(const std::string& reason) noexcept override { inner_->announce_failure(reason); }
  void end_on_signals() override { inner_->end_on_signals(); }
  void shutdown() override { inner_->shutdown(); }
  std::string share(const std::string& key, const std::string& text) override { return inner_->share(key, text); }

 private:
  std::unique_ptr<comm::World> inner_;
  std::atomic<std::int64_t>& count_;
};

}  // namespace pgpt::test

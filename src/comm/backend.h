#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "pgpt/base/error.h"
#include "pgpt/comm/communicator.h"
#include "watchdog.h"

namespace pgpt::comm {

/// What a collective leaves behind; `finish` runs once, from `Pending::wait`.
struct Pending::State {
  virtual ~State() = default;
  virtual void finish() = 0;
};

/// What a group holds beyond its backend and closes in order at the world's shutdown. Without an orderly end nothing is
/// closed.
struct GroupResource {
  virtual ~GroupResource() = default;
  /// Collective over the group, when nothing is in flight any more.
  virtual void close() = 0;
};

/// A group's connection, owned by its world and shared with its communicator.
struct BackendGroup {
  GroupPtr record;
  c10::intrusive_ptr<c10d::Backend> backend;  ///< null after the world's shutdown
  std::shared_ptr<GroupResource> resource;    ///< null for most groups
  Watchdog* watchdog = nullptr;               ///< null in worlds of threads
  std::chrono::milliseconds timeout{0};       ///< the backend's own limit of one operation

  /// Throws when the world has been shut down.
  c10d::Backend& open() const;
  /// Counts one more operation.
  uint64_t next() const { return ++record->sequence; }
  /// The error to throw for a failed operation.
  CommError failed(const char* operation, uint64_t sequence, const std::exception& error) const;
};
using BackendGroupPtr = std::shared_ptr<BackendGroup>;

/// How a group is opened.
struct GroupSetup {
  GroupPtr record;
  c10::intrusive_ptr<c10d::Store> store;
  Watchdog* watchdog = nullptr;
  std::chrono::milliseconds connect_timeout{0};
  std::chrono::milliseconds timeout{0};
  bool high_priority = false;
};

/// gloo's listening end; one a process serves all groups.
class GlooDevice {
 public:
  /// `address` is one of this host's own; empty lets libtorch choose by host name.
  explicit GlooDevice(const std::string& address);
  struct Impl;
  std::shared_ptr<Impl> impl;
};

BackendGroupPtr open_gloo_group(const GroupSetup& setup, const GlooDevice& device);
std::unique_ptr<Communicator> make_gloo_communicator(BackendGroupPtr group);
/// CUDA tensors through pinned host memory; every collective is complete at launch.
std::unique_ptr<Communicator> make_staged_communicator(BackendGroupPtr group);
/// A group of one rank.
std::unique_ptr<Communicator> make_single_communicator(GroupPtr record);

/// Only in builds with CUDA; else throws ConfigError.
BackendGroupPtr open_nccl_group(const GroupSetup& setup);
std::unique_ptr<Communicator> make_nccl_communicator(BackendGroupPtr group, bool high_priority);
/// An NCCL group whose shared tensors move by copy engine. Collective; where that cannot work every member throws
/// ConfigError, or with `or_nccl` gets a plain NCCL communicator. `setup` is what `group` was opened with.
std::unique_ptr<Communicator> make_copy_engine_communicator(const GroupSetup& setup, BackendGroupPtr group,
                                                            bool or_nccl);
/// Keeps torch's own NCCL watchdog, monitor and dumps out of the way: ours owns every deadline.
void silence_torch_nccl_watchdog();
/// Number of CUDA devices that this process sees; 0 in a build without CUDA.
int visible_gpus();
/// Waits for all work of the current device.
void synchronize_device();

/// Shape and layout rules that all backends share.
void check_gather(const at::Tensor& output, const at::Tensor& input, int size);
void check_scatter(const at::Tensor& output, const at::Tensor& input, int size, ReduceOp op);
void check_scatter_add(const at::Tensor& accumulator, const at::Tensor& input, int size);
void check_reduce(const at::Tensor& tensor, ReduceOp op);
void check_same_size(const at::Tensor& output, const at::Tensor& input, int size);
void check_contiguous(const at::Tensor& tensor);

/// The tensor's memory as a flat tensor of bytes: moves any dtype.
at::Tensor as_bytes(const at::Tensor& tensor);

}  // namespace pgpt::comm

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace pgpt::comm {

enum class ReduceOp { kSum, kAverage, kMax, kMin };

/// A collective in flight: owns its tensors until `wait`; move-only; must be waited for before it is destroyed.
class Pending {
 public:
  Pending();
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&&) noexcept;
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;
  ~Pending();

  /// Makes the result usable: on NCCL the current stream waits for the collective's event (the host does not block); on
  /// gloo the host blocks until it is done. Does nothing when there is nothing in flight. Throws CommError if the
  /// collective failed.
  void wait();
  /// True while a collective is in flight, that is from its launch until `wait`.
  [[nodiscard]] bool active() const noexcept;

  struct State;
  explicit Pending(std::unique_ptr<State> state);

 private:
  std::unique_ptr<State> state_;
};

/// Collectives among an ordered set of ranks. Every member must launch the same collectives in the same order.
///
/// All tensors are contiguous (asserted) and live on the communicator's device kind. A launch first makes the
/// communication stream wait for the caller's current stream, so inputs written there are seen. Inputs may be changed
/// and outputs read only after `Pending::wait`. A group of one rank never communicates: the result is copied (or
/// already in place) when the call returns, and the handle is not active. The order of additions depends only on the
/// group's size and the tensor's, so results repeat bit for bit. kAverage is for floating-point tensors: on gloo the
/// sum, then one multiplication by 1/size in the tensor's dtype; on NCCL the multiplication comes first (the same bits
/// for powers of two). A copy-engine group adds the parts of shared tensors in rank order, in fp32 with one rounding at
/// the end: NCCL's bits for two ranks.
class Communicator {
 public:
  virtual ~Communicator() = default;
  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  [[nodiscard]] virtual const std::string& name() const = 0;  ///< e.g. "gtp"
  [[nodiscard]] virtual const std::vector<int>& global_ranks() const = 0;

  /// output [size * n] = concatenation of every rank's input [n]; any dtype.
  [[nodiscard]] virtual Pending all_gather(at::Tensor output, at::Tensor input) = 0;
  /// The same for an input that lies in a shared tensor and that no rank changes between the last `fence` before the
  /// call and the next one after it. Where peers' memory can be read it waits for no peer.
  [[nodiscard]] virtual Pending all_gather_fenced(at::Tensor output, at::Tensor input);
  /// Collective: parts the changes of shared tensors from the fenced gathers that read them. What every rank's current
  /// stream holds at its call comes before the fenced gathers that any rank launches later; those launched before it
  /// come before all that a stream does after waiting for the handle.
  [[nodiscard]] virtual Pending fence();
  /// output [n] = this rank's part of the reduced input [size * n]; kSum or kAverage.
  [[nodiscard]] virtual Pending reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) = 0;
  /// Adds this rank's part of the summed input [size * n] to `accumulator` [n] (`overwrite`: replaces it). The sum has
  /// input's dtype, as from reduce_scatter; the accumulator may be fp32 while input is 16-bit.
  [[nodiscard]] virtual Pending reduce_scatter_add(at::Tensor accumulator, at::Tensor input, bool overwrite);
  /// The same without this rank's own part: `accumulator` (+)= the sum of the others'.
  [[nodiscard]] virtual Pending reduce_scatter_others(at::Tensor accumulator, at::Tensor input, bool overwrite);
  /// Reduces in place.
  [[nodiscard]] virtual Pending all_reduce(at::Tensor tensor, ReduceOp op) = 0;
  /// In place; `root` is a rank of this group.
  [[nodiscard]] virtual Pending broadcast(at::Tensor tensor, int root) = 0;
  /// Equal parts: part i of input goes to rank i, part i of output comes from rank i.
  [[nodiscard]] virtual Pending all_to_all(at::Tensor output, at::Tensor input) = 0;
  /// `peer` is a rank of this group. Two ranks that exchange must not both send first: NCCL would wait forever.
  [[nodiscard]] virtual Pending send(at::Tensor tensor, int peer) = 0;
  [[nodiscard]] virtual Pending receive(at::Tensor tensor, int peer) = 0;
  /// Collective: from now on peers may read these tensors' memory directly, so the group keeps them until the world's
  /// shutdown. Every rank lists tensors of the same sizes; a collective on a part of one is then called by every rank
  /// with the same part. Backends that read no peer's memory ignore it. Throws ConfigError on every rank when the
  /// memory of one cannot be shared.
  virtual void share(const std::vector<at::Tensor>& tensors);
  /// True when collectives on shared tensors are copies out of the peers' memory.
  [[nodiscard]] virtual bool copies_shared() const { return false; }
  /// Returns when every rank of the group has called it and the device has finished what was launched before.
  virtual void barrier() = 0;
};

}  // namespace pgpt::comm

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pgpt/comm/communicator.h"
#include "pgpt/parameter/parameter_store.h"

namespace pgpt::gtp {

/// Which part of the step reads a weight; each keeps its own in-flight handles and buffers.
enum class Pass { kForward, kBackward, kRecompute };

/// Index of a use in its chain.
using UseId = std::size_t;

/// One read of a weight in the forward pass. A tied embedding has two.
struct UseSpec {
  std::string label;  ///< for messages, e.g. "decoder.layers.0.mlp.linear_fc1"
  parameter::Parameter* weight = nullptr;
  bool prefetch = true;               ///< false: always gathered on demand (the embedding)
  bool read_in_backward = true;       ///< false: its gradient needs no weight (the embedding)
  std::int64_t recompute_group = -1;  ///< uses that are recomputed together, in forward order; -1 = never recomputed
  at::ScalarType gradient_dtype = at::kFloat;  ///< that its gradient is computed and scattered in
};

struct ChainOptions {
  bool prefetch = true;       ///< gather the next weight while the current one is used
  bool async_scatter = true;  ///< finish a reduce-scatter when its buffer is needed again, two uses later
  bool fp32_accumulation =
      false;  ///< above 2 peers: all-to-all and an fp32 sum instead of a reduce-scatter in the gradient's dtype
  /// A step's first gradient is computed in two products: the peers' rows, which travel, and this rank's on top of what
  /// came from them, so that nothing is left to add up.
  bool split_products = false;
  std::size_t kept_uses = 0;  ///< uses at the chain's end whose gathered weights stay until the weights change
  bool mean = true;           ///< divide gradients by the group size; false with --calculate-per-token-loss
};

/// A gathered weight; reading it after its buffer has been given to another weight is an error naming both.
class GatheredWeight {
 public:
  /// The whole logical matrix [rows, columns], padding cut off.
  [[nodiscard]] const at::Tensor& get() const;

 private:
  friend class WeightChain;
  struct Slot;
  at::Tensor tensor_;
  std::shared_ptr<const Slot> slot_;
  std::uint64_t generation_ = 0;
};

/// The sharded weights of one model in the order of their first use: gathers each before it is read, one ahead, and
/// reduce-scatters each gradient, finishing behind (spec/gtp.md 8-11). Immutable after construction; a group of one
/// rank communicates and allocates nothing.
///
/// Calls happen on the thread and (CUDA) current stream of the computation. Every peer makes the same calls in the same
/// order.
class WeightChain {
 public:
  /// Called when the last contribution of a microbatch to a weight's main gradient shard has been added.
  using GradientReady = std::function<void(parameter::Parameter&)>;

  /// `gather` and `scatter` span the same GTP peers (they may be one communicator, which serialises both directions).
  WeightChain(std::vector<UseSpec> uses, comm::Communicator& gather, comm::Communicator& scatter,
              const ChainOptions& options, GradientReady on_gradient_ready);
  ~WeightChain();
  WeightChain(const WeightChain&) = delete;
  WeightChain& operator=(const WeightChain&) = delete;

  [[nodiscard]] bool distributed() const;
  [[nodiscard]] const std::vector<UseSpec>& uses() const { return uses_; }

  /// The whole weight of a use, ready on the current stream; starts the gather of the pass's next use. It stays valid
  /// until the use after the next is read in the same pass; a kept one until `release_weights`. Throws std::logic_error
  /// naming both uses when another use was the one prefetched.
  [[nodiscard]] GatheredWeight read(UseId use, Pass pass);
  /// Ends the reading: afterwards, on the current stream, this rank's shards may be changed. Every peer calls it
  /// between its last read and the change.
  void release_weights();
  /// Checks that a pass has ended with nothing in flight (after a forward-only evaluation, or before an optimizer
  /// step).
  void end_pass(Pass pass) const;

  /// Where one microbatch's whole weight gradient of a use goes; valid until `gradient_written`.
  struct GradientTarget {
    at::Tensor tensor;       ///< [rows, columns], without padding rows
    double scale = 1.0;      ///< to multiply the gradient by: 1/peers where gradients are averaged
    bool overwrite = false;  ///< replace what the tensor holds instead of adding to it

    /// Writes a gradient that was computed elsewhere; it is scaled in place.
    void write(at::Tensor gradient) const;
  };
  /// The place to write a gradient to, in the use's gradient dtype: the main gradient itself for a group of one whose
  /// main gradients have that dtype, else a buffer. The caller writes it on the current stream, then calls
  /// `gradient_written`.
  [[nodiscard]] GradientTarget gradient_target(UseId use);
  /// Brings the gradient written last to the main gradient: at once for a group of one, else by a reduce-scatter that
  /// completes with the next calls.
  void gradient_written(UseId use);
  /// Computes rows [first, first + target.size(0)) of a use's whole gradient from one microbatch:
  /// target (overwrite ? = : +=) scale * rows.
  using Product = std::function<void(at::Tensor target, std::int64_t first, double scale, bool overwrite)>;
  /// The same for a gradient that `product` computes, at once or in parts; a part may be computed as late as
  /// `finish_gradients`, on the stream that is current then.
  void add_product(UseId use, Product product);
  /// Completes every reduce-scatter still in flight; before gradients are reduced further.
  void finish_gradients();

  /// Collectives launched so far, for tests and logs.
  struct Counters {
    std::int64_t gathers = 0, prefetched_gathers = 0, scatters = 0;
  };
  [[nodiscard]] const Counters& counters() const { return counters_; }

 private:
  struct Scatter;
  [[nodiscard]] comm::Pending& pending_gather(UseId use, Pass pass);
  [[nodiscard]] const std::shared_ptr<GatheredWeight::Slot>& slot_of(UseId use, Pass pass) const;
  /// [padded rows, columns] view of the use's buffer.
  [[nodiscard]] at::Tensor whole_weight(UseId use, Pass pass) const;
  void launch_gather(UseId use, Pass pass);
  [[nodiscard]] std::ptrdiff_t next_use(UseId use, Pass pass) const;
  [[nodiscard]] at::Tensor whole_gradient(UseId use) const;
  void launched(UseId use, std::unique_ptr<Scatter> scatter);
  void finish_scatter(UseId use);
  void contribution_added(UseId use);

  std::vector<UseSpec> uses_;
  comm::Communicator& gather_;
  comm::Communicator& scatter_;
  ChainOptions options_;
  GradientReady on_gradient_ready_;
  Counters counters_;
  std::vector<comm::Pending> gathers_;              // [pass * uses + use]
  std::vector<std::unique_ptr<Scatter>> scatters_;  // per use: in flight or null
  std::vector<bool> last_in_backward_;              // per use: no earlier use reads the same weight
  // Two buffers a pass, taken in turns by chain position, so that a weight being read and the next one never share.
  std::vector<std::shared_ptr<GatheredWeight::Slot>> slots_;  // [pass * 2 + parity]
  std::vector<std::shared_ptr<GatheredWeight::Slot>> kept_;   // per use: a buffer of its own, or null
  bool reading_ = false;                        // a fence after the last change of weights has been passed
  comm::Pending reading_since_;                 // that fence, until the first read
  std::ptrdiff_t in_flight_[3] = {-1, -1, -1};  // per pass: the prefetched use, or -1
  at::Tensor staging_[2];  // whole gradients on their way, taken in turns by chain position; raw bytes
  at::Tensor written_;     // the tensor of the last gradient_target: main gradient or a padded whole gradient
};

}  // namespace pgpt::gtp

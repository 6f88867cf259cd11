#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pgpt/parameter/random.h"
#include "pgpt/parameter/shard_layout.h"

namespace pgpt::parameter {

/// How a parameter gets its first values (spec/model.md 9).
enum class InitRule {
  kOnes,
  kZeros,
  kNormal,               ///< N(0, std) from a device stream
  kXavierUniform,        ///< U(-b, b), b = sqrt(6 / (rows + columns)) of the logical matrix
  kPositionTable,        ///< CPU stream: a discarded N(0,1) fill, then N(0, std), in fp32
  kXavierPositionTable,  ///< the same with U(-b, b) as the second fill
};

/// What a model declares of one parameter, in registration order (which is the order of the draws).
struct ParameterSpec {
  std::string name;                 ///< the reference's state-dict name
  std::vector<std::int64_t> shape;  ///< logical shape on this tensor-parallel rank
  InitRule init = InitRule::kZeros;
  double std = 0.02;
  bool gtp_sharded = false;    ///< rows are cut over the GTP group
  bool shard_drawn = false;    ///< each GTP peer draws only its shard, from its own stream (Transformer Engine linears)
  std::int64_t first_use = 0;  ///< position in the forward pass; gradients become ready in reverse
  bool decoupled_lr = false;   ///< word embedding and output layer: --decoupled-lr applies
  double weight_decay_multiplier = 1.0;
};

/// A named view of the flat buffers.
struct Parameter {
  ParameterSpec spec;
  ShardLayout layout;
  at::Tensor weight;         ///< local part, padding rows included, in the parameter dtype
  at::Tensor main_gradient;  ///< same shape, fp32 (or the parameter dtype with bf16 gradient reduction)
  std::int64_t offset = 0;   ///< first element in the flat buffers
  std::int64_t bucket = 0;
  bool gtp_duplicate =
      false;  ///< replicated over GTP and held here by a peer other than rank 0: skipped in norms and counts
  bool awaits_gradient = false;  ///< the main gradient still holds the last step's values: the next ones replace it

  /// True for a step's first contribution, which then replaces the main gradient instead of being added.
  [[nodiscard]] bool take_first_contribution() { return std::exchange(awaits_gradient, false); }
  /// Adds a tensor of the local shape, of any dtype, or replaces with a step's first one.
  void add_to_main_gradient(const at::Tensor& gradient);
  [[nodiscard]] std::int64_t num_elements() const { return weight.numel(); }
  [[nodiscard]] bool sharded() const { return layout.sharded_over(mesh::Axis::kGtp); }
};

/// A stretch of the flat gradient buffer that is reduced in one collective.
struct Bucket {
  std::int64_t begin = 0, end = 0;                        ///< elements, end aligned to lcm(data ranks, 128)
  std::int64_t replicated_begin = 0, replicated_end = 0;  ///< part whose parameters every GTP peer holds whole
  std::vector<std::size_t> parameters;                    ///< indices into ParameterStore::parameters()
};

struct StoreOptions {
  at::ScalarType weight_dtype = at::kFloat;
  at::ScalarType gradient_dtype = at::kFloat;
  at::Device device = at::kCPU;
  std::int64_t gtp_rank = 0, gtp_size = 1;
  std::int64_t data_shards = 1;      ///< replicate data ranks times context ranks: bucket ends are multiples of it
  std::int64_t bucket_elements = 0;  ///< a bucket closes when it has reached this size; 0 = one bucket
  bool layout_invariant = false;     ///< --weight-init layout-invariant
  bool host_initialization = false;  ///< --use-cpu-initialization
  bool initialize = true;            ///< --no-initialization leaves matrices unset (zero)
  std::int64_t sm_count = 132;       ///< multiprocessors assumed when CUDA draws are emulated on the CPU
};

/// Owns one contiguous tensor each for weights and main gradients, and every parameter's place in them.
///
/// Order in memory is the reverse of first use, so gradients become ready front to back. Parameters start at multiples
/// of 64 elements; inside a bucket those replicated over GTP lie together at its end. Alignment gaps are zero and stay
/// zero.
class ParameterStore {
 public:
  ParameterStore(std::vector<ParameterSpec> specs, const StoreOptions& options);
  ParameterStore(const ParameterStore&) = delete;
  ParameterStore& operator=(const ParameterStore&) = delete;

  /// Draws all values in registration order from the streams, which advance.
  void initialize(RandomStreams& streams);

  [[nodiscard]] std::vector<Parameter>& parameters() { return parameters_; }  ///< in registration order
  [[nodiscard]] const std::vector<Parameter>& parameters() const { return parameters_; }
  /// Throws std::logic_error for an unknown name.
  [[nodiscard]] Parameter& find(const std::string& name);
  [[nodiscard]] bool contains(const std::string& name) const;
  [[nodiscard]] const std::vector<Bucket>& buckets() const { return buckets_; }
  [[nodiscard]] at::Tensor& weights() { return weights_; }      ///< [elements], weight dtype
  [[nodiscard]] at::Tensor& gradients() { return gradients_; }  ///< [elements], gradient dtype
  [[nodiscard]] const at::Tensor& weights() const { return weights_; }
  [[nodiscard]] const at::Tensor& gradients() const { return gradients_; }
  [[nodiscard]] std::int64_t num_elements() const { return weights_.numel(); }
  /// Sum of local elements, padding rows included: what the reference prints per rank.
  [[nodiscard]] std::int64_t num_local_parameters() const;
  [[nodiscard]] const StoreOptions& options() const { return options_; }

 private:
  void draw(Parameter& parameter, RandomStreams& streams);

  StoreOptions options_;
  std::vector<Parameter> parameters_;
  std::vector<Bucket> buckets_;
  at::Tensor weights_;
  at::Tensor gradients_;
};

}  // namespace pgpt::parameter

#pragma once

// Launchers of the CUDA kernels: raw pointers, element types, sizes and a stream. No torch here, so that .cu files
// compile fast.
//
// All pointers are device memory. Work goes to `stream`, nothing waits for it, nothing is allocated: workspaces come
// from the caller. Every kernel gives the same bits each time for the same inputs on the same GPU model (no
// floating-point atomics). A failed launch throws DeviceError. Shapes that a kernel does not take are listed beside it;
// callers check them first.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace pgpt::kernels::cuda {

/// Element types that the kernels read and write; arithmetic is fp32.
enum class Type { kFloat32, kBfloat16, kFloat16 };

// ---- normalisation: h a multiple of 8, at most 16384, pointers 16-byte aligned ----

/// Where a norm kernel reads and writes. `x_type` is the residual stream's type, `type` that of weight, delta, dy and
/// y.
struct NormArguments {
  Type x_type, type;
  std::int64_t rows, width;
  double epsilon;
  bool rms, zero_centered;
  const void* weight;  ///< [width]
  const void* bias;    ///< [width], null for RMSNorm
  float* mean;         ///< [rows], null for RMSNorm
  float* rstd;         ///< [rows]
};
/// y = norm(x); with `delta` non-null x is replaced by rounded(x + delta), which is also written to `sum`.
void norm_forward(const NormArguments& norm, const void* x, const void* delta, void* sum, void* y, cudaStream_t stream);
/// True where norm_backward also gives column sums: dx in the layer's type, at most 8192 columns.
[[nodiscard]] bool norm_backward_sums(const NormArguments& norm);
/// Bytes of workspace that norm_backward needs; `sums`: with column sums.
[[nodiscard]] std::size_t norm_backward_workspace(const NormArguments& norm, bool sums);
/// dx = rounded norm gradient, plus `skip` and rounded again when non-null; dweight and dbias (null for RMSNorm) from
/// fp32 sums. `column_sums` [width], null when not wanted: column sums of dx, in fp32, rounded.
void norm_backward(const NormArguments& norm, const void* dy, const void* x, const void* skip, void* dx, void* dweight,
                   void* dbias, void* column_sums, void* workspace, cudaStream_t stream);

/// Bytes of workspace that column_sum needs.
[[nodiscard]] std::size_t column_sum_workspace(std::int64_t rows, std::int64_t columns);
/// out [columns] = column sums of x [rows, columns], summed in fp32, rounded to `type`; any shape.
void column_sum(Type type, const void* x, std::int64_t rows, std::int64_t columns, void* out, void* workspace,
                cudaStream_t stream);

// ---- rotary positions: batch * sequence < 2^31 - 256, even head_dim ----

/// Angles and form of a rotation; `sin_sign` -1 turns it back.
struct RotationArguments {
  const float* cos;  ///< [positions, dim/2]
  const float* sin;
  const std::int32_t* positions;  ///< row of the table for each token; null: its index along the sequence
  std::int64_t dim;               ///< rotated channels, even; 0: no rotation
  bool interleaved;
  bool fused_rounding;
  float sin_sign;
};
/// Layout of rows of heads: element (batch, position, group, head) starts at base + batch*batch_stride +
/// position*position_stride + group*group_stride + head*head_stride (in elements); channels are contiguous.
struct HeadLayout {
  std::int64_t batch, sequence, groups, heads, head_dim;
  std::int64_t batch_stride, position_stride, group_stride, head_stride;
};
/// Rotates all heads of `x` in place.
void rotate(Type type, void* x, const HeadLayout& layout, const RotationArguments& rotation, cudaStream_t stream);

/// One of q, k and v as [batch, sequence, heads, head_dim] with strides in elements (channels contiguous).
struct HeadsPointer {
  void* data;
  std::int64_t batch_stride, position_stride, head_stride;
};
/// The packed QKV tensor and its three parts.
struct QkvArguments {
  Type type;
  std::int64_t batch, sequence, groups, heads_per_group, head_dim;
  void* packed;  ///< contiguous [batch, sequence, groups, heads_per_group + 2, head_dim]
  HeadsPointer q, k, v;
};
/// packed -> q, k, v, rotating q and k.
void split_qkv(const QkvArguments& qkv, const RotationArguments& rotation, cudaStream_t stream);
/// q, k, v -> packed, rotating q and k.
void merge_qkv(const QkvArguments& qkv, const RotationArguments& rotation, cudaStream_t stream);
/// True where merge_qkv_sums takes this layout: 16-byte accesses everywhere.
[[nodiscard]] bool merge_qkv_sums_fits(const QkvArguments& qkv, const RotationArguments& rotation);
/// Bytes of workspace that merge_qkv_sums needs.
[[nodiscard]] std::size_t merge_qkv_sums_workspace(const QkvArguments& qkv, const RotationArguments& rotation);
/// merge_qkv, and column_sums [packed width] = sums of packed over the tokens, in fp32, rounded.
void merge_qkv_sums(const QkvArguments& qkv, const RotationArguments& rotation, void* column_sums, void* workspace,
                    cudaStream_t stream);

// ---- activations: features a multiple of 8, rows * features < 2^34, pointers 16-byte aligned ----

enum class Activation { kGeluTanh, kGeluErf, kSquaredRelu, kSwiglu, kQuickGeglu };
struct ActivationArguments {
  Type type;
  Activation kind;
  bool fused_rounding;
  float glu_offset, clamp;      ///< clamp 0: none
  std::int64_t rows, features;  ///< features of the output; gated kinds read 2 * features
  const void* x;
  const void* bias;  ///< width of x, or null
};
void activation_forward(const ActivationArguments& activation, void* y, cudaStream_t stream);
void activation_backward(const ActivationArguments& activation, const void* dy, void* dx, cudaStream_t stream);
/// Bytes of workspace that activation_backward_sums needs.
[[nodiscard]] std::size_t activation_backward_sums_workspace(const ActivationArguments& activation);
/// activation_backward, and column_sums [width of x] = sums of dx over the rows, in fp32, rounded.
void activation_backward_sums(const ActivationArguments& activation, const void* dy, void* dx, void* column_sums,
                              void* workspace, cudaStream_t stream);

// ---- dropout: pointers 16-byte aligned ----

struct DropoutArguments {
  std::uint64_t seed, offset;
  std::uint32_t threshold;             ///< an element is dropped when its 32 random bits are below it
  float scale;                         ///< of kept elements
  bool active;                         ///< false: keep all, unscaled
  const std::int64_t* base = nullptr;  ///< device: added to the offset
};
/// y = dropout(x), any element count.
void dropout(Type type, const void* x, std::int64_t count, const DropoutArguments& dropout, void* y,
             cudaStream_t stream);
/// y = residual + dropout(x + bias) in `residual_type`; width (of bias) a multiple of 8 and count < 2^34 when
/// `bias` is non-null.
void bias_dropout_add(Type type, Type residual_type, const void* x, const void* bias, const void* residual,
                      std::int64_t count, std::int64_t width, const DropoutArguments& dropout, bool fused_rounding,
                      void* y, cudaStream_t stream);

// ---- embedding: width a multiple of 8, pointers 16-byte aligned ----

/// y [tokens, width] = rows of table; an id outside [0, rows) gives a row of NaN.
void embedding_forward(Type type, const void* table, std::int64_t rows, std::int64_t width, const std::int64_t* ids,
                       std::int64_t tokens, void* y, cudaStream_t stream);
/// Bytes of workspace that the embedding gradients need (tokens < 2^31, rows < 2^31).
[[nodiscard]] std::size_t embedding_gradient_workspace(std::int64_t tokens, std::int64_t width, std::int64_t rows);
/// out [rows, width] in `type` = sums of dy [tokens, width] by id (fp32 inside, one rounding), zero where no id points.
void embedding_gradient(Type type, const void* dy, const std::int64_t* ids, std::int64_t tokens, std::int64_t width,
                        std::int64_t rows, void* out, void* workspace, cudaStream_t stream);
/// main_gradient [rows, width] fp32 += the same sums, unrounded.
void accumulate_embedding_gradient(Type type, const void* dy, const std::int64_t* ids, std::int64_t tokens,
                                   std::int64_t width, std::int64_t rows, float* main_gradient, void* workspace,
                                   cudaStream_t stream);

// ---- cross entropy: any shape ----

/// loss [rows] fp32 of logits [rows, vocabulary]; with `scale` non-null the logits become (softmax - onehot) *
/// scale[row], rounded. A label outside [0, vocabulary) makes that row's loss NaN.
void cross_entropy(Type type, void* logits, const std::int64_t* labels, std::int64_t rows, std::int64_t vocabulary,
                   const float* scale, float* loss, cudaStream_t stream);

// ---- flat buffers ----

/// Device copy of pgpt::kernels::Segment: sorted by begin, not overlapping.
struct SegmentRecord {
  std::int64_t begin, end;
  std::int32_t group;
  float weight_decay_multiplier, norm_weight;
};
/// Places of one step's values in `scalars`; learning rates start at `learning_rates`.
struct ScalarPlaces {
  int gradient_scale, skip, bias_correction1, bias_correction2, weight_decay, first_momentum, learning_rates;
};
struct FlatArguments {
  std::int64_t count;  ///< elements in every buffer
  const SegmentRecord* segments;
  std::int64_t num_segments;
};
struct StepArguments {
  Type weight_type, gradient_type;
  void* weights;  ///< null: the master is the weight
  float* master;
  const void* gradient;
  const float* scalars;
  ScalarPlaces places;
};
/// AdamW over all segments; elements in no segment stay. Buffers 16-byte aligned.
void adam_step(const FlatArguments& flat, const StepArguments& step, float* exp_avg, float* exp_avg_sq, float beta1,
               float beta2, float epsilon, cudaStream_t stream);
/// SGD with momentum over all segments.
void sgd_step(const FlatArguments& flat, const StepArguments& step, float* momentum_buffer, float momentum,
              cudaStream_t stream);

/// Bytes of workspace of squared_norm and count_zeros.
[[nodiscard]] std::size_t flat_reduction_workspace();
/// *out = sum of squares over segments with norm_weight != 0, in fp64.
void squared_norm(Type type, const void* x, const FlatArguments& flat, double* out, void* workspace,
                  cudaStream_t stream);
/// *out = number of zeros over segments with norm_weight != 0.
void count_zeros(Type type, const void* x, const FlatArguments& flat, std::int64_t* out, void* workspace,
                 cudaStream_t stream);
/// *out = 1 if any of `count` elements is NaN or Inf, else 0.
void has_non_finite(Type type, const void* x, std::int64_t count, float* out, cudaStream_t stream);
/// Values of the skip flag of a step: 0, or one of these.
constexpr float kJustStopped = 1.0F;
constexpr float kStoppedBefore = 2.0F;
/// Clip coefficient and skip flag: see pgpt::kernels::finish_norm. `guard` may be null.
void finish_norm(const double* squared, const double* guard, double clip, float* norm, float* scalars,
                 const ScalarPlaces& places, cudaStream_t stream);
/// See pgpt::kernels::mark_non_finite; `flags` has one byte a segment.
void mark_non_finite(Type type, const void* x, const FlatArguments& flat, float* skip, std::uint8_t* flags,
                     cudaStream_t stream);

}  // namespace pgpt::kernels::cuda

#pragma once

// Torch side of the CUDA kernels. Each function runs the kernel when it takes these tensors (device, types, layout,
// sizes) and otherwise returns nothing (or false), and the caller goes on with its composite. Only linked into CUDA
// builds: call them behind `if constexpr (fast::kBuilt)`. Where `column_sums` is not null but left alone, the kernel
// does not take it along and the caller sums the result itself.

#include <optional>

#include "pgpt/kernels/kernels.h"

namespace pgpt::kernels::fast {

#ifdef PGPT_WITH_CUDA
inline constexpr bool kBuilt = true;
#else
inline constexpr bool kBuilt = false;
#endif

/// norm_forward, or add_norm_forward when `delta` is defined (`sum` then receives the new stream).
[[nodiscard]] std::optional<at::Tensor> norm_forward(const at::Tensor& x, const at::Tensor& delta,
                                                     const at::Tensor& weight, const at::Tensor& bias,
                                                     const NormOptions& options, at::Tensor* sum,
                                                     NormStatistics& statistics, const Policy& policy);
[[nodiscard]] std::optional<NormGradients> norm_backward(const at::Tensor& dy, const at::Tensor& x,
                                                         const at::Tensor& weight, const at::Tensor& bias,
                                                         const NormOptions& options, const NormStatistics& statistics,
                                                         const at::Tensor& skip_gradient, const Policy& policy,
                                                         at::Tensor* column_sums);
[[nodiscard]] std::optional<at::Tensor> column_sum(const at::Tensor& dy);

/// True when x was rotated.
[[nodiscard]] bool rope_(const at::Tensor& x, const RopeTable& table, bool backward, const Policy& policy,
                         const at::Tensor& positions);
[[nodiscard]] std::optional<Qkv> split_qkv(const at::Tensor& packed, std::int64_t num_heads, std::int64_t num_groups,
                                           std::int64_t head_dim, const RopeTable* rope, const Policy& policy,
                                           const at::Tensor& positions);
[[nodiscard]] std::optional<at::Tensor> merge_qkv_gradient(const Qkv& gradient, const RopeTable* rope,
                                                           const Policy& policy, at::Tensor* column_sums,
                                                           const at::Tensor& positions);

[[nodiscard]] std::optional<at::Tensor> activation_forward(const at::Tensor& x, const at::Tensor& bias,
                                                           const ActivationOptions& options, const Policy& policy);
[[nodiscard]] std::optional<at::Tensor> activation_backward(const at::Tensor& dy, const at::Tensor& x,
                                                            const at::Tensor& bias, const ActivationOptions& options,
                                                            const Policy& policy, at::Tensor* column_sums);

[[nodiscard]] std::optional<at::Tensor> dropout(const at::Tensor& x, const DropoutState& state, const Policy& policy);
[[nodiscard]] std::optional<at::Tensor> bias_dropout_add(const at::Tensor& x, const at::Tensor& bias,
                                                         const at::Tensor& residual, const DropoutState& state,
                                                         bool fused_rounding, const Policy& policy);

[[nodiscard]] std::optional<at::Tensor> embedding_forward(const at::Tensor& table, const at::Tensor& ids);
[[nodiscard]] std::optional<at::Tensor> embedding_gradient(const at::Tensor& dy, const at::Tensor& ids,
                                                           std::int64_t rows, const Policy& policy);
/// True when the gradient was added.
[[nodiscard]] bool accumulate_embedding_gradient(const at::Tensor& main_gradient, const at::Tensor& dy,
                                                 const at::Tensor& ids, const Policy& policy);
/// Losses; with `scale` defined the logits are overwritten by their gradient.
[[nodiscard]] std::optional<at::Tensor> cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                                      const at::Tensor& scale, const Policy& policy);

[[nodiscard]] std::optional<at::Tensor> squared_norm(const at::Tensor& flat, const SegmentTable& segments,
                                                     const Policy& policy);
[[nodiscard]] std::optional<at::Tensor> count_zeros(const at::Tensor& flat, const SegmentTable& segments);
[[nodiscard]] std::optional<at::Tensor> has_non_finite(const at::Tensor& flat);
/// True when the scalars were written.
[[nodiscard]] bool finish_norm(const at::Tensor& squared, double clip, const at::Tensor& guard, const at::Tensor& norm,
                               const StepScalars& scalars);
[[nodiscard]] bool mark_non_finite(const at::Tensor& flat, const SegmentTable& segments, const StepScalars& scalars,
                                   const at::Tensor& flags);
/// True when the step was made.
[[nodiscard]] bool adam_step(const at::Tensor& weights, const at::Tensor& master, const at::Tensor& exp_avg,
                             const at::Tensor& exp_avg_sq, const at::Tensor& gradient, const SegmentTable& segments,
                             const AdamOptions& options, const StepScalars& scalars, const Policy& policy);
[[nodiscard]] bool sgd_step(const at::Tensor& weights, const at::Tensor& master, const at::Tensor& momentum_buffer,
                            const at::Tensor& gradient, const SegmentTable& segments, double momentum,
                            const StepScalars& scalars, const Policy& policy);

}  // namespace pgpt::kernels::fast

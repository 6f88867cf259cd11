// Layers on CUDA: checks, output tensors, launches.

#ifdef PGPT_WITH_CUDA

#include "fast.h"
#include "fast_checks.h"
#include "philox.h"

namespace pgpt::kernels::fast {
namespace {

constexpr std::int64_t kMaxNormWidth = 16384;

// The part that norm forward and backward share; nothing when the kernels do not take these tensors.
std::optional<cuda::NormArguments> norm_arguments(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                                  const NormOptions& options, const Policy& policy) {
  if (!policy.fast || !on_gpu(x) || !on_gpu(weight) || x.dim() != 2) return std::nullopt;
  const bool types = x.scalar_type() == weight.scalar_type() || x.scalar_type() == at::kFloat;
  const std::int64_t width = x.size(1);
  if (!types || !plain(x) || !plain(weight) || !plain_or_undefined(bias, weight.scalar_type())) return std::nullopt;
  if (width % 8 != 0 || width == 0 || width > kMaxNormWidth || weight.numel() != width) return std::nullopt;
  if (options.rms && bias.defined()) return std::nullopt;
  cuda::NormArguments norm{};
  norm.x_type = *type_of(x);
  norm.type = *type_of(weight);
  norm.rows = x.size(0);
  norm.width = width;
  norm.epsilon = options.epsilon;
  norm.rms = options.rms;
  norm.zero_centered = options.zero_centered;
  norm.weight = data(weight);
  norm.bias = data(bias);
  return norm;
}

bool rope_fits(const RopeTable& table, const at::Tensor& x, std::int64_t head_dim, const at::Tensor& positions) {
  if (positions.defined() && (!positions.is_cuda() || positions.scalar_type() != at::kInt ||
                              !positions.is_contiguous() || positions.numel() != x.size(0) * x.size(1)))
    return false;
  return table.cos.is_cuda() && table.cos.scalar_type() == at::kFloat && table.cos.is_contiguous() &&
         table.sin.is_contiguous() && x.size(1) <= table.cos.size(0) && table.options.dim <= head_dim &&
         head_dim % 2 == 0;
}

cuda::RotationArguments rotation_of(const RopeTable* table, bool backward, const at::Tensor& positions) {
  cuda::RotationArguments rotation{};
  rotation.fused_rounding = true;
  rotation.sin_sign = backward ? -1.0F : 1.0F;
  if (table == nullptr) return rotation;
  rotation.cos = table->cos.const_data_ptr<float>();
  rotation.sin = table->sin.const_data_ptr<float>();
  if (positions.defined()) rotation.positions = positions.const_data_ptr<std::int32_t>();
  rotation.dim = table->options.dim;
  rotation.interleaved = table->options.interleaved;
  rotation.fused_rounding = table->options.fused_rounding;
  return rotation;
}

// Offsets inside a token's heads are computed in 31 bits.
bool countable(const at::Tensor& x) { return x.size(0) * x.size(1) < (std::int64_t{1} << 31) - 256; }

cuda::HeadsPointer heads_of(const at::Tensor& t) {
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

cuda::QkvArguments qkv_arguments(const Qkv& parts, const at::Tensor& packed) {
  cuda::QkvArguments qkv{};
  qkv.type = *type_of(packed);
  qkv.batch = parts.q.size(0);
  qkv.sequence = parts.q.size(1);
  qkv.groups = parts.k.size(2);
  qkv.heads_per_group = parts.q.size(2) / parts.k.size(2);
  qkv.head_dim = parts.q.size(3);
  qkv.packed = packed.mutable_data_ptr();
  qkv.q = heads_of(parts.q);
  qkv.k = heads_of(parts.k);
  qkv.v = heads_of(parts.v);
  return qkv;
}

std::optional<cuda::ActivationArguments> activation_arguments(const at::Tensor& x, const at::Tensor& bias,
                                                              const ActivationOptions& options, const Policy& policy) {
  if (!policy.fast || !on_gpu(x) || x.dim() != 2 || !plain(x) || !plain_or_undefined(bias, x.scalar_type()))
    return std::nullopt;
  const bool gated = options.kind == ActivationKind::kSwiglu || options.kind == ActivationKind::kQuickGeglu;
  const std::int64_t features = gated ? x.size(1) / 2 : x.size(1);
  if (features % 8 != 0 || features == 0 || x.size(0) * features >= std::int64_t{1} << 34) return std::nullopt;
  cuda::ActivationArguments arguments{};
  switch (options.kind) {
    case ActivationKind::kGeluTanh:
      arguments.kind = cuda::Activation::kGeluTanh;
      break;
    case ActivationKind::kGeluErf:
      arguments.kind = cuda::Activation::kGeluErf;
      break;
    case ActivationKind::kSwiglu:
      arguments.kind = cuda::Activation::kSwiglu;
      break;
    case ActivationKind::kSquaredRelu:
      arguments.kind = cuda::Activation::kSquaredRelu;
      break;
    case ActivationKind::kQuickGeglu:
      arguments.kind = cuda::Activation::kQuickGeglu;
      break;
  }
  arguments.type = *type_of(x);
  arguments.fused_rounding = options.fused_rounding;
  arguments.glu_offset = static_cast<float>(options.glu_offset);
  arguments.clamp = static_cast<float>(options.clamp);
  arguments.rows = x.size(0);
  arguments.features = features;
  arguments.x = data(x);
  arguments.bias = data(bias);
  return arguments;
}

cuda::DropoutArguments dropout_arguments(const DropoutState& state) {
  return {state.seed,
          state.offset,
          detail::dropout_threshold(state.probability),
          detail::dropout_scale(state.probability),
          state.probability > 0,
          static_cast<const std::int64_t*>(data(state.base))};
}

bool embedding_fits(const at::Tensor& rows, const at::Tensor& ids) {
  constexpr std::int64_t kMax = (std::int64_t{1} << 31) - 64;
  return on_gpu(rows) && plain(rows) && rows.dim() == 2 && rows.size(1) % 8 == 0 && rows.size(1) > 0 && ids.is_cuda() &&
         ids.scalar_type() == at::kLong && rows.size(0) < kMax && ids.numel() < kMax;
}

}  // namespace

std::optional<at::Tensor> norm_forward(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight,
                                       const at::Tensor& bias, const NormOptions& options, at::Tensor* sum,
                                       NormStatistics& statistics, const Policy& policy) {
  auto norm = norm_arguments(x, weight, bias, options, policy);
  if (!norm || !plain_or_undefined(delta, weight.scalar_type())) return std::nullopt;
  const c10::cuda::CUDAGuard guard(x.device());
  const auto fp32 = x.options().dtype(at::kFloat);
  statistics.mean = options.rms ? at::Tensor() : at::empty({x.size(0)}, fp32);
  statistics.rstd = at::empty({x.size(0)}, fp32);
  norm->mean = static_cast<float*>(mutable_data(statistics.mean));
  norm->rstd = static_cast<float*>(mutable_data(statistics.rstd));
  at::Tensor y = at::empty(x.sizes(), weight.options());
  at::Tensor new_stream;
  if (delta.defined()) new_stream = at::empty_like(x);
  cuda::norm_forward(*norm, data(x), data(delta), mutable_data(new_stream), mutable_data(y), stream());
  if (delta.defined()) *sum = std::move(new_stream);
  return y;
}

std::optional<NormGradients> norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                                           const at::Tensor& bias, const NormOptions& options,
                                           const NormStatistics& statistics, const at::Tensor& skip_gradient,
                                           const Policy& policy, at::Tensor* column_sums) {
  auto norm = norm_arguments(x, weight, bias, options, policy);
  if (!norm || !plain(dy) || dy.scalar_type() != weight.scalar_type() ||
      !plain_or_undefined(skip_gradient, x.scalar_type()) || !plain_or_undefined(statistics.mean, at::kFloat) ||
      !plain(statistics.rstd)) {
    return std::nullopt;
  }
  const c10::cuda::CUDAGuard guard(x.device());
  norm->mean = static_cast<float*>(mutable_data(statistics.mean));
  norm->rstd = static_cast<float*>(mutable_data(statistics.rstd));
  NormGradients gradients;
  gradients.input = at::empty_like(x);
  gradients.weight = at::empty_like(weight);
  if (bias.defined()) gradients.bias = at::empty_like(bias);
  at::Tensor sums;
  if (column_sums != nullptr && cuda::norm_backward_sums(*norm)) sums = at::empty_like(weight);
  const at::Tensor space = workspace(cuda::norm_backward_workspace(*norm, sums.defined()), x);
  cuda::norm_backward(*norm, data(dy), data(x), data(skip_gradient), mutable_data(gradients.input),
                      mutable_data(gradients.weight), mutable_data(gradients.bias), mutable_data(sums),
                      mutable_data(space), stream());
  if (sums.defined()) *column_sums = std::move(sums);
  return gradients;
}

std::optional<at::Tensor> column_sum(const at::Tensor& dy) {
  if (!on_gpu(dy) || !dy.is_contiguous() || dy.dim() != 2) return std::nullopt;
  const c10::cuda::CUDAGuard guard(dy.device());
  at::Tensor sums = at::empty({dy.size(1)}, dy.options());
  const at::Tensor space = workspace(cuda::column_sum_workspace(dy.size(0), dy.size(1)), dy);
  cuda::column_sum(*type_of(dy), data(dy), dy.size(0), dy.size(1), mutable_data(sums), mutable_data(space), stream());
  return sums;
}

bool rope_(const at::Tensor& x, const RopeTable& table, bool backward, const Policy& policy,
           const at::Tensor& positions) {
  if (!policy.fast || !on_gpu(x) || x.dim() != 4 || x.stride(3) != 1 || !countable(x) ||
      !rope_fits(table, x, x.size(3), positions))
    return false;
  const c10::cuda::CUDAGuard guard(x.device());
  const cuda::HeadLayout layout{x.size(0),   x.size(1),   1, x.size(2),  x.size(3),
                                x.stride(0), x.stride(1), 0, x.stride(2)};
  cuda::rotate(*type_of(x), x.mutable_data_ptr(), layout, rotation_of(&table, backward, positions), stream());
  return true;
}

std::optional<Qkv> split_qkv(const at::Tensor& packed, std::int64_t num_heads, std::int64_t num_groups,
                             std::int64_t head_dim, const RopeTable* rope, const Policy& policy,
                             const at::Tensor& positions) {
  if (rope == nullptr || !policy.fast || !on_gpu(packed) || packed.dim() != 3 || !packed.is_contiguous())
    return std::nullopt;
  if (!countable(packed) || !rope_fits(*rope, packed, head_dim, positions)) return std::nullopt;
  const c10::cuda::CUDAGuard guard(packed.device());
  const std::int64_t b = packed.size(0), s = packed.size(1), heads = num_heads / num_groups;
  const cuda::RotationArguments rotation = rotation_of(rope, false, positions);
  Qkv parts;
  if (heads == 1 || num_groups == 1) {
    // Views serve: queries and keys, side by side in each group, turn in place and the values stay untouched.
    const std::int64_t group_stride = (heads + 2) * head_dim, position_stride = num_groups * group_stride;
    const cuda::HeadLayout layout{
        b, s, num_groups, heads + 1, head_dim, s * position_stride, position_stride, group_stride, head_dim};
    cuda::rotate(*type_of(packed), packed.mutable_data_ptr(), layout, rotation, stream());
    const at::Tensor groups = packed.view({b, s, num_groups, heads + 2, head_dim});
    parts.q = groups.narrow(3, 0, heads).reshape({b, s, num_heads, head_dim});
    parts.k = groups.select(3, heads);
    parts.v = groups.select(3, heads + 1);
    return parts;
  }
  parts.q = at::empty({b, s, num_heads, head_dim}, packed.options());
  parts.k = at::empty({b, s, num_groups, head_dim}, packed.options());
  parts.v = at::empty({b, s, num_groups, head_dim}, packed.options());
  cuda::split_qkv(qkv_arguments(parts, packed), rotation, stream());
  return parts;
}

std::optional<at::Tensor> merge_qkv_gradient(const Qkv& gradient, const RopeTable* rope, const Policy& policy,
                                             at::Tensor* column_sums, const at::Tensor& positions) {
  const at::Tensor& q = gradient.q;
  if (!policy.fast || !on_gpu(q) || q.dim() != 4 || !countable(q) || q.size(3) % 2 != 0) return std::nullopt;
  for (const at::Tensor* part : {&q, &gradient.k, &gradient.v}) {
    if (part->stride(3) != 1 || part->scalar_type() != q.scalar_type() || !part->is_cuda()) return std::nullopt;
  }
  if (rope != nullptr && !rope_fits(*rope, q, q.size(3), positions)) return std::nullopt;
  const c10::cuda::CUDAGuard guard(q.device());
  at::Tensor packed = at::empty({q.size(0), q.size(1), (q.size(2) + 2 * gradient.k.size(2)) * q.size(3)}, q.options());
  const cuda::QkvArguments arguments = qkv_arguments(gradient, packed);
  const cuda::RotationArguments rotation = rotation_of(rope, true, positions);
  if (column_sums != nullptr && cuda::merge_qkv_sums_fits(arguments, rotation)) {
    at::Tensor sums = at::empty({packed.size(2)}, packed.options());
    const at::Tensor space = workspace(cuda::merge_qkv_sums_workspace(arguments, rotation), packed);
    cuda::merge_qkv_sums(arguments, rotation, mutable_data(sums), mutable_data(space), stream());
    *column_sums = std::move(sums);
  } else {
    cuda::merge_qkv(arguments, rotation, stream());
  }
  return packed;
}

std::optional<at::Tensor> activation_forward(const at::Tensor& x, const at::Tensor& bias,
                                             const ActivationOptions& options, const Policy& policy) {
  const auto arguments = activation_arguments(x, bias, options, policy);
  if (!arguments) return std::nullopt;
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor y = at::empty({x.size(0), arguments->features}, x.options());
  cuda::activation_forward(*arguments, mutable_data(y), stream());
  return y;
}

std::optional<at::Tensor> activation_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& bias,
                                              const ActivationOptions& options, const Policy& policy,
                                              at::Tensor* column_sums) {
  const auto arguments = activation_arguments(x, bias, options, policy);
  if (!arguments || !plain(dy) || dy.scalar_type() != x.scalar_type()) return std::nullopt;
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor dx = at::empty_like(x);
  if (column_sums != nullptr && x.size(0) > 0) {
    at::Tensor sums = at::empty({x.size(1)}, x.options());
    const at::Tensor space = workspace(cuda::activation_backward_sums_workspace(*arguments), x);
    cuda::activation_backward_sums(*arguments, data(dy), mutable_data(dx), mutable_data(sums), mutable_data(space),
                                   stream());
    *column_sums = std::move(sums);
  } else {
    cuda::activation_backward(*arguments, data(dy), mutable_data(dx), stream());
  }
  return dx;
}

std::optional<at::Tensor> dropout(const at::Tensor& x, const DropoutState& state, const Policy& policy) {
  if (!policy.fast || !on_gpu(x) || !plain(x)) return std::nullopt;
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor y = at::empty_like(x);
  cuda::dropout(*type_of(x), data(x), x.numel(), dropout_arguments(state), mutable_data(y), stream());
  return y;
}

std::optional<at::Tensor> bias_dropout_add(const at::Tensor& x, const at::Tensor& bias, const at::Tensor& residual,
                                           const DropoutState& state, bool fused_rounding, const Policy& policy) {
  if (!policy.fast || !on_gpu(x) || !on_gpu(residual) || !plain(x) || !plain(residual)) return std::nullopt;
  if (x.sizes() != residual.sizes() || !plain_or_undefined(bias, x.scalar_type())) return std::nullopt;
  if (residual.scalar_type() != x.scalar_type() && residual.scalar_type() != at::kFloat) return std::nullopt;
  const std::int64_t width = bias.defined() ? bias.numel() : 8;
  if (bias.defined() && (width % 8 != 0 || width != x.size(-1) || x.numel() >= std::int64_t{1} << 34))
    return std::nullopt;
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor y = at::empty_like(residual);
  cuda::bias_dropout_add(*type_of(x), *type_of(residual), data(x), data(bias), data(residual), x.numel(), width,
                         dropout_arguments(state), fused_rounding, mutable_data(y), stream());
  return y;
}

std::optional<at::Tensor> embedding_forward(const at::Tensor& table, const at::Tensor& ids) {
  if (!embedding_fits(table, ids)) return std::nullopt;
  const c10::cuda::CUDAGuard guard(table.device());
  const at::Tensor flat = ids.reshape({-1}).contiguous();
  at::Tensor y = at::empty({flat.numel(), table.size(1)}, table.options());
  cuda::embedding_forward(*type_of(table), data(table), table.size(0), table.size(1),
                          flat.const_data_ptr<std::int64_t>(), flat.numel(), mutable_data(y), stream());
  return y;
}

std::optional<at::Tensor> embedding_gradient(const at::Tensor& dy, const at::Tensor& ids, std::int64_t rows,
                                             const Policy& policy) {
  if (!policy.fast || !embedding_fits(dy, ids) || ids.numel() != dy.size(0) || rows >= (std::int64_t{1} << 31) - 64)
    return std::nullopt;
  const c10::cuda::CUDAGuard guard(dy.device());
  const at::Tensor flat = ids.reshape({-1}).contiguous();
  at::Tensor out = at::empty({rows, dy.size(1)}, dy.options());
  const at::Tensor space = workspace(cuda::embedding_gradient_workspace(flat.numel(), dy.size(1), rows), dy);
  cuda::embedding_gradient(*type_of(dy), data(dy), flat.const_data_ptr<std::int64_t>(), flat.numel(), dy.size(1), rows,
                           mutable_data(out), mutable_data(space), stream());
  return out;
}

bool accumulate_embedding_gradient(const at::Tensor& main_gradient, const at::Tensor& dy, const at::Tensor& ids,
                                   const Policy& policy) {
  if (!policy.fast || !embedding_fits(dy, ids) || ids.numel() != dy.size(0) || !on_gpu(main_gradient) ||
      !plain(main_gradient))
    return false;
  if (main_gradient.scalar_type() != at::kFloat || main_gradient.size(0) >= (std::int64_t{1} << 31) - 64) return false;
  const c10::cuda::CUDAGuard guard(dy.device());
  const at::Tensor flat = ids.reshape({-1}).contiguous();
  const std::int64_t rows = main_gradient.size(0);
  const at::Tensor space = workspace(cuda::embedding_gradient_workspace(flat.numel(), dy.size(1), rows), dy);
  cuda::accumulate_embedding_gradient(*type_of(dy), data(dy), flat.const_data_ptr<std::int64_t>(), flat.numel(),
                                      dy.size(1), rows, main_gradient.mutable_data_ptr<float>(), mutable_data(space),
                                      stream());
  return true;
}

std::optional<at::Tensor> cross_entropy(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& scale,
                                        const Policy& policy) {
  if (!policy.fast || !on_gpu(logits) || logits.dim() != 2 || !logits.is_contiguous() || logits.size(1) == 0)
    return std::nullopt;
  if (logits.size(1) >= std::int64_t{1} << 31 || !labels.is_cuda() || !labels.is_contiguous()) return std::nullopt;
  if (labels.scalar_type() != at::kLong || !plain_or_undefined(scale, at::kFloat)) return std::nullopt;
  const c10::cuda::CUDAGuard guard(logits.device());
  at::Tensor losses = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat));
  cuda::cross_entropy(*type_of(logits), logits.mutable_data_ptr(), labels.const_data_ptr<std::int64_t>(),
                      logits.size(0), logits.size(1), static_cast<const float*>(data(scale)),
                      losses.mutable_data_ptr<float>(), stream());
  return losses;
}

}  // namespace pgpt::kernels::fast

#endif  // PGPT_WITH_CUDA

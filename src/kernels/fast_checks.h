#pragma once

// What the torch side of the CUDA kernels asks of tensors. CUDA builds only.

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <optional>

#include "cuda_launch.h"

namespace pgpt::kernels::fast {

/// Element type of the kernels for a torch type; nothing for types they do not take (fp64, integers).
inline std::optional<cuda::Type> type_of(at::ScalarType type) {
  if (type == at::kFloat) return cuda::Type::kFloat32;
  if (type == at::kBFloat16) return cuda::Type::kBfloat16;
  if (type == at::kHalf) return cuda::Type::kFloat16;
  return std::nullopt;
}
inline std::optional<cuda::Type> type_of(const at::Tensor& t) { return type_of(t.scalar_type()); }

/// True for CUDA tensors of a type that the kernels take.
inline bool on_gpu(const at::Tensor& t) { return t.is_cuda() && type_of(t).has_value(); }

/// True for a contiguous tensor whose data starts at a 16-byte boundary.
inline bool plain(const at::Tensor& t) {
  return t.is_contiguous() && reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % 16 == 0;
}
/// True for an undefined tensor, or a plain one of this type.
inline bool plain_or_undefined(const at::Tensor& t, at::ScalarType type) {
  return !t.defined() || (plain(t) && t.scalar_type() == type);
}

/// Pointer to read from, null for an undefined tensor.
inline const void* data(const at::Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }
/// Pointer to write to, null for an undefined tensor.
inline void* mutable_data(const at::Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; }

/// The stream of the current device that work is enqueued on.
inline cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

/// Uninitialised bytes on `like`'s device; the allocator reuses them in stream order after the tensor is gone.
inline at::Tensor workspace(std::size_t bytes, const at::Tensor& like) {
  return at::empty({static_cast<std::int64_t>(bytes)}, like.options().dtype(at::kByte));
}

}  // namespace pgpt::kernels::fast

// Activations with optional bias, and their gradients; a thread does 8 output columns of one row.

#include "device.cuh"

namespace pgpt::kernels::cuda {
namespace {

constexpr int kThreads = 256;
// The reference's constants: tanh GELU's sqrt(2/pi), its cubic coefficient and 3 * sqrt(2/pi) * that; quick GELU's
// slope.
constexpr float kGeluScale = 0.79788456F, kGeluCubic = 0.044715F, kGeluDerivative = 0.1070322243F, kQuickGelu = 1.702F;
constexpr float kInverseSqrt2 = 0.707106781186547524F,
                kNormalDensity = 0.398942280401432678F;  // 1/sqrt(2), 1/sqrt(2 pi)

struct Options {
  bool fused_rounding;
  float glu_offset, clamp;
};

template <Activation Kind>
constexpr bool kGated = Kind == Activation::kSwiglu || Kind == Activation::kQuickGeglu;
template <Activation Kind>
constexpr float kSlope = Kind == Activation::kQuickGeglu ? kQuickGelu : 1.0F;

__device__ float sigmoid(float x) { return __fdividef(1.0F, 1.0F + __expf(-x)); }

template <Activation Kind>
__device__ float plain_value(float u) {
  if constexpr (Kind == Activation::kGeluTanh) {
    // 0.5 (1 + tanh z) = sigmoid(2 z)
    return u * sigmoid(2.0F * kGeluScale * u * (1.0F + kGeluCubic * u * u));
  } else if constexpr (Kind == Activation::kGeluErf) {
    return 0.5F * u * (1.0F + erff(u * kInverseSqrt2));
  } else {
    const float positive = u > 0.0F ? u : (u == u ? 0.0F : u);
    return positive * positive;
  }
}
template <Activation Kind>
__device__ float plain_derivative(float u) {
  if constexpr (Kind == Activation::kGeluTanh) {
    const float s = sigmoid(2.0F * kGeluScale * u * (1.0F + kGeluCubic * u * u));
    return s + 2.0F * u * s * (1.0F - s) * (kGeluScale + kGeluDerivative * u * u);
  } else if constexpr (Kind == Activation::kGeluErf) {
    return 0.5F * (1.0F + erff(u * kInverseSqrt2)) + u * kNormalDensity * __expf(-0.5F * u * u);
  } else {
    return u > 0.0F ? 2.0F * u : (u == u ? 0.0F : u);
  }
}

template <class T>
__device__ void load_input(const T* x, const T* bias, bool fused_rounding, float (&u)[8]) {
  unpack(load8(x), u);
  if (bias != nullptr) {
    float b[8];
    unpack(load8(bias), b);
#pragma unroll
    for (int i = 0; i < 8; ++i) u[i] = fused_rounding ? u[i] + b[i] : rounded<T>(u[i] + b[i]);
  }
}
template <class T>
__device__ float step(float x, bool fused_rounding) {
  return fused_rounding ? x : rounded<T>(x);
}

template <class T, Activation Kind>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* __restrict__ x, const T* __restrict__ bias, Options options, std::uint32_t count,
                   FastDivider vectors_per_row, T* __restrict__ y) {
  const std::uint32_t vector = blockIdx.x * kThreads + threadIdx.x;
  if (vector >= count) return;
  const std::int64_t row = vectors_per_row.divide(vector), features = std::int64_t{8} * vectors_per_row.divisor;
  const std::int64_t column = std::int64_t{8} * vector - row * features;
  float result[8];
  if constexpr (kGated<Kind>) {
    float linear[8];
    const T* const from = x + row * 2 * features + column;
    load_input(from, bias == nullptr ? nullptr : bias + column, options.fused_rounding, result);
    load_input(from + features, bias == nullptr ? nullptr : bias + features + column, options.fused_rounding, linear);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float gate = result[i];
      if (options.clamp > 0.0F) {
        gate = fminf(gate, options.clamp);
        linear[i] = fminf(fmaxf(linear[i], -options.clamp), options.clamp);
      }
      if (options.glu_offset != 0.0F) linear[i] = step<T>(linear[i] + options.glu_offset, options.fused_rounding);
      result[i] = step<T>(gate * sigmoid(kSlope<Kind> * gate), options.fused_rounding) * linear[i];
    }
  } else {
    load_input(x + row * features + column, bias == nullptr ? nullptr : bias + column, options.fused_rounding, result);
#pragma unroll
    for (int i = 0; i < 8; ++i) result[i] = plain_value<Kind>(result[i]);
  }
  store8(y + row * features + column, pack<T>(result));
}

template <class T, Activation Kind>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ bias, Options options,
                    std::uint32_t count, FastDivider vectors_per_row, T* __restrict__ dx) {
  const std::uint32_t vector = blockIdx.x * kThreads + threadIdx.x;
  if (vector >= count) return;
  const std::int64_t row = vectors_per_row.divide(vector), features = std::int64_t{8} * vectors_per_row.divisor;
  const std::int64_t column = std::int64_t{8} * vector - row * features;
  float g[8], first[8];
  unpack(load8(dy + row * features + column), g);
  if constexpr (kGated<Kind>) {
    float second[8];
    const std::int64_t at = row * 2 * features + column;
    load_input(x + at, bias == nullptr ? nullptr : bias + column, options.fused_rounding, first);
    load_input(x + at + features, bias == nullptr ? nullptr : bias + features + column, options.fused_rounding, second);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float gate = first[i], linear = second[i];
      if (options.clamp > 0.0F) {
        gate = fminf(gate, options.clamp);
        linear = fminf(fmaxf(linear, -options.clamp), options.clamp);
      }
      if (options.glu_offset != 0.0F) linear = step<T>(linear + options.glu_offset, options.fused_rounding);
      const float s = sigmoid(kSlope<Kind> * gate);
      float to_gate = step<T>(g[i] * linear, options.fused_rounding) * (s * (1.0F + kSlope<Kind> * gate * (1.0F - s)));
      float to_linear = g[i] * step<T>(gate * s, options.fused_rounding);
      if (options.clamp > 0.0F) {
        if (first[i] > options.clamp) to_gate = 0.0F;
        if (fabsf(second[i]) > options.clamp) to_linear = 0.0F;
      }
      first[i] = to_gate;
      second[i] = to_linear;
    }
    store8(dx + at, pack<T>(first));
    store8(dx + at + features, pack<T>(second));
  } else {
    load_input(x + row * features + column, bias == nullptr ? nullptr : bias + column, options.fused_rounding, first);
#pragma unroll
    for (int i = 0; i < 8; ++i) first[i] = plain_derivative<Kind>(first[i]) * g[i];
    store8(dx + row * features + column, pack<T>(first));
  }
}

// Calls f(T{}, integral_constant<Activation>).
template <class F>
void with_kind(const ActivationArguments& a, F&& f) {
  with_type(a.type, [&](auto tag) {
    switch (a.kind) {
      case Activation::kGeluTanh:
        return f(tag, std::integral_constant<Activation, Activation::kGeluTanh>{});
      case Activation::kGeluErf:
        return f(tag, std::integral_constant<Activation, Activation::kGeluErf>{});
      case Activation::kSquaredRelu:
        return f(tag, std::integral_constant<Activation, Activation::kSquaredRelu>{});
      case Activation::kSwiglu:
        return f(tag, std::integral_constant<Activation, Activation::kSwiglu>{});
      case Activation::kQuickGeglu:
        return f(tag, std::integral_constant<Activation, Activation::kQuickGeglu>{});
    }
    throw std::logic_error("internal error: unknown activation");
  });
}

struct Launch {
  Options options;
  std::uint32_t count;
  FastDivider vectors_per_row;
  unsigned blocks;

  explicit Launch(const ActivationArguments& a)
      : options{a.fused_rounding, a.glu_offset, a.clamp},
        count(static_cast<std::uint32_t>(a.rows * (a.features / 8))),
        vectors_per_row(static_cast<std::uint32_t>(a.features / 8)),
        blocks(ceil_div<unsigned>(count, kThreads)) {}
};

}  // namespace

void activation_forward(const ActivationArguments& a, void* y, cudaStream_t stream) {
  if (a.rows == 0) return;
  const Launch l(a);
  with_kind(a, [&](auto tag, auto kind) {
    using T = decltype(tag);
    forward_kernel<T, decltype(kind)::value>
        <<<l.blocks, kThreads, 0, stream>>>(static_cast<const T*>(a.x), static_cast<const T*>(a.bias), l.options,
                                            l.count, l.vectors_per_row, static_cast<T*>(y));
  });
  check_launch("activation_forward");
}

void activation_backward(const ActivationArguments& a, const void* dy, void* dx, cudaStream_t stream) {
  if (a.rows == 0) return;
  const Launch l(a);
  with_kind(a, [&](auto tag, auto kind) {
    using T = decltype(tag);
    backward_kernel<T, decltype(kind)::value><<<l.blocks, kThreads, 0, stream>>>(
        static_cast<const T*>(dy), static_cast<const T*>(a.x), static_cast<const T*>(a.bias), l.options, l.count,
        l.vectors_per_row, static_cast<T*>(dx));
  });
  check_launch("activation_backward");
}

}  // namespace pgpt::kernels::cuda

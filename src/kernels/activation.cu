// Activations with optional bias, and their gradients; a thread does 8 output columns of one row.

#include "columns.cuh"
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
__device__ void add_bias(const Raw8<T>& bias, bool fused_rounding, float (&u)[8]) {
  float b[8];
  unpack(bias, b);
#pragma unroll
  for (int i = 0; i < 8; ++i) u[i] = fused_rounding ? u[i] + b[i] : rounded<T>(u[i] + b[i]);
}
template <class T>
__device__ void load_input(const T* x, const T* bias, bool fused_rounding, float (&u)[8]) {
  unpack(load8(x), u);
  if (bias != nullptr) add_bias(load8(bias), fused_rounding, u);
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

// Replaces the inputs (gated kinds: gate and linear half; else `second` is not used) by their gradients, g that of the
// output.
template <class T, Activation Kind>
__device__ void to_gradients(const float (&g)[8], const Options& options, float (&first)[8], float (&second)[8]) {
  if constexpr (kGated<Kind>) {
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
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) first[i] = plain_derivative<Kind>(first[i]) * g[i];
  }
}

template <class T, Activation Kind>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ bias, Options options,
                    std::uint32_t count, FastDivider vectors_per_row, T* __restrict__ dx) {
  const std::uint32_t vector = blockIdx.x * kThreads + threadIdx.x;
  if (vector >= count) return;
  const std::int64_t row = vectors_per_row.divide(vector), features = std::int64_t{8} * vectors_per_row.divisor;
  const std::int64_t column = std::int64_t{8} * vector - row * features;
  const std::int64_t at = row * (kGated<Kind> ? 2 : 1) * features + column;
  float g[8], first[8], second[8];
  unpack(load8(dy + row * features + column), g);
  load_input(x + at, bias == nullptr ? nullptr : bias + column, options.fused_rounding, first);
  if constexpr (kGated<Kind>)
    load_input(x + at + features, bias == nullptr ? nullptr : bias + features + column, options.fused_rounding, second);
  to_gradients<T, Kind>(g, options, first, second);
  store8(dx + at, pack<T>(first));
  if constexpr (kGated<Kind>) store8(dx + at + features, pack<T>(second));
}

// Rows that a lane of backward_sums_kernel loads before it computes, as far as registers allow.
template <class T, Activation Kind>
constexpr int kRowBatch = kGated<Kind> || sizeof(T) == 4 ? 1 : 2;

// The same with the column sums of dx. Block (strip, part): 256 features of one chunk of rows dealt to the warps.
template <class T, Activation Kind>
__global__ void __launch_bounds__(kStripThreads, kGated<Kind> ? 3 : 4)
    backward_sums_kernel(const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ bias, Options options,
                         std::int64_t rows, std::int64_t features, std::int64_t rows_per_part, T* __restrict__ dx,
                         float* __restrict__ parts) {
  constexpr int kHalves = kGated<Kind> ? 2 : 1, kBatch = kRowBatch<T, Kind>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * 256, column = first_column + lane * 8;
  const std::int64_t begin = blockIdx.y * rows_per_part,
                     end = begin + rows_per_part < rows ? begin + rows_per_part : rows;
  float total[kHalves][8];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
#pragma unroll
    for (int i = 0; i < 8; ++i) total[h][i] = 0;
  }
  if (column < features) {
    Raw8<T> shift[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) shift[h] = bias == nullptr ? zero8<T>() : load8(bias + h * features + column);
    for (std::int64_t row = begin + warp; row < end; row += kBatch * kStripWarps) {
      Raw8<T> dy_raw[kBatch], x_raw[kBatch][kHalves];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const std::int64_t r = row + b * kStripWarps;
        if (r >= end) continue;
        dy_raw[b] = load8(dy + r * features + column);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) x_raw[b][h] = load8(x + (r * kHalves + h) * features + column);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const std::int64_t r = row + b * kStripWarps;
        if (r >= end) continue;
        float g[8], u[2][8];
        unpack(dy_raw[b], g);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          unpack(x_raw[b][h], u[h]);
          if (bias != nullptr) add_bias(shift[h], options.fused_rounding, u[h]);
        }
        to_gradients<T, Kind>(g, options, u[0], u[1]);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          const Raw8<T> result = pack<T>(u[h]);
          store8(dx + (r * kHalves + h) * features + column, result);
          // Not contracted with the product before: the values that were stored are added.
          unpack(result, u[h]);
#pragma unroll
          for (int i = 0; i < 8; ++i) total[h][i] = __fadd_rn(total[h][i], u[h][i]);
        }
      }
    }
  }
  float* const part = parts + blockIdx.y * (kHalves * features);
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    store_strip(total[h], part + h * features, [&](int place) {
      const std::int64_t c = first_column + place;
      return c < features ? c : std::int64_t{-1};
    });
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

std::int64_t strips_of(const ActivationArguments& a) { return ceil_div<std::int64_t>(a.features, 256); }

int parts_of(const ActivationArguments& a) {
  int parts = 1;
  with_kind(a, [&](auto tag, auto kind) {
    static const std::int64_t resident =
        resident_blocks(backward_sums_kernel<decltype(tag), decltype(kind)::value>, kStripThreads);
    parts = row_parts(a.rows, strips_of(a), resident);
  });
  return parts;
}

std::int64_t input_width(const ActivationArguments& a) {
  return a.kind == Activation::kSwiglu || a.kind == Activation::kQuickGeglu ? 2 * a.features : a.features;
}

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

std::size_t activation_backward_sums_workspace(const ActivationArguments& a) {
  return sizeof(float) * static_cast<std::size_t>(parts_of(a)) * static_cast<std::size_t>(input_width(a));
}

void activation_backward_sums(const ActivationArguments& a, const void* dy, void* dx, void* column_sums,
                              void* workspace, cudaStream_t stream) {
  const int parts = parts_of(a);
  auto* const partial = static_cast<float*>(workspace);
  with_kind(a, [&](auto tag, auto kind) {
    using T = decltype(tag);
    const dim3 grid(static_cast<unsigned>(strips_of(a)), static_cast<unsigned>(parts));
    backward_sums_kernel<T, decltype(kind)::value><<<grid, kStripThreads, 0, stream>>>(
        static_cast<const T*>(dy), static_cast<const T*>(a.x), static_cast<const T*>(a.bias),
        Options{a.fused_rounding, a.glu_offset, a.clamp}, a.rows, a.features, ceil_div<std::int64_t>(a.rows, parts),
        static_cast<T*>(dx), partial);
    check_launch("activation_backward");
    add_parts<T>(partial, parts, input_width(a), {{static_cast<T*>(column_sums), nullptr, nullptr}}, stream);
  });
}

}  // namespace pgpt::kernels::cuda

// Optimizer steps over flat buffers in one launch. Operations round one by one in the order of the host code, so both
// give the same bits.
//
// A thread does groups of 4 elements. All loads are issued before the block looks up its segment and the step's
// scalars, so that the look-up hides behind them. Groups that a segment's edge cuts are done element by element.

#include "segments.cuh"

namespace pgpt::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kGroups = 2;  // of 4 elements a thread
constexpr std::int64_t kBlockElements = std::int64_t{4} * kThreads * kGroups;

// ---- groups of 4 elements ----

template <class T>
struct Raw4 {
  std::uint32_t words[sizeof(T)];
};
template <class T>
__device__ Raw4<T> load4(const T* p) {
  Raw4<T> raw;
  if constexpr (sizeof(T) == 4) {
    const uint4 w = *reinterpret_cast<const uint4*>(p);
    raw.words[0] = w.x, raw.words[1] = w.y, raw.words[2] = w.z, raw.words[3] = w.w;
  } else {
    const uint2 w = *reinterpret_cast<const uint2*>(p);
    raw.words[0] = w.x, raw.words[1] = w.y;
  }
  return raw;
}
template <class T>
__device__ void unpack(const Raw4<T>& raw, float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = __uint_as_float(raw.words[i]);
    } else {
      const float2 pair = unpack2(raw.words[i], T{});
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
}
template <class T>
__device__ void store4(T* p, const float (&x)[4]) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(p) = {x[0], x[1], x[2], x[3]};
  } else {
    *reinterpret_cast<uint2*>(p) = {pack2(x[0], x[1], T{}), pack2(x[2], x[3], T{})};
  }
}

// ---- rules ----

// What one element's update needs besides its state.
struct Rates {
  float learning_rate, weight_decay;
};

struct Adam {
  static constexpr int kStates = 2;
  float beta1, beta2, epsilon;
  float rest1, rest2, correction1, correction2;
  __device__ void read(const float* scalars, const ScalarPlaces& places) {
    rest1 = __fsub_rn(1.0F, beta1);
    rest2 = __fsub_rn(1.0F, beta2);
    correction1 = scalars[places.bias_correction1];
    correction2 = scalars[places.bias_correction2];
  }
  __device__ float update(float p, float g, float& m, float& v, const Rates& rates) const {
    m = __fadd_rn(__fmul_rn(beta1, m), __fmul_rn(rest1, g));
    v = __fadd_rn(__fmul_rn(beta2, v), __fmul_rn(__fmul_rn(rest2, g), g));
    const float ratio = __fdiv_rn(__fdiv_rn(m, correction1), __fadd_rn(__fsqrt_rn(__fdiv_rn(v, correction2)), epsilon));
    return __fsub_rn(p, __fmul_rn(rates.learning_rate, __fadd_rn(ratio, __fmul_rn(rates.weight_decay, p))));
  }
};
struct Sgd {
  static constexpr int kStates = 1;
  float momentum;
  bool first;
  __device__ void read(const float* scalars, const ScalarPlaces& places) {
    first = scalars[places.first_momentum] != 0.0F;
  }
  __device__ float update(float p, float g, float& velocity, float& /*unused*/, const Rates& rates) const {
    g = __fadd_rn(g, __fmul_rn(rates.weight_decay, p));
    velocity = first ? g : __fadd_rn(__fmul_rn(momentum, velocity), g);
    return __fsub_rn(p, __fmul_rn(rates.learning_rate, velocity));
  }
};

template <class W, class G, class Rule>
__global__ void __launch_bounds__(kThreads)
    step_kernel(FlatArguments flat, W* __restrict__ weights, float* __restrict__ master, const G* __restrict__ gradient,
                float* __restrict__ state1, float* __restrict__ state2, const float* __restrict__ scalars,
                ScalarPlaces places, Rule rule) {
  constexpr bool kTwo = Rule::kStates == 2;
  const std::int64_t begin = blockIdx.x * kBlockElements;
  Raw4<G> g_raw[kGroups];
  Raw4<float> p_raw[kGroups], a_raw[kGroups], b_raw[kTwo ? kGroups : 1];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const std::int64_t at = begin + 4 * (threadIdx.x + i * kThreads);
    if (at + 4 <= flat.count) {
      g_raw[i] = load4(gradient + at);
      p_raw[i] = load4(master + at);
      a_raw[i] = load4(state1 + at);
      if constexpr (kTwo) b_raw[i] = load4(state2 + at);
    }
  }
  const bool skip = scalars[places.skip] != 0.0F;
  const float scale = scalars[places.gradient_scale], weight_decay = scalars[places.weight_decay];
  rule.read(scalars, places);
  const int first_segment = first_segment_past(flat, begin);
  const auto rates_of = [&](int segment) {
    const SegmentRecord& record = flat.segments[segment];
    return Rates{scalars[places.learning_rates + record.group],
                 __fmul_rn(weight_decay, record.weight_decay_multiplier)};
  };

  int segment = first_segment;
  const auto num_segments = static_cast<int>(flat.num_segments);
  std::int64_t segment_begin = 0, segment_end = 0;
  Rates rates{0, 0};
  const auto enter = [&] {
    if (segment >= num_segments) return;
    segment_begin = flat.segments[segment].begin;
    segment_end = flat.segments[segment].end;
    rates = rates_of(segment);
  };
  enter();
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const std::int64_t at = begin + 4 * (threadIdx.x + i * kThreads);
    if (at >= flat.count) continue;
    while (segment < num_segments && segment_end <= at) {
      ++segment;
      enter();
    }
    const bool whole = at + 4 <= flat.count;
    if (whole && segment < num_segments && segment_begin <= at && at + 4 <= segment_end) {
      if (!skip) {
        float g[4], p[4], a[4], b[4] = {0, 0, 0, 0};
        unpack(g_raw[i], g);
        unpack(p_raw[i], p);
        unpack(a_raw[i], a);
        if constexpr (kTwo) unpack(b_raw[i], b);
#pragma unroll
        for (int j = 0; j < 4; ++j) p[j] = rule.update(p[j], __fmul_rn(g[j], scale), a[j], b[j], rates);
        store4(master + at, p);
        store4(state1 + at, a);
        if constexpr (kTwo) store4(state2 + at, b);
        if (weights != nullptr) store4(weights + at, p);
      }
    } else if (!skip) {
      // An edge of a segment or of the buffer: each element finds its own segment.
      for (int j = 0; j < 4; ++j) {
        const std::int64_t e = at + j;
        if (e >= flat.count) break;
        int own = segment;
        while (own < num_segments && flat.segments[own].end <= e) ++own;
        if (own == num_segments || flat.segments[own].begin > e) continue;
        float a = state1[e], b = kTwo ? state2[e] : 0.0F;
        const float p = rule.update(master[e], __fmul_rn(to_float(gradient[e]), scale), a, b, rates_of(own));
        master[e] = p;
        state1[e] = a;
        if constexpr (kTwo) state2[e] = b;
        if (weights != nullptr) weights[e] = from_float<W>(p);
      }
    }
  }
}

template <class Rule>
void launch_step(const FlatArguments& flat, const StepArguments& step, float* state1, float* state2, const Rule& rule,
                 cudaStream_t stream) {
  if (flat.count == 0) return;
  with_type(step.weight_type, [&](auto weight_tag) {
    using W = decltype(weight_tag);
    with_type(step.gradient_type, [&](auto gradient_tag) {
      using G = decltype(gradient_tag);
      step_kernel<W, G, Rule><<<static_cast<unsigned>(ceil_div(flat.count, kBlockElements)), kThreads, 0, stream>>>(
          flat, static_cast<W*>(step.weights), step.master, static_cast<const G*>(step.gradient), state1, state2,
          step.scalars, step.places, rule);
    });
  });
  check_launch("optimizer step");
}

}  // namespace

void adam_step(const FlatArguments& flat, const StepArguments& step, float* exp_avg, float* exp_avg_sq, float beta1,
               float beta2, float epsilon, cudaStream_t stream) {
  launch_step(flat, step, exp_avg, exp_avg_sq, Adam{beta1, beta2, epsilon, 0, 0, 0, 0}, stream);
}

void sgd_step(const FlatArguments& flat, const StepArguments& step, float* momentum_buffer, float momentum,
              cudaStream_t stream) {
  launch_step(flat, step, momentum_buffer, nullptr, Sgd{momentum, false}, stream);
}

}  // namespace pgpt::kernels::cuda

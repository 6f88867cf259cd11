#include "optimizer_loops.h"

#include <cmath>

namespace pgpt::kernels::detail {
namespace {

template <class Gradient>
void adam(float* __restrict p, float* __restrict m, float* __restrict v, const Gradient* __restrict gradient,
          std::int64_t count, const AdamCoefficients c) {
  const float rest1 = 1.0F - c.beta1, rest2 = 1.0F - c.beta2;
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = static_cast<float>(gradient[i]) * c.scale;
    m[i] = c.beta1 * m[i] + rest1 * g;
    v[i] = c.beta2 * v[i] + rest2 * g * g;
    const float update = (m[i] / c.correction1) / (std::sqrt(v[i] / c.correction2) + c.epsilon) + c.decay * p[i];
    p[i] = p[i] - c.rate * update;
  }
}

}  // namespace

void adam_elements(float* p, float* m, float* v, const float* gradient, std::int64_t count, const AdamCoefficients& c) {
  adam(p, m, v, gradient, count, c);
}

void adam_elements(float* p, float* m, float* v, const c10::BFloat16* gradient, std::int64_t count,
                   const AdamCoefficients& c) {
  adam(p, m, v, gradient, count, c);
}

void adam_elements(float* p, float* m, float* v, const c10::Half* gradient, std::int64_t count,
                   const AdamCoefficients& c) {
  adam(p, m, v, gradient, count, c);
}

}  // namespace pgpt::kernels::detail

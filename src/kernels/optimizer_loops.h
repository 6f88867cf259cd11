#pragma once

// The innermost CPU loops of the optimizer, in a file of their own that is compiled without errno of std::sqrt, so that
// the compiler can use vector registers. The bits are those of the scalar loop.

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

namespace pgpt::kernels::detail {

/// Values of one AdamW step that all elements of a stretch share.
struct AdamCoefficients {
  float beta1, beta2, epsilon;
  float scale;                     ///< of the gradient
  float correction1, correction2;  ///< 1 - beta^t
  float rate, decay;
};

/// AdamW on `count` elements: moments m and v, then p. The arrays do not overlap.
void adam_elements(float* p, float* m, float* v, const float* gradient, std::int64_t count, const AdamCoefficients& c);
void adam_elements(float* p, float* m, float* v, const c10::BFloat16* gradient, std::int64_t count,
                   const AdamCoefficients& c);
void adam_elements(float* p, float* m, float* v, const c10::Half* gradient, std::int64_t count,
                   const AdamCoefficients& c);

}  // namespace pgpt::kernels::detail

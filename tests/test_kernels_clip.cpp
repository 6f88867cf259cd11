// The clip coefficient and the skip flag of a step.

#include <cmath>
#include <limits>

#include "pgpt/kernels/kernels.h"
#include "support/tensor_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

struct Result {
  float norm, gradient_scale, skip, next;
};

Result finish(double squared, double clip, float loss_scale = 0, float non_finite = -1) {
  StepScalars scalars{at::full({StepScalars::kCount + 2}, 5.0F, at::kFloat)};
  at::Tensor norm = at::zeros({}, at::kFloat);
  finish_norm(at::full({}, squared, at::kDouble), loss_scale == 0 ? at::Tensor() : at::full({}, loss_scale, at::kFloat),
              non_finite < 0 ? at::Tensor() : at::full({}, non_finite, at::kFloat), clip, norm, scalars);
  const float* values = scalars.values.const_data_ptr<float>();
  return {norm.item<float>(), values[StepScalars::kGradientScale], values[StepScalars::kSkip],
          values[StepScalars::kBiasCorrection1]};
}

}  // namespace

TEST_CASE("gradients above the clip norm are scaled to it, others stay", "[cpu]") {
  const Result above = finish(16, 1);
  CHECK(above.norm == 4.0F);
  CHECK(above.gradient_scale == 1.0F / (4.0F + 1e-6F));
  CHECK(above.skip == 0.0F);
  CHECK(above.next == 5.0F);
  CHECK(finish(0.25, 1).gradient_scale == 1.0F);
  CHECK(finish(0, 1).gradient_scale == 1.0F);
  CHECK(finish(1e30, 0).gradient_scale == 1.0F);
  CHECK(finish(1e30, 0).norm == 1e15F);
}

TEST_CASE("a loss scale is taken out of the norm and of the gradients", "[cpu]") {
  const Result scaled = finish(16.0 * 1024 * 1024, 1, 1024);
  CHECK(scaled.norm == 4.0F);
  CHECK(scaled.gradient_scale == (1.0F / (4.0F + 1e-6F)) / 1024);
  CHECK(finish(0.25, 1, 8).gradient_scale == 0.125F);
}

TEST_CASE("a found NaN or infinity skips the step, and a NaN norm is not clipped away", "[cpu]") {
  CHECK(finish(1, 1, 0, 1).skip == 1.0F);
  CHECK(finish(1, 1, 0, 0).skip == 0.0F);
  const Result bad = finish(std::numeric_limits<double>::quiet_NaN(), 1);
  CHECK(std::isnan(bad.norm));
  CHECK(std::isnan(bad.gradient_scale));
}

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

Result finish(double squared, double clip, const at::Tensor& guard = {}, float skip = 0) {
  StepScalars scalars{at::full({StepScalars::kCount + 2}, 5.0F, at::kFloat)};
  scalars.values.select(0, StepScalars::kSkip).fill_(skip);
  at::Tensor norm = at::zeros({}, at::kFloat);
  finish_norm(at::full({}, squared, at::kDouble), clip, guard, norm, scalars);
  const float* values = scalars.values.const_data_ptr<float>();
  return {norm.item<float>(), values[StepScalars::kGradientScale], values[StepScalars::kSkip],
          values[StepScalars::kBiasCorrection1]};
}

at::Tensor guard(double value) { return at::full({}, value, at::kDouble); }

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

TEST_CASE("a norm or guard that is not finite stops the run for good, when there is a guard", "[cpu]") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  CHECK(finish(1, 1, guard(0)).skip == 0.0F);
  CHECK(finish(1, 1, guard(nan)).skip == StepScalars::kJustStopped);
  CHECK(finish(1, 1, guard(infinity)).skip == StepScalars::kJustStopped);
  CHECK(finish(infinity, 1, guard(0)).skip == StepScalars::kJustStopped);
  CHECK(finish(1, 1, guard(0), StepScalars::kStoppedBefore).skip == StepScalars::kStoppedBefore);
  const Result bad = finish(nan, 1);
  CHECK(std::isnan(bad.norm));
  CHECK(std::isnan(bad.gradient_scale));
  CHECK(bad.skip == 0.0F);
}

TEST_CASE("the gradients that stopped a run are marked once", "[cpu]") {
  const SegmentTable segments = make_segment_table({{0, 4}, {4, 8}, {8, 12}}, at::kCPU);
  StepScalars scalars{at::zeros({StepScalars::kCount + 1}, at::kFloat)};
  at::Tensor skip = scalars.values.select(0, StepScalars::kSkip);
  at::Tensor flags = at::zeros({3}, at::kByte);
  at::Tensor flat = at::ones({12}, at::kFloat);
  flat[5] = std::numeric_limits<float>::quiet_NaN();
  mark_non_finite(flat, segments, scalars, flags);
  CHECK(flags.sum().item<int>() == 0);
  skip.fill_(StepScalars::kJustStopped);
  mark_non_finite(flat, segments, scalars, flags);
  CHECK(skip.item<float>() == StepScalars::kStoppedBefore);
  CHECK(flags[1].item<int>() == 1);
  CHECK(flags.sum().item<int>() == 1);
  flat[0] = std::numeric_limits<float>::infinity();
  mark_non_finite(flat, segments, scalars, flags);
  CHECK(flags[0].item<int>() == 0);
}

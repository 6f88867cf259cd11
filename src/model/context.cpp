#include "pgpt/model/context.h"

#include <ATen/ATen.h>

namespace pgpt::model {

void add_replicated_gradient(const StepContext& context, parameter::Parameter& parameter, const at::Tensor& gradient) {
  if (context.observer != nullptr && context.observer->gradient)
    context.observer->gradient(parameter.spec.name, gradient);
  parameter.add_to_main_gradient(gradient);
  context.reducer->parameter_ready(parameter);
}

}  // namespace pgpt::model

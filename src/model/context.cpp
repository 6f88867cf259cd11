#include "pgpt/model/context.h"

#include <ATen/ATen.h>

namespace pgpt::model {

void add_replicated_gradient(const StepContext& context, parameter::Parameter& parameter, const at::Tensor& gradient) {
  if (context.observer != nullptr && context.observer->gradient)
    context.observer->gradient(parameter.spec.name, gradient);
  parameter.main_gradient.add_(gradient.view(parameter.main_gradient.sizes()));
  context.reducer->parameter_ready(parameter);
}

}  // namespace pgpt::model

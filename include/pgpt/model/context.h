#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "pgpt/config/config.h"
#include "pgpt/gtp/weight_chain.h"
#include "pgpt/kernels/kernels.h"
#include "pgpt/parameter/gradient_reducer.h"

namespace pgpt::model {

/// Looks at named tensors as the step produces them (evidence); empty functions cost nothing.
struct Observer {
  std::function<void(const std::string& name, const at::Tensor& value)> activation;
  /// Whole gradient of one parameter from one microbatch, before any scaling or reduction.
  std::function<void(const std::string& name, const at::Tensor& gradient)> gradient;
};

/// Next positions of the two dropout streams; a copy taken before a forward pass repeats its masks.
struct DropoutCursor {
  std::uint64_t hidden_seed = 0, hidden_offset = 0;
  std::uint64_t attention_seed = 0, attention_offset = 0;
  at::Tensor hidden_base, attention_base;  ///< int64 scalars on the device, added to the offsets; undefined = 0
};

/// What layers need while they run: the chain that holds their weights, where gradients go, and how to compute.
struct StepContext {
  const config::ModelConfig* config = nullptr;
  kernels::Policy policy;
  gtp::WeightChain* chain = nullptr;
  parameter::GradientReducer* reducer = nullptr;  ///< null in evaluation
  bool training = false;                          ///< false: no dropout, nothing saved for backward
  DropoutCursor* dropout = nullptr;               ///< advances with every dropout call
  const Observer* observer = nullptr;

  void observe(const std::string& name, const at::Tensor& value) const {
    if (observer != nullptr && observer->activation) observer->activation(name, value);
  }
};

/// Adds `gradient` to the main gradient of a parameter that every GTP peer holds whole, and reports it ready.
void add_replicated_gradient(const StepContext& context, parameter::Parameter& parameter, const at::Tensor& gradient);

}  // namespace pgpt::model

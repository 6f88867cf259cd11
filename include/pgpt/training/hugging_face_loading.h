#pragma once

#include "pgpt/config/config.h"
#include "pgpt/optim/optimizer.h"
#include "pgpt/parameter/parameter_store.h"

namespace pgpt::training {

/// --load-hf: fills this rank's weights (converted to their type, padding rows zero) from a Hugging Face folder and
/// rebuilds the optimizer's masters from them. Does not communicate. Throws ConfigError naming the option and both
/// values when the run's architecture is another one than config.json says, DataError when files are missing or wrong.
void load_hugging_face(const config::Config& config, parameter::ParameterStore& store, optim::Optimizer& optimizer);

}  // namespace pgpt::training

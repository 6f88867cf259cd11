#include "pgpt/optim/schedule.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <numbers>
#include <optional>

#include "pgpt/base/error.h"

namespace pgpt::optim {
namespace {

using config::LrDecayStyle;
using config::OptimizerConfig;
using config::WeightDecayStyle;
using config::WsdDecayStyle;

/// 1 at the start of the decay, 0 at its end.
double half_cosine(double ratio) { return 0.5 * (std::cos(std::numbers::pi * ratio) + 1.0); }

double wsd_factor(const OptimizerConfig& c, double samples) {
  const double anneal_start = c.lr_decay_samples - c.wsd_decay_samples;
  if (samples <= anneal_start) return 1.0;
  const double ratio = (samples - anneal_start) / c.wsd_decay_samples;
  switch (c.wsd_decay_style) {
    case WsdDecayStyle::kLinear:
      return 1.0 - ratio;
    case WsdDecayStyle::kCosine:
      return half_cosine(ratio);
    case WsdDecayStyle::kExponential:
      return 2.0 * std::pow(0.5, ratio) - 1.0;
    case WsdDecayStyle::kMinusSqrt:
      return 1.0 - std::sqrt(ratio);
  }
  PGPT_ASSERT(false, "unknown WSD decay style");
  return 0;
}

constexpr std::array<std::pair<LrDecayStyle, const char*>, 5> kLrStyles = {{
    {LrDecayStyle::kConstant, "constant"},
    {LrDecayStyle::kLinear, "linear"},
    {LrDecayStyle::kCosine, "cosine"},
    {LrDecayStyle::kInverseSquareRoot, "inverse-square-root"},
    {LrDecayStyle::kWsd, "WSD"},
}};
constexpr std::array<std::pair<WeightDecayStyle, const char*>, 3> kWeightDecayStyles = {{
    {WeightDecayStyle::kConstant, "constant"},
    {WeightDecayStyle::kLinear, "linear"},
    {WeightDecayStyle::kCosine, "cosine"},
}};

template <class Table, class Style>
const char* style_name(const Table& table, Style style) {
  for (const auto& [value, name] : table) {
    if (value == style) return name;
  }
  PGPT_ASSERT(false, "unknown style");
  return "";
}

template <class Table>
auto style_value(const Table& table, const std::string& key, const std::string& name) {
  for (const auto& [value, known] : table) {
    if (name == known) return value;
  }
  throw DataError(concat("the checkpoint's scheduler state has ", key, " '", name, "', which is not a known style"));
}

ScheduleValue number(double value) {
  if (value == std::floor(value) && std::abs(value) < 9e15) return static_cast<std::int64_t>(value);
  return value;
}

const ScheduleValue* find(const ScheduleState& state, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    for (const auto& [key, value] : state) {
      if (key == name) return &value;
    }
  }
  return nullptr;
}

/// First of `names` that is stored; newer names come last, as old checkpoints have only the old ones.
const ScheduleValue& require(const ScheduleState& state, std::initializer_list<const char*> names) {
  const ScheduleValue* value = find(state, names);
  PGPT_CHECK(DataError, value != nullptr, "the checkpoint's scheduler state has no '", *(names.end() - 1),
             "'; load without the optimizer (--no-load-optim), or use a complete checkpoint");
  return *value;
}

double as_number(const ScheduleValue& value, const char* name) {
  if (const auto* whole = std::get_if<std::int64_t>(&value)) return static_cast<double>(*whole);
  const auto* real = std::get_if<double>(&value);
  PGPT_CHECK(DataError, real != nullptr, "the checkpoint's scheduler state has a text for '", name,
             "', where a number belongs");
  return *real;
}

std::string as_text(const ScheduleValue& value, const char* name) {
  const auto* text = std::get_if<std::string>(&value);
  PGPT_CHECK(DataError, text != nullptr, "the checkpoint's scheduler state has a number for '", name,
             "', where a style belongs");
  return *text;
}

/// Applies the rule of both checkpoint options to one value; `origin` tells where it comes from when its name does not.
template <class T>
T choose(const OptimizerConfig& c, const char* option, const T& own, const T& stored, const char* origin = "") {
  if (c.override_opt_param_scheduler) return own;
  if (c.use_checkpoint_opt_param_scheduler) return stored;
  std::ostringstream text;
  text.precision(17);
  text << option << ": the command line gives " << own << ", the checkpoint has " << stored << origin
       << "; give the same value, or --use-checkpoint-opt-param-scheduler to take the checkpoint's, or "
          "--override-opt-param-scheduler to keep the command line's";
  PGPT_CHECK(ConfigError, own == stored, text.str());
  return stored;
}

void check(const OptimizerConfig& c) {
  PGPT_CHECK(ConfigError, c.min_lr >= 0, "--min-lr is ", c.min_lr, "; it must not be negative");
  PGPT_CHECK(ConfigError, c.lr >= c.min_lr, "--lr ", c.lr, " is below --min-lr ", c.min_lr, "; swap or change them");
  PGPT_CHECK(ConfigError, c.lr_warmup_init <= c.lr, "--lr-warmup-init ", c.lr_warmup_init, " is above --lr ", c.lr);
  PGPT_CHECK(ConfigError, c.lr_decay_samples > 0, "the learning rate decays over ", c.lr_decay_samples,
             " samples; --lr-decay-iters or --lr-decay-samples (default: the length of the run) must be positive");
  PGPT_CHECK(ConfigError, c.lr_warmup_samples < c.lr_decay_samples, "the warmup of ", c.lr_warmup_samples,
             " samples does not end before the decay of ", c.lr_decay_samples,
             " samples does; lower --lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction");
  PGPT_CHECK(ConfigError, c.lr_decay_style != LrDecayStyle::kWsd || c.wsd_decay_samples > 0,
             "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples");
  PGPT_CHECK(ConfigError, c.start_weight_decay >= 0, "--start-weight-decay is ", c.start_weight_decay,
             "; it must not be negative");
  PGPT_CHECK(ConfigError, c.end_weight_decay >= c.start_weight_decay, "--end-weight-decay ", c.end_weight_decay,
             " is below --start-weight-decay ", c.start_weight_decay);
  PGPT_CHECK(ConfigError, !(c.override_opt_param_scheduler && c.use_checkpoint_opt_param_scheduler),
             "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other; keep one");
}

}  // namespace

double learning_rate_at(const OptimizerConfig& c, double max_lr, double min_lr, std::int64_t samples) {
  const auto n = static_cast<double>(samples);
  if (c.lr_warmup_samples > 0 && n <= c.lr_warmup_samples) {
    return c.lr_warmup_init + (max_lr - c.lr_warmup_init) * n / c.lr_warmup_samples;
  }
  if (c.lr_decay_style == LrDecayStyle::kConstant) return max_lr;
  if (n > c.lr_decay_samples) return min_lr;
  if (c.lr_decay_style == LrDecayStyle::kInverseSquareRoot) {
    // pow, not sqrt: the reference raises to 0.5, which libm may round differently.
    const double lr = max_lr * std::pow(std::max(c.lr_warmup_samples, 1.0), 0.5) / std::pow(std::max(n, 1.0), 0.5);
    return std::max(min_lr, lr);
  }
  double factor = 0;
  if (c.lr_decay_style == LrDecayStyle::kWsd) {
    factor = wsd_factor(c, n);
  } else {
    const double ratio = (n - c.lr_warmup_samples) / (c.lr_decay_samples - c.lr_warmup_samples);
    factor = c.lr_decay_style == LrDecayStyle::kLinear ? 1.0 - ratio : half_cosine(ratio);
  }
  return min_lr + factor * (max_lr - min_lr);
}

double weight_decay_at(const OptimizerConfig& c, std::int64_t samples) {
  const auto n = static_cast<double>(samples);
  if (n > c.weight_decay_samples || c.weight_decay_style == WeightDecayStyle::kConstant) return c.end_weight_decay;
  const double ratio = n / c.weight_decay_samples;
  const double factor = c.weight_decay_style == WeightDecayStyle::kLinear ? ratio : half_cosine(1.0 - ratio);
  return c.start_weight_decay + factor * (c.end_weight_decay - c.start_weight_decay);
}

ParamScheduler::ParamScheduler(OptimizerConfig config) : config_(std::move(config)) { check(config_); }

void ParamScheduler::step(std::int64_t increment) {
  PGPT_ASSERT(increment >= 0, "increment ", increment);
  num_steps_ += increment;
}

double ParamScheduler::learning_rate(double max_lr, double min_lr) const {
  return learning_rate_at(config_, max_lr, min_lr, num_steps_);
}

double ParamScheduler::weight_decay() const { return weight_decay_at(config_, num_steps_); }

ScheduleState ParamScheduler::state() const {
  return {
      {"max_lr", config_.lr},
      {"lr_warmup_steps", number(config_.lr_warmup_samples)},
      {"num_steps", num_steps_},
      {"lr_decay_style", std::string(style_name(kLrStyles, config_.lr_decay_style))},
      {"lr_decay_steps", number(config_.lr_decay_samples)},
      {"min_lr", config_.min_lr},
      {"start_wd", config_.start_weight_decay},
      {"end_wd", config_.end_weight_decay},
      {"wd_incr_style", std::string(style_name(kWeightDecayStyles, config_.weight_decay_style))},
      {"wd_incr_steps", number(config_.weight_decay_samples)},
  };
}

void ParamScheduler::load(const ScheduleState& state) {
  OptimizerConfig c = config_;
  const auto take = [&](const char* option, double own, std::initializer_list<const char*> names,
                        const char* origin = "") {
    return choose(c, option, own, as_number(require(state, names), *(names.end() - 1)), origin);
  };
  c.lr = take("--lr", c.lr, {"start_lr", "max_lr"});
  c.min_lr = take("--min-lr", c.min_lr, {"min_lr"});
  c.lr_warmup_samples =
      take("warmup length in samples", c.lr_warmup_samples, {"warmup_iter", "warmup_steps", "lr_warmup_steps"},
           " (--lr-warmup-fraction counts from the decay length)");
  c.lr_decay_samples =
      take("decay length in samples", c.lr_decay_samples, {"end_iter", "decay_steps", "lr_decay_steps"},
           " (without --lr-decay-iters or --lr-decay-samples it follows --train-iters or --train-samples)");
  const std::string own_style = style_name(kLrStyles, c.lr_decay_style);
  const std::string stored_style = as_text(require(state, {"decay_style", "lr_decay_style"}), "lr_decay_style");
  c.lr_decay_style = style_value(kLrStyles, "lr_decay_style", choose(c, "--lr-decay-style", own_style, stored_style));
  // Checkpoints older than the weight-decay schedule have none of these.
  if (find(state, {"start_wd"}) != nullptr) {
    c.start_weight_decay = take("--start-weight-decay", c.start_weight_decay, {"start_wd"});
    c.end_weight_decay = take("--end-weight-decay", c.end_weight_decay, {"end_wd"});
    c.weight_decay_samples = take("weight decay length in samples", c.weight_decay_samples, {"wd_incr_steps"},
                                  " (it follows --train-iters or --train-samples)");
    const std::string own_incr = style_name(kWeightDecayStyles, c.weight_decay_style);
    const std::string stored_incr = as_text(require(state, {"wd_incr_style"}), "wd_incr_style");
    c.weight_decay_style =
        style_value(kWeightDecayStyles, "wd_incr_style", choose(c, "--weight-decay-incr-style", own_incr, stored_incr));
  }
  const double counted = as_number(require(state, {"num_iters", "num_steps"}), "num_steps");
  PGPT_CHECK(DataError, counted >= 0 && counted == std::floor(counted), "the checkpoint's scheduler state has counted ",
             counted, " samples, which is not a count");
  check(c);
  config_ = c;
  num_steps_ = static_cast<std::int64_t>(counted);
}

}  // namespace pgpt::optim

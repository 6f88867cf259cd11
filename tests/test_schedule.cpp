// Learning rate and weight decay over samples, and what a checkpoint does to them.
#include <cmath>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "pgpt/base/error.h"
#include "pgpt/optim/schedule.h"
#include "support/catch.h"
#include "support/text.h"

namespace {

using pgpt::config::LrDecayStyle;
using pgpt::config::OptimizerConfig;
using pgpt::config::WeightDecayStyle;
using pgpt::config::WsdDecayStyle;
using pgpt::optim::learning_rate_at;
using pgpt::optim::ParamScheduler;
using pgpt::optim::ScheduleState;
using pgpt::optim::weight_decay_at;
using pgpt::test::contains;

/// The seed command: lr 3e-4, min 3e-5, warmup 1 iteration, decay 3, cosine, global batch 2.
OptimizerConfig seed_config() {
  OptimizerConfig c;
  c.lr = 3e-4;
  c.min_lr = 3e-5;
  c.lr_decay_style = LrDecayStyle::kCosine;
  c.lr_warmup_samples = 2;
  c.lr_decay_samples = 6;
  c.weight_decay_samples = 6;
  return c;
}

double lr_at(const OptimizerConfig& c, std::int64_t n) { return learning_rate_at(c, c.lr, c.min_lr, n); }

/// Each value comes from fewer than 8 double operations, each within 2^-53, on terms no larger than max_lr.
Approx near(double value) { return Approx(value).epsilon(0).margin(8 * 1.2e-16); }

std::string load_error(ParamScheduler& scheduler, const ScheduleState& state) {
  return pgpt::test::error_of([&] { scheduler.load(state); });
}

ScheduleState replaced(ScheduleState state, const std::string& key, pgpt::optim::ScheduleValue value) {
  for (auto& [name, old] : state) {
    if (name == key) old = value;
  }
  return state;
}

}  // namespace

TEST_CASE("the worked example applies and prints the published learning rates", "[cpu][schedule]") {
  ParamScheduler scheduler(seed_config());
  const double applied[] = {0.0, 3e-4, 1.65e-4};
  const double printed[] = {3e-4, 1.65e-4, 3e-5};
  for (int iteration = 0; iteration < 3; ++iteration) {
    CHECK(scheduler.learning_rate() == near(applied[iteration]));
    scheduler.step(2);
    CHECK(scheduler.learning_rate() == near(printed[iteration]));
  }
  CHECK(scheduler.num_steps() == 6);
  // The first update uses exactly 0, the second exactly the full rate.
  CHECK(lr_at(seed_config(), 0) == 0.0);
  CHECK(lr_at(seed_config(), 2) == 3e-4);
  CHECK(lr_at(seed_config(), 7) == 3e-5);
}

TEST_CASE("every decay style follows its formula", "[cpu][schedule]") {
  OptimizerConfig c;
  c.lr = 1.0;
  c.min_lr = 0.2;
  c.lr_warmup_init = 0.1;
  c.lr_warmup_samples = 10;
  c.lr_decay_samples = 110;
  SECTION("warmup is linear from its initial value, up to and including its last sample") {
    c.lr_decay_style = LrDecayStyle::kConstant;
    CHECK(lr_at(c, 0) == 0.1);
    CHECK(lr_at(c, 5) == near(0.1 + 0.9 * 0.5));
    CHECK(lr_at(c, 10) == near(1.0));
    CHECK(lr_at(c, 100000) == 1.0);
  }
  SECTION("linear") {
    c.lr_decay_style = LrDecayStyle::kLinear;
    CHECK(lr_at(c, 35) == near(0.2 + 0.75 * 0.8));
    CHECK(lr_at(c, 110) == near(0.2));
    CHECK(lr_at(c, 111) == 0.2);
  }
  SECTION("cosine") {
    c.lr_decay_style = LrDecayStyle::kCosine;
    c.lr_warmup_samples = 20;  // ratios 1/3 and 2/3 have the cosines 1/2 and -1/2
    CHECK(lr_at(c, 50) == near(0.2 + 0.75 * 0.8));
    CHECK(lr_at(c, 80) == near(0.2 + 0.25 * 0.8));
  }
  SECTION("inverse square root") {
    c.lr_decay_style = LrDecayStyle::kInverseSquareRoot;
    CHECK(lr_at(c, 40) == near(0.5));
    CHECK(lr_at(c, 90) == near(1.0 / 3.0));
    c.min_lr = 0.4;
    CHECK(lr_at(c, 90) == 0.4);
    c.lr_warmup_samples = 0;  // counts as 1
    CHECK(lr_at(c, 0) == 1.0);
    CHECK(lr_at(c, 4) == near(0.5));
  }
  SECTION("warmup, stable, decay") {
    c.lr_decay_style = LrDecayStyle::kWsd;
    c.wsd_decay_samples = 40;
    CHECK(lr_at(c, 70) == 1.0);
    c.wsd_decay_style = WsdDecayStyle::kLinear;
    CHECK(lr_at(c, 80) == near(0.2 + 0.75 * 0.8));
    c.wsd_decay_style = WsdDecayStyle::kCosine;
    CHECK(lr_at(c, 90) == near(0.2 + 0.5 * 0.8));
    c.wsd_decay_style = WsdDecayStyle::kExponential;
    CHECK(lr_at(c, 90) == near(0.2 + (std::sqrt(2.0) - 1) * 0.8));
    CHECK(lr_at(c, 110) == near(0.2));
    c.wsd_decay_style = WsdDecayStyle::kMinusSqrt;
    CHECK(lr_at(c, 80) == near(0.2 + 0.5 * 0.8));
  }
  SECTION("groups have their own bounds") {
    c.lr_decay_style = LrDecayStyle::kLinear;
    CHECK(learning_rate_at(c, 2.0, 0.0, 60) == near(1.0));
    CHECK(ParamScheduler(c).learning_rate(2.0, 0.0) == 0.1);
  }
  SECTION("a warmup fraction may end between two samples") {
    c.lr_decay_style = LrDecayStyle::kConstant;
    c.lr_warmup_samples = 2.5;
    c.lr_warmup_init = 0;
    CHECK(lr_at(c, 2) == near(0.8));
    CHECK(lr_at(c, 3) == 1.0);
  }
}

TEST_CASE("weight decay grows by its style and then stays", "[cpu][schedule]") {
  OptimizerConfig c;
  c.start_weight_decay = 0.1;
  c.end_weight_decay = 0.5;
  c.weight_decay_samples = 100;
  c.weight_decay_style = WeightDecayStyle::kConstant;
  CHECK(weight_decay_at(c, 0) == 0.5);
  c.weight_decay_style = WeightDecayStyle::kLinear;
  CHECK(weight_decay_at(c, 0) == 0.1);
  CHECK(weight_decay_at(c, 25) == near(0.2));
  CHECK(weight_decay_at(c, 101) == 0.5);
  c.weight_decay_style = WeightDecayStyle::kCosine;
  CHECK(weight_decay_at(c, 0) == near(0.1));
  CHECK(weight_decay_at(c, 50) == near(0.3));
  CHECK(weight_decay_at(c, 100) == near(0.5));
}

TEST_CASE("a schedule that contradicts itself is refused with the option's name", "[cpu][schedule]") {
  const auto message = [](auto change) {
    OptimizerConfig c = seed_config();
    change(c);
    try {
      ParamScheduler scheduler(c);
    } catch (const pgpt::ConfigError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const auto mentions = [](const std::string& text, const char* what) { return text.find(what) != std::string::npos; };
  CHECK(message([](auto&) {}).empty());
  CHECK(mentions(message([](auto& c) { c.min_lr = 4e-4; }), "--min-lr"));
  CHECK(mentions(message([](auto& c) { c.min_lr = -1; }), "--min-lr"));
  CHECK(mentions(message([](auto& c) { c.lr_warmup_init = 1; }), "--lr-warmup-init"));
  CHECK(mentions(message([](auto& c) { c.lr_decay_samples = 0; }), "--lr-decay-iters"));
  CHECK(mentions(message([](auto& c) { c.lr_warmup_samples = 6; }), "--lr-warmup-iters"));
  CHECK(mentions(message([](auto& c) { c.lr_decay_style = LrDecayStyle::kWsd; }), "--lr-wsd-decay-iters"));
  CHECK(mentions(message([](auto& c) { c.end_weight_decay = 0; }), "--end-weight-decay"));
  CHECK(mentions(message([](auto& c) {
                   c.override_opt_param_scheduler = true;
                   c.use_checkpoint_opt_param_scheduler = true;
                 }),
                 "contradict"));
}

TEST_CASE("the stored state restores counter and values", "[cpu][schedule]") {
  ParamScheduler first(seed_config());
  first.step(4);
  const ScheduleState state = first.state();
  std::vector<std::string> keys;
  for (const auto& [key, value] : state) keys.push_back(key);
  CHECK(keys == std::vector<std::string>{"max_lr", "lr_warmup_steps", "num_steps", "lr_decay_style", "lr_decay_steps",
                                         "min_lr", "start_wd", "end_wd", "wd_incr_style", "wd_incr_steps"});
  CHECK(std::get<std::int64_t>(state[1].second) == 2);
  CHECK(std::get<std::string>(state[3].second) == "cosine");
  ParamScheduler second(seed_config());
  second.load(state);
  CHECK(second.num_steps() == 4);
  CHECK(second.learning_rate() == first.learning_rate());

  OptimizerConfig other = seed_config();
  other.lr = 1e-3;
  SECTION("without an option a different value is refused and nothing changes") {
    ParamScheduler scheduler(other);
    const std::string text = load_error(scheduler, state);
    CHECK(contains(text, "--lr: the command line gives 0.001"));
    CHECK(contains(text, "--use-checkpoint-opt-param-scheduler"));
    CHECK(contains(text, "--override-opt-param-scheduler"));
    CHECK(scheduler.num_steps() == 0);
  }
  SECTION("override keeps the command line's value") {
    other.override_opt_param_scheduler = true;
    ParamScheduler scheduler(other);
    scheduler.load(state);
    CHECK(scheduler.config().lr == 1e-3);
    CHECK(scheduler.num_steps() == 4);
  }
  SECTION("use-checkpoint takes the stored value") {
    other.use_checkpoint_opt_param_scheduler = true;
    other.lr_decay_style = LrDecayStyle::kLinear;
    ParamScheduler scheduler(other);
    scheduler.load(state);
    CHECK(scheduler.config().lr == 3e-4);
    CHECK(scheduler.learning_rate() == first.learning_rate());
  }
  SECTION("a different style is refused") {
    ParamScheduler scheduler(seed_config());
    CHECK(load_error(scheduler, replaced(state, "lr_decay_style", std::string("linear"))).find("--lr-decay-style") !=
          std::string::npos);
  }
}

TEST_CASE("old key names are understood and broken states are refused", "[cpu][schedule]") {
  for (const char* warmup : {"warmup_iter", "warmup_steps"}) {
    for (const char* decay : {"end_iter", "decay_steps"}) {
      const ScheduleState old = {{"start_lr", 3e-4}, {warmup, std::int64_t{2}}, {"num_iters", std::int64_t{4}},
                                 {"min_lr", 3e-5},   {decay, std::int64_t{6}},  {"decay_style", std::string("cosine")}};
      ParamScheduler scheduler(seed_config());
      scheduler.load(old);
      CHECK(scheduler.num_steps() == 4);
      CHECK(scheduler.config().end_weight_decay == 0.01);
    }
  }
  ParamScheduler scheduler(seed_config());
  const ScheduleState state = scheduler.state();
  ScheduleState shorter = state;
  shorter.erase(shorter.begin() + 2);
  CHECK(contains(load_error(scheduler, shorter), "no 'num_steps'"));
  CHECK(contains(load_error(scheduler, replaced(state, "num_steps", std::int64_t{-1})), "not a count"));
  CHECK(contains(load_error(scheduler, replaced(state, "min_lr", std::string("x"))), "'min_lr'"));
  CHECK(contains(load_error(scheduler, replaced(state, "lr_decay_style", 1.0)), "a style belongs"));
  CHECK(load_error(scheduler, replaced(state, "wd_incr_style", std::string("odd"))).find("--weight-decay-incr-style") !=
        std::string::npos);
}

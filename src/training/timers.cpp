#include "pgpt/training/timers.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "pgpt/base/error.h"
#include "text.h"

namespace pgpt::training {
namespace {

/// `NAME ` padded by dots to 48 characters.
std::string dotted(const std::string& name) {
  std::string out = name + " ";
  if (out.size() < 48) out.append(48 - out.size(), '.');
  return out;
}

}  // namespace

Timers::Timers(std::int64_t level, std::function<void()> synchronize, std::function<double()> seconds)
    : level_(level), synchronize_(std::move(synchronize)), seconds_(std::move(seconds)) {}

double Timers::now() const {
  if (synchronize_) synchronize_();
  if (seconds_) return seconds_();
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Timers::start(const std::string& name, std::int64_t level) {
  if (level > level_) return;
  Section& section = sections_[name];
  PGPT_ASSERT(!section.running, "timer ", name, " is running");
  section.running = true;
  section.started = now();
}

void Timers::stop(const std::string& name) {
  const auto found = sections_.find(name);
  if (found == sections_.end()) return;  // above the level
  Section& section = found->second;
  PGPT_ASSERT(section.running, "timer ", name, " is not running");
  section.total += now() - section.started;
  section.running = false;
}

std::vector<double> Timers::elapsed_ms(const std::vector<std::string>& names) const {
  std::vector<double> values;
  for (const std::string& name : names) {
    const auto found = sections_.find(name);
    double seconds = 0;
    if (found != sections_.end()) {
      seconds = found->second.total;
      if (found->second.running) seconds += now() - found->second.started;
    }
    values.push_back(seconds * 1000.0);
  }
  return values;
}

void Timers::reset(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const auto found = sections_.find(name);
    if (found == sections_.end()) continue;
    found->second.total = 0;
    if (found->second.running) found->second.started = now();
  }
}

std::vector<std::string> Timers::training_names(std::int64_t level) {
  std::vector<std::string> names;
  const auto add = [&](std::initializer_list<const char*> more) {
    names.insert(names.end(), more.begin(), more.end());
  };
  if (level >= 1) add({"forward-backward"});
  if (level >= 2) {
    add({"forward-compute", "backward-compute", "batch-generator", "forward-recv", "forward-send", "backward-recv",
         "backward-send", "forward-send-forward-recv", "forward-send-backward-recv", "backward-send-forward-recv",
         "backward-send-backward-recv", "forward-backward-send-forward-backward-recv"});
  }
  if (level >= 1) {
    add({"layernorm-grads-all-reduce", "embedding-grads-all-reduce", "all-grads-sync", "params-all-gather",
         "optimizer-copy-to-main-grad", "optimizer-unscale-and-check-inf", "optimizer-clip-main-grad",
         "optimizer-count-zeros", "optimizer-inner-step", "optimizer-copy-main-to-model-params", "optimizer"});
  }
  return names;
}

TimerOption parse_timer_option(const std::string& option) {
  if (option == "minmax") return TimerOption::kMinMax;
  if (option == "max") return TimerOption::kMax;
  PGPT_CHECK(ConfigError, option == "all", "--timing-log-option is '", option, "'; choose minmax, max or all");
  return TimerOption::kAll;
}

std::vector<std::string> timer_lines(TimerOption option, const std::vector<std::string>& names,
                                     const std::vector<std::vector<double>>& per_rank_ms, double normalizer) {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < names.size(); ++i) {
    std::vector<std::pair<std::size_t, double>> ran;  // (rank, ms)
    for (std::size_t rank = 0; rank < per_rank_ms.size(); ++rank) {
      PGPT_ASSERT(per_rank_ms[rank].size() == names.size(), "rank ", rank, " sent ", per_rank_ms[rank].size());
      if (per_rank_ms[rank][i] > 0) ran.emplace_back(rank, per_rank_ms[rank][i] / normalizer);
    }
    if (ran.empty()) continue;
    const auto by_time = [](const auto& a, const auto& b) { return a.second < b.second; };
    const double low = std::min_element(ran.begin(), ran.end(), by_time)->second;
    const double high = std::max_element(ran.begin(), ran.end(), by_time)->second;
    switch (option) {
      case TimerOption::kMinMax:
        if (lines.empty()) lines.emplace_back("(min, max) time across ranks (ms):");
        lines.push_back("    " + dotted(names[i]) + text(": (%.2f, %.2f)", low, high));
        break;
      case TimerOption::kMax:
        if (lines.empty()) lines.emplace_back("max time across ranks (ms):");
        lines.push_back("    " + dotted(names[i]) + text(": %.2f", high));
        break;
      case TimerOption::kAll:
        if (lines.empty()) lines.emplace_back("times across ranks (ms):");
        lines.push_back("  " + names[i] + ":");
        for (const auto& [rank, ms] : ran) lines.push_back(text("     rank %2zu: %.2f", rank, ms));
        break;
    }
  }
  return lines;
}

}  // namespace pgpt::training

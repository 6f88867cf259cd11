// Memory of a rank for people: one table, and what each recompute choice changes.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <utility>

#include "pgpt/config/estimate.h"

namespace pgpt::config {

namespace {

constexpr double kMebibyte = 1024.0 * 1024.0;

[[gnu::format(printf, 1, 2)]] std::string text(const char* format, ...) {
  char buffer[200];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

}  // namespace

std::vector<std::string> memory_table(const RankEstimate& rank, const std::optional<MeasuredMemory>& measured) {
  std::vector<std::string> lines;
  const auto add = [&](const char* name, double bytes) {
    lines.push_back(text("  %-46s %12.1f", name, bytes / kMebibyte));
  };
  const auto sum = [&](const char* name, double bytes, double found) {
    add(name, bytes);
    if (measured) lines.back() += text(" %12.1f   %+.2f %%", found / kMebibyte, (found / bytes - 1) * 100);
  };
  lines.push_back(text("%-48s %12s", "memory of a rank (MiB)", "estimate"));
  if (measured) lines.back() += "     measured";
  add("weights", static_cast<double>(rank.weight_bytes));
  add("main gradients", static_cast<double>(rank.gradient_bytes));
  add("master weights", static_cast<double>(rank.master_bytes));
  add("optimizer moments", static_cast<double>(rank.moment_bytes));
  add("buffers", rank.buffer_bytes);
  sum("= between steps", rank.resident_bytes(), measured ? measured->resident_bytes : 0);
  for (const MemoryMoment& moment : rank.moments) {
    add(("in the " + moment.name).c_str(), moment.total());
    lines.back() += text("   = activations %.1f", moment.activations / kMebibyte);
    if (moment.logits > 0) lines.back() += text(" + logits %.1f", moment.logits / kMebibyte);
    lines.back() += text(" + gradients in flight %.1f", moment.work / kMebibyte);
  }
  sum("= peak", rank.peak_bytes(), measured ? measured->peak_bytes : 0);
  return lines;
}

std::vector<RecomputeChoice> estimate_recompute_choices(const Config& config) {
  std::vector<RecomputeChoice> choices;
  const auto add = [&](const std::string& options, const auto& change) {
    Config changed = config;
    TrainingConfig& t = changed.training;
    t.recompute = RecomputeGranularity::kNone;
    t.recompute_modules.clear();
    t.recompute_num_layers = 0;
    change(t);
    Estimate sizes = estimate(changed);
    const auto most = std::max_element(sizes.stages.begin(), sizes.stages.end(),
                                       [](const auto& a, const auto& b) { return a.peak_bytes() < b.peak_bytes(); });
    choices.push_back({options, std::move(*most)});
  };
  const auto selective = [&](const std::vector<std::string>& modules) {
    std::string options = "--recompute-granularity selective --recompute-modules";
    for (const std::string& module : modules) options += " " + module;
    add(options, [&](TrainingConfig& t) {
      t.recompute = RecomputeGranularity::kSelective;
      t.recompute_modules = modules;
    });
  };
  add("", [](TrainingConfig&) {});
  selective({"core_attn"});
  selective({"layernorm"});
  selective({"mlp"});
  selective({"core_attn", "layernorm", "mlp"});
  add("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", [](TrainingConfig& t) {
    t.recompute = RecomputeGranularity::kFull;
    t.recompute_method = RecomputeMethod::kUniform;
    t.recompute_num_layers = 1;
  });
  return choices;
}

}  // namespace pgpt::config

// Metrics files (--metrics-file), and the reports of numbers.

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "pgpt/base/error.h"
#include "pgpt/training/compare_runs.h"

namespace pgpt::training {
namespace {

using nlohmann::json;

using Steps = std::map<std::int64_t, std::map<std::string, double>>;

/// Measurements of the machine; everything else in a metrics line belongs to the run's arithmetic.
const std::set<std::string>& measurements() {
  static const std::set<std::string> names = {"step_time_ms",          "tokens_per_second",
                                              "tflops_per_gpu",        "memory_allocated_bytes",
                                              "memory_reserved_bytes", "memory_max_allocated_bytes"};
  return names;
}

Steps read_metrics(const std::string& path) {
  std::ifstream in(path);
  PGPT_CHECK(DataError, in.good(), "cannot open ", path, ": ", std::strerror(errno));
  Steps steps;
  std::int64_t line = 0;
  for (std::string text; std::getline(in, text);) {
    ++line;
    if (text.empty()) continue;
    const json object = json::parse(text, nullptr, false);
    PGPT_CHECK(DataError,
               object.is_object() && object.contains("kind") && object.value("iteration", json()).is_number(), path,
               ":", line, ": no line of a metrics file (--metrics-file); logs are compared with --log");
    const bool evaluation = object.at("kind") != "step";
    std::map<std::string, double>& values = steps[object.at("iteration").get<std::int64_t>()];
    for (const auto& [name, value] : object.items()) {
      if (name == "iteration" || measurements().count(name) != 0 || (evaluation && name == "consumed_samples"))
        continue;
      if (value.is_number()) values[name] = value.get<double>();
      if (value.is_boolean()) values[name] = value.get<bool>() ? 1 : 0;
    }
  }
  PGPT_CHECK(DataError, !steps.empty(), path, " is empty");
  return steps;
}

std::string number(double value, const char* format) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

json cell(double value) { return std::isfinite(value) ? json(value) : json(); }

}  // namespace

NumbersReport compare_metrics(const std::string& path_a, const std::string& path_b, const std::string& preset,
                              const std::map<std::string, double>& tolerances,
                              const std::vector<std::int64_t>& iterations) {
  Steps a = read_metrics(path_a);
  const Steps b = read_metrics(path_b);
  if (!iterations.empty()) {
    std::erase_if(a, [&](const auto& step) {
      return std::find(iterations.begin(), iterations.end(), step.first) == iterations.end();
    });
    PGPT_CHECK(DataError, !a.empty(), path_a, " has none of the steps that --iterations names");
  }
  NumbersReport report;
  report.a = path_a;
  report.b = path_b;
  PGPT_CHECK(ConfigError, preset.empty() || preset == "bf16" || preset == "fp32" || preset == "exact", "--preset ",
             preset, ": choose bf16, fp32 or exact");
  const auto bound_of = [&](const std::string& name) {
    if (const auto given = tolerances.find(name); given != tolerances.end()) return given->second;
    if (preset == "exact") return 0.0;
    const bool loss = name.find("loss") != std::string::npos && name != "loss_scale";
    // bf16: 6e-4 on a loss of 4.8; fp32: the bounds of the conformance cases. Rates, samples and counts are exact.
    if (loss) return preset == "fp32" ? 3e-6 : 1.3e-4;
    if (name == "grad_norm") return preset == "fp32" ? 2e-5 : 3e-3;
    if (name == "params_norm") return preset == "fp32" ? 1e-6 : 1e-4;
    return 0.0;
  };
  for (const auto& [iteration, values] : a) {
    const auto other = b.find(iteration);
    if (other == b.end()) continue;
    for (const auto& [name, value] : values) {
      const auto found = other->second.find(name);
      if (found == other->second.end()) continue;
      NumberRow row{iteration, name, value, found->second, 0, bound_of(name), Match::kEqual};
      row.error = row.b != 0 ? std::abs(row.a - row.b) / std::abs(row.b) : std::abs(row.a - row.b);
      if (row.a != row.b) row.match = row.error <= row.bound ? Match::kWithin : Match::kDifferent;
      if (row.match == Match::kDifferent) {
        report.real.push_back(concat("iteration ", iteration, ", ", name, ": ", number(row.a, "%.9g"), " against ",
                                     number(row.b, "%.9g"), " (relative ", number(row.error, "%.3g"), ", bound ",
                                     number(row.bound, "%.3g"), ")"));
      }
      report.rows.push_back(std::move(row));
    }
  }
  PGPT_CHECK(DataError, !report.rows.empty(), path_a, " and ", path_b, " have no iteration in common");
  return report;
}

std::string format_table(const NumbersReport& report, bool all) {
  std::string text = "A: " + report.a + "\nB: " + report.b + "\n\n";
  std::size_t width = 6, equal = 0;
  for (const NumberRow& row : report.rows) {
    width = std::max(width, row.name.size());
    if (row.match == Match::kEqual) ++equal;
  }
  text += concat(report.rows.size(), " numbers, ", equal, " equal\n");
  if (all || equal < report.rows.size()) {
    text += "iteration  " + std::string("number") + std::string(width - 6, ' ') +
            "              A              B  relative error  match\n";
    for (const NumberRow& row : report.rows) {
      if (!all && row.match == Match::kEqual) continue;
      text += number(static_cast<double>(row.iteration), "%9.0f") + "  " + row.name +
              std::string(width - row.name.size(), ' ') + number(row.a, "%15.9g") + number(row.b, "%15.9g") +
              number(row.error, "%16.3g") + "  " + match_name(row.match) + "\n";
    }
  }
  for (const std::string& remark : report.remarks) text += "\nnote: " + remark;
  for (const std::string& artefact : report.artefacts) text += "\nreporting artefact: " + artefact;
  for (const std::string& difference : report.real) text += "\nreal difference: " + difference;
  text += "\nverdict: ";
  if (!report.real.empty()) {
    text += "different: the first real difference is at " + report.real.front() + "\n";
    const auto first = std::find_if(report.rows.begin(), report.rows.end(),
                                    [](const NumberRow& row) { return row.match == Match::kDifferent; });
    if (first != report.rows.end() && first->iteration > report.rows.front().iteration) {
      text += "Earlier steps agree. Rounding grows from step to step: compare the first steps, or evidence.\n";
    }
    return text;
  }
  if (!report.artefacts.empty()) return text + "the same training, reported differently\n";
  return text + (equal == report.rows.size() ? "equal\n" : "within rounding\n");
}

std::string format_json(const NumbersReport& report) {
  json document = {{"format", "pgpt-compare-1"},
                   {"a", report.a},
                   {"b", report.b},
                   {"artefacts", report.artefacts},
                   {"remarks", report.remarks},
                   {"real_differences", report.real}};
  const bool equal = std::all_of(report.rows.begin(), report.rows.end(),
                                 [](const NumberRow& row) { return row.match == Match::kEqual; });
  document["verdict"] = !report.agrees()            ? "different"
                        : !report.artefacts.empty() ? "reporting"
                        : equal                     ? "equal"
                                                    : "within rounding";
  document["numbers"] = json::array();
  for (const NumberRow& row : report.rows) {
    document["numbers"].push_back({{"iteration", row.iteration},
                                   {"name", row.name},
                                   {"a", cell(row.a)},
                                   {"b", cell(row.b)},
                                   {"relative_error", cell(row.error)},
                                   {"bound", row.bound},
                                   {"match", match_name(row.match)}});
  }
  return document.dump(1) + "\n";
}

}  // namespace pgpt::training

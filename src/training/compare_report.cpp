// Comparison reports: table, JSON, SVG picture.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "pgpt/base/error.h"
#include "pgpt/training/compare.h"

namespace pgpt::training {
namespace {

using nlohmann::json;

constexpr std::size_t kShownRows = 16;

const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::kInput:
      return "inputs";
    case Phase::kForward:
      return "forward";
    case Phase::kBackward:
      return "backward";
    case Phase::kMainGradient:
      return "main gradients";
    case Phase::kOptimizer:
      return "optimizer";
  }
  return "?";
}

std::string number(double value, const char* format = "%.3g") {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string list(const std::vector<std::int64_t>& values) {
  std::string text = "[";
  for (const std::int64_t value : values) text += (text.size() > 1 ? ", " : "") + std::to_string(value);
  return text + "]";
}

std::string pad(std::string text, std::size_t width, bool right = false) {
  if (text.size() >= width) return text;
  const std::string blanks(width - text.size(), ' ');
  return right ? blanks + text : text + blanks;
}

std::string describe(const TensorRow& row) {
  std::string text = row.key.text() + " (" + row.dtype + " " + list(row.shape) + ")";
  if (!row.first_at.empty()) {
    text += "\n    first at " + list(row.first_at) + ": A " + number(row.first_a, "%.9g") + ", B " +
            number(row.first_b, "%.9g");
    if (row.worst_at != row.first_at) {
      text += "\n    worst at " + list(row.worst_at) + ": A " + number(row.worst_a, "%.9g") + ", B " +
              number(row.worst_b, "%.9g");
    }
    text += "\n    " + std::to_string(row.differing) + " of " + std::to_string(row.elements) + " elements differ";
  }
  if (!row.remark.empty()) text += "\n    " + row.remark;
  return text;
}

/// Rows of one iteration and phase together.
struct Group {
  std::int64_t iteration;
  Phase phase;
  std::int64_t counts[3] = {0, 0, 0};
  const TensorRow* worst = nullptr;
};

std::vector<Group> group_rows(const CompareReport& report) {
  std::vector<Group> groups;
  for (const TensorRow& row : report.rows) {
    if (groups.empty() || groups.back().iteration != row.key.iteration || groups.back().phase != row.key.phase) {
      groups.push_back({row.key.iteration, row.key.phase, {0, 0, 0}, nullptr});
    }
    Group& group = groups.back();
    ++group.counts[static_cast<int>(row.match)];
    if (row.match != Match::kEqual && (group.worst == nullptr || row.relative_l2 > group.worst->relative_l2))
      group.worst = &row;
  }
  return groups;
}

std::string verdict(const CompareReport& report) {
  switch (report.match()) {
    case Match::kEqual:
      return concat("equal: all ", report.rows.size(), " tensors have the same bits");
    case Match::kWithin:
      return "within rounding: every difference is inside its bound";
    case Match::kDifferent:
      return concat("different: the first tensor beyond its bound is ", report.first_beyond()->key.text());
  }
  return "?";
}

json cell(double value) {
  return std::isfinite(value) ? json(value) : json(std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
}

json row_json(const TensorRow& row) {
  json object = {{"iteration", row.key.iteration},
                 {"phase", phase_name(row.key.phase)},
                 {"tensor", row.key.label()},
                 {"kind", row.key.kind},
                 {"name", row.key.name},
                 {"dtype", row.dtype},
                 {"shape", row.shape},
                 {"match", match_name(row.match)},
                 {"elements", row.elements},
                 {"differing", row.differing},
                 {"max_ulps", cell(row.max_ulps)},
                 {"mean_ulps", cell(row.mean_ulps)},
                 {"max_error", cell(row.max_error)},
                 {"relative_l2", cell(row.relative_l2)},
                 {"bound", row.bound},
                 {"relative_to_update", row.relative_to_update}};
  object["sample"] = row.key.sample >= 0 ? json(row.key.sample) : json();
  if (!row.first_at.empty()) {
    object["first"] = {{"at", row.first_at}, {"a", cell(row.first_a)}, {"b", cell(row.first_b)}};
    object["worst"] = {{"at", row.worst_at}, {"a", cell(row.worst_a)}, {"b", cell(row.worst_b)}};
  }
  if (!row.remark.empty()) object["remark"] = row.remark;
  return object;
}

std::string escape(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '&':
        result += "&amp;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

}  // namespace

std::string format_table(const CompareReport& report, bool all) {
  std::string text = "A: " + report.a + " (" + report.a_description + ")\nB: " + report.b + " (" +
                     report.b_description + ")\nbounds: " + report.preset + "\n\n";
  text += "iteration  phase           equal  within  different  worst relative error\n";
  for (const Group& group : group_rows(report)) {
    text += pad(group.iteration == 0 ? "initial" : std::to_string(group.iteration), 9, true) + "  " +
            pad(phase_name(group.phase), 14) + pad(std::to_string(group.counts[0]), 7, true) +
            pad(std::to_string(group.counts[1]), 8, true) + pad(std::to_string(group.counts[2]), 11, true);
    if (group.worst != nullptr) text += "  " + number(group.worst->relative_l2) + " " + group.worst->key.label();
    text += "\n";
  }
  std::vector<const TensorRow*> shown;
  for (const TensorRow& row : report.rows) {
    if (all || row.match != Match::kEqual) shown.push_back(&row);
  }
  const std::size_t hidden = all || shown.size() <= kShownRows ? 0 : shown.size() - kShownRows;
  shown.resize(shown.size() - hidden);
  if (!shown.empty()) {
    std::size_t width = 6;
    for (const TensorRow* row : shown) width = std::max(width, row->key.label().size());
    text += "\niter  sample  " + pad("tensor", width) +
            "  type      match            differing     max ulps  mean ulps  relative L2  bound\n";
    for (const TensorRow* row : shown) {
      text += pad(std::to_string(row->key.iteration), 4, true) + "  " +
              pad(row->key.sample >= 0 ? std::to_string(row->key.sample) : "-", 6, true) + "  " +
              pad(row->key.label(), width) + "  " + pad(row->dtype, 8) + "  " + pad(match_name(row->match), 15) +
              pad(std::to_string(row->differing), 11, true) + pad(number(row->max_ulps), 13, true) +
              pad(number(row->mean_ulps), 11, true) + pad(number(row->relative_l2), 13, true) +
              (row->relative_to_update ? "*" : " ") + " " + number(row->bound) + "\n";
    }
    const bool starred =
        std::any_of(shown.begin(), shown.end(), [](const TensorRow* row) { return row->relative_to_update; });
    if (hidden > 0) text += concat("... and ", hidden, " more that differ (--all shows every tensor)\n");
    if (starred) text += "* relative to the change since the first step\n";
  }
  for (const auto& [side, kinds] : {std::pair{"A", &report.only_a}, std::pair{"B", &report.only_b}}) {
    std::string counts;
    for (const auto& [kind, count] : *kinds) counts += concat(counts.empty() ? "" : ", ", count, " ", kind);
    if (!counts.empty()) text += concat("\nonly in ", side, ": ", counts);
  }
  for (const std::string& note : report.notes) text += "\nnote: " + note;
  text += "\n";
  if (const TensorRow* first = report.first_difference()) {
    text += "first tensor whose bits differ: " + describe(*first) + "\n";
    const TensorRow* beyond = report.first_beyond();
    if (beyond != nullptr && beyond != first) text += "first tensor beyond its bound: " + describe(*beyond) + "\n";
  }
  return text + "verdict: " + verdict(report) + "\n";
}

std::string format_json(const CompareReport& report) {
  json document = {{"format", "pgpt-compare-1"}, {"a", report.a}, {"b", report.b}, {"bounds", report.preset}};
  document["verdict"] = match_name(report.match());
  document["tensors"] = json::array();
  for (const TensorRow& row : report.rows) document["tensors"].push_back(row_json(row));
  document["first_difference"] = report.first_difference() != nullptr ? row_json(*report.first_difference()) : json();
  document["first_beyond_bound"] = report.first_beyond() != nullptr ? row_json(*report.first_beyond()) : json();
  document["only_in_a"] = report.only_a;
  document["only_in_b"] = report.only_b;
  document["notes"] = report.notes;
  return document.dump(1) + "\n";
}

std::string format_svg(const CompareReport& report) {
  // x: tensors in the order of the step; y: log10 of the relative error, equal bits on the base line.
  constexpr double kLeft = 80, kTop = 60, kWidth = 1040, kHeight = 380, kBottom = kTop + kHeight;
  constexpr double kHighest = 1, kLowest = -9;  // decades
  const auto y_of = [&](double value) {
    if (value <= 0) return kBottom;
    const double decade = std::clamp(std::isfinite(value) ? std::log10(value) : kHighest, kLowest, kHighest);
    return kTop + (kHighest - decade) / (kHighest - kLowest) * (kHeight - 20);
  };
  const double step = kWidth / static_cast<double>(std::max<std::size_t>(report.rows.size(), 1));
  const auto x_of = [&](std::size_t i) { return kLeft + (static_cast<double>(i) + 0.5) * step; };
  const char* colors[] = {"#2e7d32", "#1565c0", "#c62828"};

  std::string svg =
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1160\" height=\"520\" font-family=\"sans-serif\" "
      "font-size=\"12\">\n"
      "<rect width=\"1160\" height=\"520\" fill=\"white\"/>\n";
  svg +=
      "<text x=\"80\" y=\"20\" font-size=\"14\">Relative L2 error of each tensor along the step: " + escape(report.a) +
      " against " + escape(report.b) + "</text>\n<text x=\"80\" y=\"40\">" + escape(verdict(report)) + "</text>\n";
  for (int decade = static_cast<int>(kLowest); decade <= static_cast<int>(kHighest); ++decade) {
    const std::string y = number(y_of(std::pow(10.0, decade)), "%.1f");
    svg += "<line x1=\"80\" x2=\"1120\" y1=\"" + y + "\" y2=\"" + y + "\" stroke=\"#e0e0e0\"/><text x=\"74\" y=\"" + y +
           "\" text-anchor=\"end\">1e" + std::to_string(decade) + "</text>\n";
  }
  svg += "<text x=\"74\" y=\"" + number(kBottom, "%.1f") + "\" text-anchor=\"end\">equal</text>\n";
  std::string bounds;
  for (std::size_t i = 0; i < report.rows.size(); ++i) {
    const TensorRow& row = report.rows[i];
    const bool opens = i == 0 || report.rows[i - 1].key.iteration != row.key.iteration ||
                       report.rows[i - 1].key.phase != row.key.phase;
    const std::string x = number(x_of(i), "%.2f");
    if (opens) {
      const std::string edge = number(x_of(i) - step / 2, "%.2f");
      svg += "<line x1=\"" + edge + "\" x2=\"" + edge +
             "\" y1=\"60\" y2=\"440\" stroke=\"#bdbdbd\"/><text transform=\"translate(" + edge + ",452) rotate(30)\">" +
             (row.key.iteration == 0 ? "initial" : std::to_string(row.key.iteration)) + " " +
             phase_name(row.key.phase) + "</text>\n";
    }
    if (row.bound > 0) {
      const std::string y = number(y_of(row.bound), "%.1f");
      bounds += "M" + number(x_of(i) - step / 2, "%.2f") + "," + y + "H" + number(x_of(i) + step / 2, "%.2f");
    }
    svg += "<circle cx=\"" + x + "\" cy=\"" +
           number(row.match == Match::kEqual ? kBottom : y_of(row.relative_l2), "%.1f") + "\" r=\"2.5\" fill=\"" +
           colors[static_cast<int>(row.match)] + "\"><title>" + escape(row.key.text()) + ": " + match_name(row.match) +
           ", " + number(row.relative_l2) + "</title></circle>\n";
  }
  svg += "<path d=\"" + bounds + "\" stroke=\"#ef6c00\" fill=\"none\"/>\n";
  svg +=
      "<text x=\"1120\" y=\"40\" text-anchor=\"end\"><tspan fill=\"#2e7d32\">equal bits</tspan> <tspan "
      "fill=\"#1565c0\">within rounding"
      "</tspan> <tspan fill=\"#c62828\">different</tspan> <tspan fill=\"#ef6c00\">bound</tspan></text>\n";
  return svg + "</svg>\n";
}

}  // namespace pgpt::training

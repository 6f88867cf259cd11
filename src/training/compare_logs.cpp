// Training logs: this program's and Megatron-LM's, which share one line format.

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "pgpt/base/error.h"
#include "pgpt/training/compare_runs.h"

namespace pgpt::training {
namespace {

// Losses and learning rates are printed as %.6E, norms as %.3f: half a unit of the last printed digit.
constexpr double kScientificHalfUnit = 5e-7;  // relative to a mantissa of 1, the least
constexpr double kThreeDecimalsHalfUnit = 5e-4;

std::string trim(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

std::string number(double value, const char* format = "%.6g") {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::optional<double> parse_number(const std::string& text) {
  const std::string word = trim(text);
  char* end = nullptr;
  const double value = std::strtod(word.c_str(), &end);
  if (word.empty() || *end != '\0') return std::nullopt;
  return value;
}

/// " iteration N/ M | key: value | ..." anywhere in a line (launchers put prefixes in front).
std::optional<LogLine> parse_training_line(const std::string& text) {
  const std::size_t at = text.find(" iteration ");
  const std::size_t bar = at == std::string::npos ? at : text.find('|', at);
  if (bar == std::string::npos) return std::nullopt;
  const std::string counter = text.substr(at + std::strlen(" iteration "), bar - at - std::strlen(" iteration "));
  const std::size_t slash = counter.find('/');
  if (slash == std::string::npos) return std::nullopt;
  const std::optional<double> iteration = parse_number(counter.substr(0, slash));
  if (!iteration) return std::nullopt;
  LogLine line;
  line.iteration = static_cast<std::int64_t>(*iteration);
  std::size_t begin = bar + 1;
  for (std::size_t end = text.find('|', begin); end != std::string::npos;
       begin = end + 1, end = text.find('|', begin)) {
    const std::string field = text.substr(begin, end - begin);
    const std::size_t colon = field.rfind(':');
    if (colon == std::string::npos) continue;
    if (const std::optional<double> value = parse_number(field.substr(colon + 1)))
      line.values[trim(field.substr(0, colon))] = *value;
  }
  return line;
}

/// " validation loss at iteration N | lm loss value: X | ..." to the name before the bar and X.
void parse_evaluation(const std::string& text, TrainingRunLog& log) {
  const std::size_t at = text.find("validation");
  const std::size_t value = text.find("lm loss value:");
  const std::size_t bar = text.find('|', at == std::string::npos ? 0 : at);
  if (at == std::string::npos || value == std::string::npos || bar == std::string::npos ||
      text.find("loss at iteration") == std::string::npos)
    return;
  const std::size_t end = text.find('|', value);
  if (const std::optional<double> loss = parse_number(
          text.substr(value + std::strlen("lm loss value:"), end - value - std::strlen("lm loss value:")))) {
    log.evaluations[trim(text.substr(at, bar - at))] = *loss;
  }
}

/// "  name ........ value" of the printed argument block.
void parse_argument(const std::string& text, TrainingRunLog& log) {
  const std::size_t dots = text.find(" ..");
  if (dots == std::string::npos || text.rfind("  ", 0) != 0) return;
  const std::size_t value = text.find(' ', text.find_first_not_of('.', dots + 1) == std::string::npos
                                               ? dots + 1
                                               : text.find_first_not_of('.', dots + 1));
  if (value == std::string::npos) return;
  log.arguments[trim(text.substr(0, dots))] = trim(text.substr(value));
}

double argument(const TrainingRunLog& log, const std::string& name, double otherwise) {
  const auto it = log.arguments.find(name);
  if (it == log.arguments.end()) return otherwise;
  return parse_number(it->second).value_or(otherwise);
}

double value_of(const LogLine& line, const std::string& name) {
  const auto it = line.values.find(name);
  return it == line.values.end() ? std::nan("") : it->second;
}

/// A log's loss at its second line when it averages over the lines before too: steps 1 to k1 count once more.
double first_window_mean(double first, std::int64_t first_iteration, double second, std::int64_t second_iteration) {
  const auto others = static_cast<double>(second_iteration - first_iteration);
  return (first + others * second) / (1.0 + others);
}

/// Says how a log reports its learning rate, from its own argument block.
void describe_learning_rate(const TrainingRunLog& log, NumbersReport& report) {
  const double peak = argument(log, "lr", 0), warmup_init = argument(log, "lr_warmup_init", 0);
  const double warmup = argument(log, "lr_warmup_iters", 0);
  if (peak <= 0 || warmup < 1 || log.lines.front().iteration != 1) return;
  const double printed = value_of(log.lines.front(), "learning rate");
  const double next = warmup_init + (peak - warmup_init) * std::min(1.0, 1.0 / warmup);
  if (std::abs(printed - next) <= 1e-6 * peak && printed != warmup_init) {
    report.remarks.push_back(
        concat(log.path, ": the learning rate of a line is the one after its step. With --lr-warmup-iters ", warmup,
               " step 1 ran at ", number(warmup_init), ", not at the printed ", number(printed),
               warmup_init == 0 ? ", so it changed no weights, and steps 1 and 2 used the same ones" : ""));
  }
}

}  // namespace

TrainingRunLog read_training_log(const std::string& path) {
  std::ifstream in(path);
  PGPT_CHECK(DataError, in.good(), "cannot open ", path, ": ", std::strerror(errno));
  TrainingRunLog log;
  log.path = path;
  for (std::string text; std::getline(in, text);) {
    if (std::optional<LogLine> line = parse_training_line(text)) {
      // A resumed run repeats iterations; the last one printed counts.
      const auto same = std::find_if(log.lines.begin(), log.lines.end(),
                                     [&](const LogLine& l) { return l.iteration == line->iteration; });
      if (same != log.lines.end()) {
        *same = std::move(*line);
      } else {
        log.lines.push_back(std::move(*line));
      }
      continue;
    }
    parse_evaluation(text, log);
    parse_argument(text, log);
    const std::string gtp = "gtp weight remat with size ";
    if (const std::size_t at = text.find(gtp); at != std::string::npos) {
      log.gtp = static_cast<std::int64_t>(parse_number(text.substr(at + gtp.size())).value_or(1));
    }
  }
  PGPT_CHECK(DataError, !log.lines.empty(), path,
             " holds no training line (\" iteration N/ M | ... |\"); give the output of the last rank");
  if (log.gtp == 1) {
    const double tensor = std::max(1.0, argument(log, "tensor_model_parallel_size", 1));
    log.gtp = static_cast<std::int64_t>(argument(log, "tensor_parallel_num_weight_shards", tensor) / tensor);
  }
  return log;
}

NumbersReport compare_logs(const std::string& path_a, const std::string& path_b,
                           const std::map<std::string, double>& tolerances) {
  const TrainingRunLog a = read_training_log(path_a), b = read_training_log(path_b);
  NumbersReport report;
  report.a = path_a;
  report.b = path_b;
  // Absolute bounds: the spread of correct bf16 implementations on the losses of the seed run, and the printed digits.
  std::map<std::string, double> bounds = {
      {"lm loss", 6e-4}, {"grad norm", 3e-3}, {"params norm", 3e-3}, {"learning rate", 0.0}};
  for (const auto& [name, bound] : tolerances) bounds[name] = bound;

  std::vector<std::pair<const LogLine*, const LogLine*>> pairs;
  for (const LogLine& line : a.lines) {
    const auto other =
        std::find_if(b.lines.begin(), b.lines.end(), [&](const LogLine& l) { return l.iteration == line.iteration; });
    if (other != b.lines.end()) pairs.emplace_back(&line, &*other);
  }
  PGPT_CHECK(DataError, !pairs.empty(), path_a, " and ", path_b, " have no iteration in common");

  const auto agrees = [&](const std::string& name, double x, double y) {
    double bound = bounds.count(name) != 0 ? bounds[name] : 0.0;
    if (name == "grad norm") bound = bound * std::max(std::abs(x), std::abs(y)) + 2 * kThreeDecimalsHalfUnit;
    if (name == "params norm") bound += 2 * kThreeDecimalsHalfUnit;
    if (name.find("loss") != std::string::npos || name == "learning rate") {
      bound +=
          2 * kScientificHalfUnit * std::pow(10.0, std::floor(std::log10(std::max({std::abs(x), std::abs(y), 1e-30}))));
    }
    return std::abs(x - y) <= bound || (std::isnan(x) && std::isnan(y));
  };
  const auto explain_loss = [&](const std::string& name, std::size_t index) -> bool {
    // Only the second line of a log can hold steps that the first one has already shown.
    if (index != 1) return false;
    const auto [first_a, first_b] = pairs[0];
    const auto [second_a, second_b] = pairs[1];
    if (!agrees(name, value_of(*first_a, name), value_of(*first_b, name))) return false;
    const auto is_mean = [&](const LogLine* plain_first, const LogLine* plain_second, const LogLine* mean_second) {
      return agrees(name,
                    first_window_mean(value_of(*plain_first, name), plain_first->iteration,
                                      value_of(*plain_second, name), plain_second->iteration),
                    value_of(*mean_second, name));
    };
    const bool b_averages = is_mean(first_a, second_a, second_b);
    const bool a_averages = !b_averages && is_mean(first_b, second_b, second_a);
    if (!a_averages && !b_averages) return false;
    const LogLine *plain_first = b_averages ? first_a : first_b, *plain_second = b_averages ? second_a : second_b;
    const double mean = first_window_mean(value_of(*plain_first, name), plain_first->iteration,
                                          value_of(*plain_second, name), plain_second->iteration);
    report.artefacts.push_back(
        concat("iteration ", second_a->iteration, ", ", name, ": ", b_averages ? path_b : path_a,
               " prints a first-window mean. It does not reset its sums after the first line, so its second line is "
               "the mean of all steps so far: (",
               number(value_of(*plain_first, name), "%.6f"), " + ",
               plain_second->iteration - plain_first->iteration == 1
                   ? std::string()
                   : concat(plain_second->iteration - plain_first->iteration, " x "),
               number(value_of(*plain_second, name), "%.6f"), ") / ",
               plain_second->iteration - plain_first->iteration + 1, " = ", number(mean, "%.7f"), ", and it prints ",
               number(value_of(*(b_averages ? second_b : second_a), name), "%.6f"), ". The loss of that step is ",
               number(value_of(*plain_second, name), "%.6f"), " in both runs"));
    return true;
  };

  const std::vector<std::string> skipped = {"elapsed time per iteration (ms)", "throughput per GPU (TFLOP/s/GPU)",
                                            "energy per GPU (J/iter/GPU)", "power per GPU (W/GPU)"};
  // One log may print the rate that a step used and the other the one that follows it.
  const auto shifted = [&](std::size_t by_a, std::size_t by_b) {
    std::size_t compared = 0;
    for (std::size_t i = 0; i + 1 < pairs.size(); ++i) {
      if (!agrees("learning rate", value_of(*pairs[i + by_a].first, "learning rate"),
                  value_of(*pairs[i + by_b].second, "learning rate")))
        return false;
      ++compared;
    }
    return compared > 0;
  };
  bool rates_equal = true;
  for (const auto& [x, y] : pairs)
    rates_equal = rates_equal && agrees("learning rate", value_of(*x, "learning rate"), value_of(*y, "learning rate"));
  const bool b_is_later = !rates_equal && shifted(1, 0), a_is_later = !rates_equal && !b_is_later && shifted(0, 1);
  if (a_is_later || b_is_later) {
    report.artefacts.push_back(concat("learning rate: ", b_is_later ? path_b : path_a,
                                      " prints the rate after the step, ", b_is_later ? path_a : path_b,
                                      " the rate that the step used; shifted by one line both columns are the same"));
  }

  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const auto [line_a, line_b] = pairs[i];
    for (const auto& [name, value] : line_a->values) {
      if (line_b->values.count(name) == 0 || std::find(skipped.begin(), skipped.end(), name) != skipped.end()) continue;
      NumberRow row;
      row.iteration = line_a->iteration;
      row.name = name;
      row.a = value;
      row.b = line_b->values.at(name);
      row.error = row.b != 0 ? std::abs(row.a - row.b) / std::abs(row.b) : std::abs(row.a - row.b);
      row.bound = bounds.count(name) != 0 ? bounds[name] : 0.0;
      row.match = row.a == row.b ? Match::kEqual : agrees(name, row.a, row.b) ? Match::kWithin : Match::kDifferent;
      report.rows.push_back(row);
      if (row.match != Match::kDifferent) continue;
      if (name == "learning rate" && (a_is_later || b_is_later)) continue;
      if (name.find("loss") != std::string::npos && name != "loss scale" && explain_loss(name, i)) continue;
      report.real.push_back(concat("iteration ", row.iteration, ", ", name, ": ", number(row.a, "%.9g"), " against ",
                                   number(row.b, "%.9g")));
    }
  }
  describe_learning_rate(a, report);
  describe_learning_rate(b, report);

  const bool training_agrees = report.real.empty();
  for (const auto& [name, loss] : a.evaluations) {
    const auto other = b.evaluations.find(name);
    if (other == b.evaluations.end() || agrees("lm loss", loss, other->second)) continue;
    const bool sharded = a.gtp > 1 || b.gtp > 1;
    const std::string figures = concat(name, ": ", number(loss, "%.6f"), " against ", number(other->second, "%.6f"));
    if (training_agrees && sharded) {
      report.artefacts.push_back(concat(
          figures,
          ", while every training line agrees: an evaluation averaged over a part of the ranks. Under GTP Megatron-LM "
          "reduces evaluation losses without the GTP axis, so its figure covers the samples of one GTP coordinate, 1/",
          std::max(a.gtp, b.gtp),
          " of them; this program averages over all data ranks. Compare with an evaluation without GTP"));
    } else {
      report.real.push_back(figures);
    }
  }
  return report;
}

}  // namespace pgpt::training

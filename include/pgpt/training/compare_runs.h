#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "pgpt/training/compare.h"

namespace pgpt::training {

/// One compared number of two runs.
struct NumberRow {
  std::int64_t iteration = 0;
  std::string name;  ///< "lm_loss", "grad_norm", ...
  double a = 0, b = 0;
  double error = 0;  ///< relative; absolute where B is 0
  double bound = 0;
  Match match = Match::kEqual;
};

/// Numbers of two runs, and what explains their differences.
struct NumbersReport {
  std::string a, b;
  std::vector<NumberRow> rows;         ///< by iteration, then in the order of a line
  std::vector<std::string> artefacts;  ///< differences that come from reporting alone, in words
  std::vector<std::string> remarks;    ///< how each log reports, in words
  std::vector<std::string> real;       ///< differences that reporting does not explain, in words

  [[nodiscard]] bool agrees() const { return real.empty(); }
};

/// Compares two --metrics-file files by iteration, all or those named. `tolerances` are relative bounds by key. Throws
/// DataError.
[[nodiscard]] NumbersReport compare_metrics(const std::string& a, const std::string& b, const std::string& preset,
                                            const std::map<std::string, double>& tolerances,
                                            const std::vector<std::int64_t>& iterations = {});

/// One training line of a log.
struct LogLine {
  std::int64_t iteration = 0;
  std::map<std::string, double> values;  ///< field name as printed to value
};
/// What a training log of this program or of Megatron-LM says.
struct TrainingRunLog {
  std::string path;
  std::vector<LogLine> lines;
  std::map<std::string, double> evaluations;     ///< "validation at iteration N" and the like to loss
  std::map<std::string, std::string> arguments;  ///< of the printed block, where there is one
  std::int64_t gtp = 1;                          ///< weight shards that the log mentions
};
/// Reads a log. Throws DataError when it holds no training line.
[[nodiscard]] TrainingRunLog read_training_log(const std::string& path);

/// Compares two logs and tells reporting artefacts (a first-window mean, a learning rate printed after the step, an
/// evaluation over a part of the ranks) from real differences.
[[nodiscard]] NumbersReport compare_logs(const std::string& a, const std::string& b,
                                         const std::map<std::string, double>& tolerances);

[[nodiscard]] std::string format_table(const NumbersReport& report, bool all);
[[nodiscard]] std::string format_json(const NumbersReport& report);

}  // namespace pgpt::training

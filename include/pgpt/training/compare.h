#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "pgpt/training/tensor_source.h"

namespace pgpt::training {

/// Outcome of comparing two values or tensors.
enum class Match { kEqual, kWithin, kDifferent };
[[nodiscard]] const char* match_name(Match match);  ///< "equal bits", "within rounding", "different"

/// Bounds on the relative L2 error (norm of the difference over norm of B), by class of tensor:
/// activations, logits, token-losses, gradients, vectors (1-D gradients of iteration 1), parameters, updates (fp32
/// weights and changes, relative to the change since the start where that is known), moments.
struct Bounds {
  std::map<std::string, double> by_class;
  double epsilon = 0;  ///< spacing of the values computed with, relative to the largest: an isolated error far above it
                       ///< is no rounding

  /// "bf16", "fp32" or "exact". Throws ConfigError for another name.
  [[nodiscard]] static Bounds preset(const std::string& name);
};

struct CompareOptions {
  std::string preset;                           ///< empty: by the types found
  std::map<std::string, double> tolerances;     ///< class, or kind such as main_grad, to bound
  std::vector<std::int64_t> iterations;         ///< empty: all in common
  std::vector<std::string> kinds;               ///< empty: all, e.g. logits, main_grad, exp_avg
  std::string initial_path;                     ///< weights before the first step
  std::optional<std::int64_t> final_iteration;  ///< what "final" means in a plain file without iterations
};

/// One pair of tensors.
struct TensorRow {
  TensorKey key;
  std::string dtype;
  std::vector<std::int64_t> shape;
  Match match = Match::kEqual;
  std::int64_t elements = 0, differing = 0;
  double max_ulps = 0,
         mean_ulps = 0;  ///< in units of the last place (of the coarser dtype, at the larger of both values)
  double max_error = 0;  ///< absolute
  double relative_l2 = 0;
  double bound = 0;
  bool relative_to_update = false;
  std::vector<std::int64_t> first_at, worst_at;  ///< coordinates
  double first_a = 0, first_b = 0, worst_a = 0, worst_b = 0;
  std::string remark;
};

struct CompareReport {
  std::string a, b, a_description, b_description, preset;
  std::vector<TensorRow> rows;                         ///< in the order of the step
  std::map<std::string, std::int64_t> only_a, only_b;  ///< kind -> number of tensors that the other side lacks
  std::vector<std::string> notes;

  [[nodiscard]] const TensorRow* first_difference() const;  ///< first row whose bits differ, or null
  [[nodiscard]] const TensorRow* first_beyond() const;      ///< first row that is "different", or null
  [[nodiscard]] Match match() const;
};

/// Compares what two runs wrote. Throws DataError when nothing can be compared.
[[nodiscard]] CompareReport compare_tensors(const std::string& a, const std::string& b, const CompareOptions& options);
/// One pair, against `bound`; `start` (double, or undefined) makes the error relative to what changed since then.
[[nodiscard]] TensorRow compare_pair(const TensorKey& key, const at::Tensor& a, const at::Tensor& b,
                                     const Bounds& bounds, double bound, const at::Tensor& start);

/// Table for people: a summary a phase, then every tensor that differs (all of them with `all`), then the verdict.
[[nodiscard]] std::string format_table(const CompareReport& report, bool all);
/// The whole report as JSON.
[[nodiscard]] std::string format_json(const CompareReport& report);
/// An SVG picture: relative error of each tensor along the step, with the bounds.
[[nodiscard]] std::string format_svg(const CompareReport& report);

}  // namespace pgpt::training

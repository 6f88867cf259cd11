#include "pgpt/training/compare.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "pgpt/base/error.h"

namespace pgpt::training {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// An isolated error: this few elements differ, by more than this many spacings of the tensor's largest value.
constexpr std::int64_t kIsolatedElements = 4;
constexpr std::int64_t kIsolatedAmong = 64;
constexpr double kIsolatedSpacings = 16;

std::string class_of(const TensorKey& key, std::int64_t dims) {
  if (key.kind == "tokens" || key.kind == "labels" || key.kind == "loss_mask") return "inputs";
  if (key.kind == "logits") return "logits";
  if (key.kind == "token_losses") return "token-losses";
  if (key.kind == "activation") return key.phase == Phase::kBackward ? "gradients" : "activations";
  if (key.kind == "grad" || key.kind == "main_grad" || key.kind == "clipped_main_grad") {
    return key.iteration == 1 && dims == 1 ? "vectors" : "gradients";
  }
  if (key.kind == "param") return "parameters";
  if (key.kind == "fp32_param" || key.kind == "delta") return "updates";
  return "moments";
}

/// Significant bits of a float type, the hidden one included.
int digits(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 8 : dtype == at::kHalf ? 11 : dtype == at::kFloat ? 24 : 53;
}

/// Spacing of a type's values at this magnitude (that of its smallest normal number below it).
double spacing(double magnitude, at::ScalarType dtype) {
  const int smallest = dtype == at::kHalf ? -14 : dtype == at::kDouble ? -1022 : -126;
  const int exponent = magnitude > 0 ? std::max(std::ilogb(magnitude), smallest) : smallest;
  return std::ldexp(1.0, exponent - digits(dtype) + 1);
}

/// The type with the wider spacing.
at::ScalarType coarser(at::ScalarType a, at::ScalarType b) { return digits(a) <= digits(b) ? a : b; }

std::vector<std::int64_t> coordinates(std::int64_t index, const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> result(shape.size());
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    result[dim] = index % shape[dim];
    index /= shape[dim];
  }
  return result;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() &&
         std::memcmp(a.data_ptr(), b.data_ptr(), static_cast<std::size_t>(a.nbytes())) == 0;
}

/// Vocabularies are padded to multiples that depend on the layout: compares the rows or columns that both have.
bool cut_to_common_vocabulary(const TensorKey& key, at::Tensor& a, at::Tensor& b) {
  const bool table =
      key.name.find("word_embeddings") != std::string::npos || key.name.find("output_layer") != std::string::npos;
  if (!table && key.kind != "logits") return false;
  const std::int64_t dim = table ? 0 : a.dim() - 1;
  if (a.dim() != b.dim() || a.dim() == 0 || a.numel() == 0) return false;
  const std::int64_t common = std::min(a.size(dim), b.size(dim));
  const at::Tensor x = a.narrow(dim, 0, common), y = b.narrow(dim, 0, common);
  if (x.sizes() != y.sizes()) return false;
  a = x.contiguous();
  b = y.contiguous();
  return true;
}

}  // namespace

const char* match_name(Match match) {
  switch (match) {
    case Match::kEqual:
      return "equal bits";
    case Match::kWithin:
      return "within rounding";
    case Match::kDifferent:
      return "different";
  }
  return "?";
}

Bounds Bounds::preset(const std::string& name) {
  Bounds bounds;
  if (name == "bf16") {
    // The spread of correct bf16 implementations of the seed run; parameters: one bf16 rounding (2^-8) of every
    // element.
    bounds.by_class = {{"inputs", 0},          {"activations", 1e-2}, {"logits", 1e-2},
                       {"token-losses", 1e-2}, {"gradients", 3e-2},   {"vectors", 2e-1},
                       {"parameters", 4e-3},   {"updates", 1e-1},     {"moments", 5e-2}};
    bounds.epsilon = 0x1p-8;
  } else if (name == "fp32") {
    // Another order of summation: about sqrt(terms) * 2^-24 a sum, a few hundred terms, and a few layers that pass it
    // on. Adam's first steps divide each gradient by its own size, so that noise of gradients near zero reaches their
    // weights' change undiminished.
    bounds.by_class = {{"inputs", 0},          {"activations", 1e-5}, {"logits", 1e-5},
                       {"token-losses", 1e-5}, {"gradients", 1e-4},   {"vectors", 1e-3},
                       {"parameters", 1e-4},   {"updates", 1e-2},     {"moments", 2e-4}};
    bounds.epsilon = 0x1p-24;
  } else {
    PGPT_CHECK(ConfigError, name == "exact", "--preset ", name, ": choose bf16, fp32 or exact");
    for (const char* kind : {"inputs", "activations", "logits", "token-losses", "gradients", "vectors", "parameters",
                             "updates", "moments"}) {
      bounds.by_class[kind] = 0;
    }
  }
  return bounds;
}

const TensorRow* CompareReport::first_difference() const {
  const auto it =
      std::find_if(rows.begin(), rows.end(), [](const TensorRow& row) { return row.match != Match::kEqual; });
  return it == rows.end() ? nullptr : &*it;
}

const TensorRow* CompareReport::first_beyond() const {
  const auto it =
      std::find_if(rows.begin(), rows.end(), [](const TensorRow& row) { return row.match == Match::kDifferent; });
  return it == rows.end() ? nullptr : &*it;
}

Match CompareReport::match() const {
  if (first_beyond() != nullptr) return Match::kDifferent;
  return first_difference() != nullptr ? Match::kWithin : Match::kEqual;
}

TensorRow compare_pair(const TensorKey& key, const at::Tensor& a_in, const at::Tensor& b_in, const Bounds& bounds,
                       double bound, const at::Tensor& start) {
  TensorRow row;
  row.key = key;
  row.bound = bound;
  at::Tensor a = a_in.contiguous();
  at::Tensor b = b_in.contiguous();
  if (a.sizes() != b.sizes() && cut_to_common_vocabulary(key, a, b))
    row.remark = "compared without rows that only one side pads";
  row.shape = a.sizes().vec();
  row.elements = a.numel();
  row.dtype = c10::toString(a.scalar_type());
  if (a.scalar_type() != b.scalar_type()) row.dtype += concat("/", c10::toString(b.scalar_type()));
  if (a.sizes() != b.sizes()) {
    row.match = Match::kDifferent;
    row.relative_l2 = kInfinity;
    std::string other = "shape differs: B has [";
    for (const std::int64_t size : b.sizes()) other += concat(size, " ");
    row.remark = other + "]";
    return row;
  }
  if (same_bits(a, b)) return row;

  const at::ScalarType dtype = coarser(a.scalar_type(), b.scalar_type());
  const bool floating = c10::isFloatingType(a.scalar_type()) && c10::isFloatingType(b.scalar_type());
  const at::Tensor wide_a = a.to(at::kDouble), wide_b = b.to(at::kDouble);
  const double* x = wide_a.const_data_ptr<double>();
  const double* y = wide_b.const_data_ptr<double>();
  double squares = 0, ulps = 0, largest = 0;
  std::int64_t first = -1, worst = -1;
  bool finite = true;
  for (std::int64_t i = 0; i < row.elements; ++i) {
    largest = std::max(largest, std::abs(y[i]));
    // Two zeros or two NaN of different bits count as different here, unless the types differ anyway.
    if (x[i] == y[i] && std::signbit(x[i]) == std::signbit(y[i])) continue;
    if (std::isnan(x[i]) && std::isnan(y[i])) continue;
    ++row.differing;
    if (first < 0) first = i;
    const double error = std::abs(x[i] - y[i]);
    if (!std::isfinite(error)) {
      if (finite) worst = i;
      finite = false;
      continue;
    }
    squares += error * error;
    if (finite && (worst < 0 || error > row.max_error)) worst = i;
    row.max_error = std::max(row.max_error, error);
    if (floating) {
      const double distance = error / spacing(std::max(std::abs(x[i]), std::abs(y[i])), dtype);
      row.max_ulps = std::max(row.max_ulps, distance);
      ulps += distance;
    }
  }
  if (first < 0) {  // only the type or the payload of NaN differs
    row.match = same_bits(a.to(dtype), b.to(dtype)) ? Match::kEqual : Match::kWithin;
    row.remark = "equal values in different types";
    return row;
  }
  row.mean_ulps = ulps / static_cast<double>(row.elements);
  row.first_at = coordinates(first, row.shape);
  row.worst_at = coordinates(worst, row.shape);
  row.first_a = x[first];
  row.first_b = y[first];
  row.worst_a = x[worst];
  row.worst_b = y[worst];
  at::Tensor reference = wide_b;
  if (start.defined() && start.sizes() == wide_b.sizes()) {
    reference = wide_b.sub(start);
    row.relative_to_update = true;
  }
  const double norm = reference.norm().item<double>();
  row.relative_l2 = !finite ? kInfinity : norm > 0 ? std::sqrt(squares) / norm : squares > 0 ? kInfinity : 0;
  row.match = floating && bound > 0 && row.relative_l2 <= bound ? Match::kWithin : Match::kDifferent;
  // A change of stored weights moves by whole places of the weights, which are large beside it.
  if (key.kind != "delta" && row.match == Match::kWithin && bounds.epsilon > 0 && row.differing <= kIsolatedElements &&
      row.elements >= kIsolatedAmong && row.max_error > kIsolatedSpacings * bounds.epsilon * largest) {
    row.match = Match::kDifferent;
    row.remark = concat("an isolated error: ", row.differing, " of ", row.elements,
                        " elements, too large for rounding although the tensor's norm hides it");
  }
  if (row.match == Match::kDifferent && bound == 0 && floating && row.remark.empty())
    row.remark = "bits were to be equal";
  return row;
}

namespace {

/// Matches samples by their tokens where the two runs dealt them out in another order.
void align_samples(const TensorSource& a, TensorSource& b, std::vector<std::string>& notes) {
  std::map<std::int64_t, std::map<std::int64_t, TensorKey>> tokens_a, tokens_b;
  for (const TensorKey& key : a.keys()) {
    if (key.kind == "tokens") tokens_a[key.iteration][key.sample] = key;
  }
  for (const TensorKey& key : b.keys()) {
    if (key.kind == "tokens") tokens_b[key.iteration][key.sample] = key;
    if (key.samples > 1) return;  // gradients of several samples cannot be dealt out anew
  }
  for (const auto& [iteration, samples_a] : tokens_a) {
    const auto it = tokens_b.find(iteration);
    if (it == tokens_b.end() || it->second.size() != samples_a.size()) continue;
    std::map<std::int64_t, std::int64_t> order;
    std::set<std::int64_t> taken;
    bool moved = false;
    for (const auto& [sample_b, key_b] : it->second) {
      const at::Tensor wanted = b.read(key_b).tensor;
      const auto equal = [&](std::int64_t s) {
        const auto found = samples_a.find(s);
        return found != samples_a.end() && taken.count(s) == 0 && a.read(found->second).tensor.equal(wanted);
      };
      std::int64_t match = equal(sample_b) ? sample_b : -1;
      for (auto s = samples_a.begin(); match < 0 && s != samples_a.end(); ++s) {
        if (equal(s->first)) match = s->first;
      }
      if (match < 0) break;
      taken.insert(match);
      order[sample_b] = match;
      moved = moved || match != sample_b;
    }
    if (!moved || order.size() != samples_a.size()) continue;
    b.renumber_samples(iteration, order);
    notes.push_back(concat("iteration ", iteration,
                           ": both runs read the same samples in another order; they are matched by their tokens"));
  }
}

bool chosen(const TensorKey& key, const CompareOptions& options) {
  const auto has = [](const auto& list, const auto& value) {
    return std::find(list.begin(), list.end(), value) != list.end();
  };
  return (options.iterations.empty() || has(options.iterations, key.iteration)) &&
         (options.kinds.empty() || has(options.kinds, key.kind));
}

}  // namespace

CompareReport compare_tensors(const std::string& path_a, const std::string& path_b, const CompareOptions& options) {
  TensorSource a(path_a, options.final_iteration);
  TensorSource b(path_b, options.final_iteration);
  CompareReport report;
  report.a = path_a;
  report.b = path_b;
  report.a_description = a.description();
  report.b_description = b.description();
  report.preset = !options.preset.empty() ? options.preset : a.low_precision() || b.low_precision() ? "bf16" : "fp32";
  Bounds bounds = Bounds::preset(report.preset);
  if (a.single_iteration() && b.single_iteration() && *a.single_iteration() != *b.single_iteration()) {
    report.notes.push_back(
        concat("A is iteration ", *a.single_iteration(), ", B is iteration ", *b.single_iteration()));
    b.renumber_iteration(*a.single_iteration());
  }
  align_samples(a, b, report.notes);

  std::optional<TensorSource> initial;
  if (!options.initial_path.empty()) initial.emplace(options.initial_path, std::nullopt);
  const auto start_of = [&](const std::string& name) {
    at::Tensor start;
    if (initial) start = initial->initial(name);
    if (!start.defined()) start = b.initial(name);
    return start.defined() ? start : a.initial(name);
  };
  for (const TensorKey& key : a.keys()) {
    if (!chosen(key, options)) continue;
    if (!b.contains(key)) {
      if (key.kind != "clipped_main_grad") ++report.only_a[key.kind];
      continue;
    }
    // Clipped gradients follow from the others when both sides have those.
    if (key.kind == "clipped_main_grad" && a.contains(make_key(key.iteration, "main_grad", key.name)) &&
        b.contains(make_key(key.iteration, "main_grad", key.name))) {
      continue;
    }
    Assembled left = a.read(key);
    Assembled right = b.read(key);
    if (left.scale != right.scale) {
      // The ratio alone: exact for powers of two, one rounding otherwise.
      left.tensor = left.tensor.to(at::kDouble).mul(left.scale / right.scale).to(left.tensor.scalar_type());
    }
    const std::string kind_class = class_of(key, left.tensor.dim());
    const auto bound_of = [&](const std::string& name) {
      if (const auto given = options.tolerances.find(key.kind); given != options.tolerances.end()) return given->second;
      const auto given = options.tolerances.find(name);
      return given != options.tolerances.end() ? given->second : bounds.by_class.at(name);
    };
    // Weights have changed little since the start, so their error is measured against that change where it is known and
    // not zero.
    const bool weights = key.kind == "fp32_param" || key.kind == "param";
    TensorRow row =
        compare_pair(key, left.tensor, right.tensor, bounds, bound_of(weights ? "parameters" : kind_class), {});
    if (weights && row.match != Match::kEqual && (key.kind == "fp32_param" || row.match == Match::kDifferent)) {
      const at::Tensor start = start_of(key.name);
      if (start.defined()) {
        TensorRow update = compare_pair(key, left.tensor, right.tensor, bounds, bound_of("updates"), start);
        if (std::isfinite(update.relative_l2)) row = std::move(update);
      }
    }
    for (const auto& [side, conflict] : {std::pair{"A", left.conflict}, std::pair{"B", right.conflict}}) {
      if (conflict.empty()) continue;
      row.match = Match::kDifferent;
      row.remark = concat("inside ", side, " ", conflict);
    }
    if (row.match != Match::kEqual && !row.first_at.empty() && row.remark.empty()) {
      const std::optional<int> rank_a = a.owner(key, row.first_at), rank_b = b.owner(key, row.first_at);
      if (rank_a || rank_b) {
        row.remark = concat("first element on", rank_a ? concat(" rank ", *rank_a, " of A") : std::string(),
                            rank_a && rank_b ? "," : "", rank_b ? concat(" rank ", *rank_b, " of B") : std::string());
      }
    }
    report.rows.push_back(std::move(row));
  }
  for (const TensorKey& key : b.keys()) {
    if (chosen(key, options) && !a.contains(key) && key.kind != "clipped_main_grad") ++report.only_b[key.kind];
  }
  PGPT_CHECK(
      DataError, !report.rows.empty(), path_a, " and ", path_b, " have no tensor in common",
      options.iterations.empty() && options.kinds.empty() ? "" : " among those chosen with --iterations and --kinds");
  for (const TensorSource* source : {&a, &b})
    report.notes.insert(report.notes.end(), source->notes().begin(), source->notes().end());
  return report;
}

}  // namespace pgpt::training

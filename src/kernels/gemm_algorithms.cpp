// Choices of matrix product algorithms and their file.

#include "pgpt/kernels/gemm_algorithms.h"

#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>

#include "pgpt/base/error.h"

namespace pgpt::kernels {
namespace {

using nlohmann::ordered_json;

constexpr auto kFormat = "pretrain_gpt matrix product algorithms, version 1";
constexpr std::size_t kHexDigits = 16;  // of one word

const char* type_name(GemmType type) {
  switch (type) {
    case GemmType::kBFloat16:
      return "bf16";
    case GemmType::kFloat16:
      return "fp16";
    case GemmType::kFloat32:
      return "fp32";
  }
  return "";
}

GemmType type_of(const std::string& name) {
  for (const GemmType type : {GemmType::kBFloat16, GemmType::kFloat16, GemmType::kFloat32}) {
    if (name == type_name(type)) return type;
  }
  throw DataError("unknown type " + name);
}

std::string hex(const std::array<std::uint64_t, 8>& words) {
  std::string text;
  for (const std::uint64_t word : words) {
    char digits[kHexDigits + 1];
    std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(word));
    text += digits;
  }
  return text;
}

std::array<std::uint64_t, 8> words_of(const std::string& text) {
  std::array<std::uint64_t, 8> words{};
  PGPT_CHECK(DataError, text.size() == kHexDigits * words.size(), "\"words\" has ", text.size(), " digits");
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] = std::strtoull(text.substr(kHexDigits * i, kHexDigits).c_str(), nullptr, 16);
  }
  return words;
}

/// Every value of a file's entry in its order; `visit` is called with its name and the member.
template <class Shape, class Algorithm, class Visit>
void for_each_value(Shape& s, Algorithm& a, const Visit& visit) {
  visit("rows", s.rows);
  visit("columns", s.columns);
  visit("inner", s.inner);
  visit("transpose_a", s.transpose_a);
  visit("transpose_b", s.transpose_b);
  visit("input", s.input);
  visit("output", s.output);
  visit("bias", s.bias);
  visit("accumulate", s.accumulate);
  visit("alignment", s.alignment);
  visit("id", a.id);
  visit("tile", a.tile);
  visit("stages", a.stages);
  visit("split_k", a.split_k);
  visit("reduction_scheme", a.reduction_scheme);
  visit("swizzle", a.swizzle);
  visit("custom_option", a.custom_option);
  visit("inner_shape", a.inner_shape);
  visit("cluster_shape", a.cluster_shape);
  visit("workspace", a.workspace);
  visit("words", a.words);
  visit("microseconds", a.microseconds);
  visit("heuristic_microseconds", a.heuristic_microseconds);
}

ordered_json to_object(const GemmShape& s, const GemmAlgorithm& a) {
  ordered_json object;
  for_each_value(s, a, [&](const char* name, const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, GemmType>) {
      object[name] = type_name(value);
    } else if constexpr (std::is_same_v<Value, decltype(a.words)>) {
      object[name] = hex(value);
    } else {
      object[name] = value;
    }
  });
  return object;
}

std::pair<GemmShape, GemmAlgorithm> from_object(const ordered_json& object) {
  GemmShape s;
  GemmAlgorithm a;
  for_each_value(s, a, [&](const char* name, auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, GemmType>) {
      value = type_of(object.at(name).get<std::string>());
    } else if constexpr (std::is_same_v<Value, decltype(a.words)>) {
      value = words_of(object.at(name).get<std::string>());
    } else {
      object.at(name).get_to(value);
    }
  });
  PGPT_CHECK(DataError, s.rows > 0 && s.columns > 0 && s.inner > 0, "a size is not positive");
  PGPT_CHECK(DataError, s.alignment == 16 || s.alignment == 128, "\"alignment\" is ", s.alignment);
  PGPT_CHECK(DataError, s.input != GemmType::kFloat32, "\"input\" is fp32");
  PGPT_CHECK(DataError, s.output == s.input || s.output == GemmType::kFloat32, "\"output\" does not fit \"input\"");
  // The text written for these values must be the text read: catches unknown names and values that were converted.
  PGPT_CHECK(DataError, to_object(s, a) == object, "it has values or names that this program does not write");
  return {s, a};
}

}  // namespace

std::string describe(const GemmShape& s) {
  const auto matrix = [](std::int64_t rows, std::int64_t columns, bool transposed) {
    return transposed ? concat("[", columns, ",", rows, "]^T") : concat("[", rows, ",", columns, "]");
  };
  return concat(matrix(s.rows, s.columns, false), s.accumulate ? " += " : " = ", matrix(s.rows, s.inner, s.transpose_a),
                " * ", matrix(s.inner, s.columns, s.transpose_b), s.bias ? " + bias" : "", ", ", type_name(s.input),
                " to ", type_name(s.output), s.alignment == 128 ? "" : concat(", ", s.alignment, "-byte addresses"));
}

void GemmAlgorithms::tune(bool chooser, Agree agree, double sample_ms) {
  PGPT_ASSERT(sample_ms > 0, "timing for ", sample_ms, " ms");
  sample_ms_ = sample_ms;
  tunes_ = true;
  chooser_ = chooser;
  agree_ = std::move(agree);
}

const GemmAlgorithm* GemmAlgorithms::find(const GemmShape& shape) const {
  const auto found = choices_.find(shape);
  return found == choices_.end() ? nullptr : &found->second.algorithm;
}

const GemmAlgorithm& GemmAlgorithms::add(const GemmShape& shape, const GemmAlgorithm& algorithm, bool keep) {
  const auto [place, inserted] = choices_.emplace(shape, Choice{algorithm, keep});
  PGPT_ASSERT(inserted, "two choices for ", describe(shape));
  grown_ = grown_ || keep;
  return place->second.algorithm;
}

const GemmAlgorithm& GemmAlgorithms::add_agreed(const GemmShape& shape, const GemmAlgorithm& mine) {
  if (!agree_) return add(shape, mine, true);
  const auto [agreed, algorithm] = from_object(ordered_json::parse(agree_(to_object(shape, mine).dump())));
  PGPT_CHECK(CommError, agreed == shape, "--gemm-algorithms: this rank computes ", describe(shape),
             " while rank 0 computes ", describe(agreed), "; tune with one rank and use its file");
  return add(shape, algorithm, true);
}

std::map<GemmShape, GemmAlgorithm> GemmAlgorithms::kept() const {
  std::map<GemmShape, GemmAlgorithm> result;
  for (const auto& [shape, choice] : choices_) {
    if (choice.kept) result.emplace(shape, choice.algorithm);
  }
  return result;
}

std::string GemmAlgorithms::to_json(const GemmLibrary& library) const {
  // One line a product.
  std::string text =
      concat("{\n\"format\": ", ordered_json(kFormat).dump(), ",\n\"device\": ", ordered_json(library.device).dump(),
             ",\n\"cublaslt_version\": ", library.version, ",\n\"products\": [");
  const char* separator = "\n";
  for (const auto& [shape, algorithm] : kept()) {
    text += separator + to_object(shape, algorithm).dump();
    separator = ",\n";
  }
  return text + "\n]\n}\n";
}

void GemmAlgorithms::read(const std::string& text, const std::string& file, const GemmLibrary& library) {
  const std::string remedy = "; delete it, or name another file with --gemm-algorithms";
  try {
    const ordered_json object = ordered_json::parse(text);
    PGPT_CHECK(DataError, object.at("format").get<std::string>() == kFormat, "its format is ",
               object.at("format").dump());
    const GemmLibrary found{object.at("device").get<std::string>(), object.at("cublaslt_version").get<std::int64_t>()};
    PGPT_CHECK(DataError, found == library, "it holds choices for ", found.device, " and cuBLASLt ", found.version,
               ", but this is ", library.device, " with cuBLASLt ", library.version);
    for (const ordered_json& product : object.at("products")) {
      const auto [shape, algorithm] = from_object(product);
      PGPT_CHECK(DataError, choices_.emplace(shape, Choice{algorithm, true}).second, "it has two entries for ",
                 describe(shape));
    }
  } catch (const nlohmann::json::exception& error) {
    throw DataError(concat("--gemm-algorithms ", file, ": ", error.what(), remedy));
  } catch (const DataError& error) {
    throw DataError(concat("--gemm-algorithms ", file, ": ", error.what(), remedy));
  }
}

}  // namespace pgpt::kernels

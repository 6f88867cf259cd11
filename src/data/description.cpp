#include "pgpt/data/description.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string_view>

namespace pgpt::data {
namespace {

using ordered_json = nlohmann::ordered_json;

/// JSON as Python's json.dumps(indent=4) prints it; `indent` is the depth in blanks of the current line.
void print(const ordered_json& value, std::size_t indent, std::string& out) {
  if (value.is_number_float()) {
    out += python_float(value.get<double>());
  } else if ((value.is_object() || value.is_array()) && !value.empty()) {
    out += value.is_object() ? "{" : "[";
    bool first = true;
    for (const auto& [key, item] : value.items()) {
      out += (first ? "\n" : ",\n") + std::string(indent + 4, ' ');
      if (value.is_object())
        out += ordered_json(key).dump(-1, ' ', true, ordered_json::error_handler_t::replace) + ": ";
      print(item, indent + 4, out);
      first = false;
    }
    out += "\n" + std::string(indent, ' ') + (value.is_object() ? "}" : "]");
  } else {
    out += value.dump(-1, ' ', true, ordered_json::error_handler_t::replace);
  }
}

template <class T>
ordered_json or_null(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

}  // namespace

std::string python_float(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  std::array<char, 64> buffer{};
  const auto written =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::scientific);
  const std::string_view text(buffer.data(), static_cast<std::size_t>(written.ptr - buffer.data()));
  const auto e = text.find('e');
  const int exponent = std::atoi(std::string(text.substr(e + 1)).c_str());
  if (exponent >= -4 && exponent < 16) {
    const auto fixed = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::fixed);
    std::string result(buffer.data(), fixed.ptr);
    return result.find('.') == std::string::npos ? result + ".0" : result;
  }
  // Both sides write at least two exponent digits.
  return std::string(text);
}

std::string DatasetDescription::text() const {
  ordered_json json;
  json["class"] = class_name;
  json["dataset_path"] = or_null(path);
  json["num_samples"] = or_null(num_samples);
  json["index_split"] = name_of(split);
  json["random_seed"] = seed;
  json["sequence_length"] = seq_length;
  json["split"] = or_null(split_string);
  ordered_json bounds;  // null
  if (matrix) {
    bool first = true;
    for (const auto& row : *matrix) {
      if (!row) {
        bounds.push_back(nullptr);
      } else if (first) {
        bounds.push_back(ordered_json::array({0, row->second}));  // Python starts its running sum with the integer 0
      } else {
        bounds.push_back(ordered_json::array({row->first, row->second}));
      }
      first = false;
    }
  }
  json["split_matrix"] = bounds;
  ordered_json entries = ordered_json::object();
  for (const auto& [name, value] : tokenizer) entries[name] = or_null(value);
  json["tokenizer"] = entries;
  std::string out;
  print(json, 0, out);
  return out;
}

std::string blend_description(std::span<const std::string> parts, Split split, std::span<const double> weights,
                              bool integer_weights, std::optional<std::int64_t> size) {
  const auto indented = [](const std::string& text) {
    std::string out;
    for (const char c : text) {
      out += c;
      if (c == '\n') out += "        ";
    }
    return out;
  };
  std::string out = "{\n    \"class\": \"BlendedDataset\",\n    \"datasets\": [";
  for (std::size_t i = 0; i < parts.size(); ++i) out += (i == 0 ? "\n        " : ",\n        ") + indented(parts[i]);
  out += std::string("\n    ],\n    \"split\": \"") + name_of(split) + "\",\n    \"weights\": [";
  for (std::size_t i = 0; i < weights.size(); ++i) {
    out += i == 0 ? "\n        " : ",\n        ";
    out += integer_weights ? std::to_string(static_cast<std::int64_t>(weights[i])) : python_float(weights[i]);
  }
  out += "\n    ],\n    \"size\": " + (size ? std::to_string(*size) : std::string("null")) + "\n}";
  return out;
}

}  // namespace pgpt::data

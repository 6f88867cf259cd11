// --config and --print-config: a flat JSON object from option names to typed values.
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "pgpt/base/error.h"
#include "values.h"

namespace pgpt::config {

namespace {

using Json = nlohmann::ordered_json;

struct Target {
  const Option* option = nullptr;
  bool by_name = false;  ///< the key is an option's spelling, not a destination
};

Target find_key(const std::string& key) {
  std::string dashes = key;
  std::replace(dashes.begin(), dashes.end(), '_', '-');
  std::string underscores = key;
  std::replace(underscores.begin(), underscores.end(), '-', '_');
  if (const Option* option = find_destination(underscores); option != nullptr && !option->is_family()) {
    return {option, false};
  }
  const Option* option = find_option("--" + dashes);
  if (option != nullptr && option->is_family()) option = nullptr;
  return {option, true};
}

const char* expected(const Option& option) {
  switch (option.type) {
    case OptionType::kSwitch:
      return "true or false";
    case OptionType::kInteger:
      return option.is_list() ? "a list of integers" : "an integer";
    case OptionType::kReal:
      return option.is_list() ? "a list of numbers" : "a number";
    case OptionType::kPattern:
      return "an integer, a list of integers or a list expression";
    default:
      return option.is_list() ? "a list of strings" : "a string";
  }
}

std::string token_of(const Option& option, const Json& json, const std::string& where) {
  const bool textual = option.type == OptionType::kText || option.type == OptionType::kChoice;
  const bool fits = (json.is_string() && (textual || option.type == OptionType::kPattern)) ||
                    (json.is_number_integer() && option.type != OptionType::kText) ||
                    (json.is_number() && option.type == OptionType::kReal) ||
                    // JSON has no words for infinities and NaN.
                    (json.is_string() && option.type == OptionType::kReal);
  PGPT_CHECK(ConfigError, fits, where, " takes ", expected(option), ", not ", json.dump());
  return json.is_string() ? json.get<std::string>() : json.dump();
}

Value value_of(const Target& target, const Json& json, const std::string& where) {
  const Option& option = *target.option;
  if (option.type == OptionType::kSwitch) {
    PGPT_CHECK(ConfigError, json.is_boolean(), where, " takes true or false, not ", json.dump());
    // "disable_bias_linear": true is the switch; "add_bias_linear": true is what it stores.
    const bool given = json.get<bool>();
    return target.by_name ? given == option.switch_value : given;
  }
  std::vector<std::string> tokens;
  if (option.type == OptionType::kPattern && json.is_array()) {
    for (const Json& item : json) {
      PGPT_CHECK(ConfigError, item.is_number_integer(), where, " takes ", expected(option), ", not ", json.dump());
    }
    tokens = {json.dump()};
  } else if (json.is_array()) {
    PGPT_CHECK(ConfigError, option.is_list(), where, " takes ", expected(option), ", not ", json.dump());
    for (const Json& item : json) tokens.push_back(token_of(option, item, where));
  } else {
    PGPT_CHECK(ConfigError, !option.is_list(), where, " takes ", expected(option), ", not ", json.dump());
    tokens = {token_of(option, json, where)};
  }
  try {
    return convert_value(option, where, tokens);
  } catch (const ConfigError& error) {
    // The usage line belongs to the command line.
    const std::string text = error.what();
    const std::size_t at = text.rfind("error: ");
    throw ConfigError(at == std::string::npos ? text : text.substr(at + 7));
  }
}

struct Writer {
  static Json real(double value) {
    if (std::isfinite(value)) return value;
    return std::isnan(value) ? "nan" : value < 0 ? "-inf" : "inf";
  }
  Json operator()(std::monostate) const { return nullptr; }
  Json operator()(double value) const { return real(value); }
  Json operator()(const std::vector<double>& values) const {
    Json list = Json::array();
    for (const double value : values) list.push_back(real(value));
    return list;
  }
  template <class T>
  Json operator()(const T& value) const {
    return value;
  }
};

}  // namespace

void read_json_text(const std::string& text, const std::string& origin, Values& values) {
  std::set<std::string> keys;
  const Json::parser_callback_t refuse_repeated = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth == 1 && event == Json::parse_event_t::key) {
      const auto key = parsed.get<std::string>();
      PGPT_CHECK(ConfigError, keys.insert(key).second, origin, ": \"", key, "\" stands twice");
    }
    return true;
  };
  Json document;
  try {
    document = Json::parse(text, refuse_repeated);
  } catch (const Json::exception& error) {
    throw ConfigError(concat("--config ", origin, " is not valid JSON: ", error.what()));
  }
  PGPT_CHECK(ConfigError, document.is_object(), "--config ", origin,
             " must hold one JSON object of option names and values");
  std::set<std::string> destinations;
  for (const auto& [key, json] : document.items()) {
    const std::string where = concat(origin, ": \"", key, "\"");
    const Target target = find_key(key);
    if (target.option == nullptr) {
      std::string dashed = "--" + key;
      std::replace(dashed.begin(), dashed.end(), '_', '-');
      const std::string near = nearest_option(dashed);
      throw ConfigError(
          concat(where, " is no option", near.empty() ? "" : "; did you mean \"" + near.substr(2) + "\"?"));
    }
    PGPT_CHECK(ConfigError, !target.option->action, where, " belongs on the command line, not in a file");
    PGPT_CHECK(ConfigError, destinations.insert(target.option->destination).second, where, " sets ",
               target.option->destination, ", which another key of the file sets too");
    if (json.is_null()) continue;
    values.give(target.option->destination, value_of(target, json, where));
  }
}

void read_json_config(const std::string& path, Values& values) {
  std::ifstream file(path);
  PGPT_CHECK(ConfigError, file.good(), "--config ", path, " cannot be read; check path and permissions");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  PGPT_CHECK(ConfigError, !file.bad(), "--config ", path, " cannot be read; it must be a JSON file");
  read_json_text(text, path, values);
}

std::string write_json_config(const Values& values) {
  Json document = Json::object();
  for (const Option& option : option_table()) {
    const bool documented = option.status == Status::kWorks || values.given(option.destination);
    if (option.is_family() || option.action || option.hidden || !documented) continue;
    if (!values.is_set(option.destination) || document.contains(option.destination)) continue;
    document[option.destination] = std::visit(Writer{}, values.at(option.destination));
  }
  return document.dump(2) + "\n";
}

}  // namespace pgpt::config

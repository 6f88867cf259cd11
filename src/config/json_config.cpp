// --config and --print-config: a flat JSON object from option names to typed values.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "pgpt/base/error.h"
#include "pgpt/base/spelling.h"
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

/// Keys that a file may have, written as `key` is: with dashes, or with underscores as --print-config does.
std::vector<std::string> known_keys(const std::string& key) {
  const bool dashes = key.find('-') != std::string::npos;
  std::vector<std::string> keys;
  std::set<std::string> seen;
  const auto add = [&](std::string name) {
    std::replace(name.begin(), name.end(), dashes ? '_' : '-', dashes ? '-' : '_');
    if (seen.insert(name).second) keys.push_back(std::move(name));
  };
  for (const std::string& name : listed_names()) add(name.substr(2));
  for (const Option& option : option_table()) {
    if (!option.hidden && !option.is_family()) add(option.destination);
  }
  return keys;
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

const char* quotes_advice(const Json& json, bool textual) {
  if (json.is_string()) return Json::accept(json.get<std::string>()) ? "; leave the quotes out" : "";
  return textual && json.is_primitive() ? "; put it in quotes" : "";
}

std::string token_of(const Option& option, const Json& json, const std::string& where) {
  const bool textual = option.type == OptionType::kText || option.type == OptionType::kChoice;
  const bool fits = (json.is_string() && (textual || option.type == OptionType::kPattern)) ||
                    (json.is_number_integer() && option.type != OptionType::kText) ||
                    (json.is_number() && option.type == OptionType::kReal) ||
                    // JSON has no words for infinities and NaN.
                    (json.is_string() && option.type == OptionType::kReal);
  PGPT_CHECK(ConfigError, fits, where, " takes ", expected(option), ", not ", json.dump(),
             quotes_advice(json, textual));
  return json.is_string() ? json.get<std::string>() : json.dump();
}

Value value_of(const Target& target, const Json& json, const std::string& where) {
  const Option& option = *target.option;
  if (option.type == OptionType::kSwitch) {
    PGPT_CHECK(ConfigError, json.is_boolean(), where, " takes true or false, not ", json.dump(),
               quotes_advice(json, false));
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
  return convert_value(option, where, tokens);
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
      PGPT_CHECK(ConfigError, keys.insert(key).second, "--config ", origin, ": \"", key,
                 "\" stands twice; remove one of the two");
    }
    return true;
  };
  Json document;
  try {
    document = Json::parse(text, refuse_repeated);
  } catch (const Json::exception& error) {
    PGPT_CHECK(ConfigError, text.find_first_not_of(" \t\r\n") != std::string::npos, "--config ", origin,
               " is empty; give a JSON object, {} for no options");
    // What the library puts before its reason, "[json.exception.parse_error.101] ", is for programmers.
    const std::string reason = error.what();
    const std::size_t bracket = reason.find("] ");
    throw ConfigError(concat("--config ", origin, " is not valid JSON: ",
                             bracket == std::string::npos ? reason : reason.substr(bracket + 2)));
  }
  PGPT_CHECK(ConfigError, document.is_object(), "--config ", origin,
             " must hold one JSON object of option names and values, e.g. {\"num_layers\": 12}");
  std::set<std::string> destinations;
  for (const auto& [key, json] : document.items()) {
    const std::string where = concat("--config ", origin, ": \"", key, "\"");
    const Target target = find_key(key);
    if (target.option == nullptr) {
      const std::string near = did_you_mean(key, known_keys(key));
      throw ConfigError(concat(where, " is no option", near.empty() ? "; pretrain_gpt --help lists them" : near));
    }
    PGPT_CHECK(ConfigError, !target.option->action, where, " belongs on the command line, not in a file");
    PGPT_CHECK(ConfigError, destinations.insert(target.option->destination).second, where, " sets ",
               target.option->destination, ", which another key of the file sets too");
    if (json.is_null()) continue;
    values.give(target.option->destination, value_of(target, json, where));
  }
}

void read_json_config(const std::string& path, Values& values) {
  read_json_text(read_option_file("--config", path), path, values);
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

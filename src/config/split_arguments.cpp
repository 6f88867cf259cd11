// The command line cut into options and their values, by the rules of Python's argparse.
#include <cctype>

#include "pgpt/base/error.h"
#include "values.h"

namespace pgpt::config {

namespace {

/// A word that can only be a value: it starts without a dash, is a number, or holds a blank.
bool is_value(const std::string& word) {
  if (word.size() < 2 || word.front() != '-') return true;
  if (word.find(' ') != std::string::npos) return true;
  const char second = word[1];
  const bool number = std::isdigit(static_cast<unsigned char>(second)) ||
                      (second == '.' && word.size() > 2 && std::isdigit(static_cast<unsigned char>(word[2])));
  return number || word == "-inf" || word == "-nan" || word == "-infinity";
}

std::size_t most_values(const Option& option) {
  if (option.type == OptionType::kSwitch) return 0;
  if (option.count == ValueCount::kOne) return 1;
  if (option.count == ValueCount::kExactly) return option.exact_count;
  return static_cast<std::size_t>(-1);
}

[[noreturn]] void throw_unknown(const std::string& name) {
  const std::string near = nearest_option(name);
  throw_usage_error(concat("unknown option ", name, near.empty() ? "" : "; did you mean " + near + "?"));
}

}  // namespace

std::vector<Occurrence> split_arguments(const std::vector<std::string>& arguments) {
  std::vector<Occurrence> result;
  for (std::size_t i = 0; i < arguments.size();) {
    const std::string& word = arguments[i++];
    if (is_value(word) || word == "--") {
      throw_usage_error(concat("unexpected word '", word, "'; every value follows the option that it belongs to"));
    }
    const std::size_t equals = word.find('=');
    Occurrence use;
    use.name = word.substr(0, equals);
    if (use.name == "-h") use.name = "--help";
    use.option = find_option(use.name);
    if (use.option == nullptr) throw_unknown(use.name);
    if (equals != std::string::npos) {
      use.tokens.push_back(word.substr(equals + 1));
    } else {
      const std::size_t limit = most_values(*use.option);
      while (use.tokens.size() < limit && i < arguments.size() && is_value(arguments[i])) {
        use.tokens.push_back(arguments[i++]);
      }
    }
    for (const std::string& token : use.tokens) {
      if (token.find('\x1f') != std::string::npos) {
        throw_usage_error(concat(use.name, " has a value with the control character 0x1f; remove it"));
      }
    }
    result.push_back(std::move(use));
  }
  return result;
}

}  // namespace pgpt::config

// The command line cut into options and their values, by the rules of Python's argparse.
#include <cctype>

#include "pgpt/base/error.h"
#include "pgpt/base/spelling.h"
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
  const std::string near = did_you_mean(name, listed_names());
  throw ConfigError(concat("unknown option ", name,
                           !near.empty()            ? near
                           : name.starts_with("--") ? "; pretrain_gpt --help lists all"
                                                    : "; options begin with two dashes, and a value that begins "
                                                      "with a dash is written --option=VALUE"));
}

/// A word where an option should stand, after those of `before`.
[[noreturn]] void throw_unexpected(const std::string& word, const std::vector<Occurrence>& before) {
  if (before.empty()) {
    throw ConfigError(concat("unexpected word '", word,
                             "' at the beginning; a command is made of options and their values, which pretrain_gpt "
                             "--help lists"));
  }
  const Occurrence& last = before.back();
  const std::size_t most = most_values(*last.option);
  std::string place = last.name;
  for (const std::string& token : last.tokens) place += " " + token;
  throw ConfigError(concat("unexpected word '", word, "' after ", place,
                           most == 0   ? ", which takes no value"
                           : most == 1 ? ", which takes one value"
                                       : "",
                           "; remove it, or put the option that it belongs to before it"));
}

}  // namespace

std::vector<Occurrence> split_arguments(const std::vector<std::string>& arguments) {
  std::vector<Occurrence> result;
  for (std::size_t i = 0; i < arguments.size();) {
    const std::string& word = arguments[i++];
    if (is_value(word) || word == "--") throw_unexpected(word, result);
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
      PGPT_CHECK(ConfigError, token.find_first_of("\x1f\n\r") == std::string::npos, use.name,
                 " has a value with a line end or the control character 0x1f; remove it");
    }
    result.push_back(std::move(use));
  }
  return result;
}

}  // namespace pgpt::config

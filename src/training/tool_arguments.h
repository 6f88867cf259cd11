#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pgpt/base/error.h"

namespace pgpt::training {

/// Words after a subcommand: switches, options with one value, options with several, and a fixed number of paths. As
/// in argparse, the last of several occurrences counts, and --name=value is --name value.
class ToolArguments {
 public:
  /// Throws ConfigError for unknown or missing words.
  ToolArguments(const std::string& command, const std::vector<std::string>& words,
                const std::set<std::string>& switches, const std::set<std::string>& options, std::size_t paths,
                const std::set<std::string>& lists = {})
      : command_(command) {
    const auto is_option = [](const std::string& word) { return word.rfind("--", 0) == 0; };
    for (std::size_t i = 0; i < words.size(); ++i) {
      const std::size_t equals = is_option(words[i]) ? words[i].find('=') : std::string::npos;
      const std::string word = words[i].substr(0, equals);
      const bool list = lists.count(word) != 0;
      if (switches.count(word) != 0) {
        PGPT_CHECK(ConfigError, equals == std::string::npos, command, ": ", word, " takes no value, found ", words[i]);
        given_.push_back({word, {}});
      } else if (list || options.count(word) != 0) {
        std::vector<std::string> values;
        if (equals != std::string::npos) {
          values.push_back(words[i].substr(equals + 1));
        } else {
          const auto more = [&] { return i + 1 < words.size() && !is_option(words[i + 1]); };
          PGPT_CHECK(ConfigError, more(), command, ": ", word, " needs a value");
          do values.push_back(words[++i]);
          while (list && more());
        }
        given_.emplace_back(word, std::move(values));
      } else {
        PGPT_CHECK(ConfigError, word.rfind("--", 0) != 0, command, ": unknown option ", word, "; see gpt_tool ",
                   command, " --help");
        paths_.push_back(word);
      }
    }
    PGPT_CHECK(ConfigError, paths_.size() == paths, command, ": takes ", paths, " path(s), found ", paths_.size(),
               "; see gpt_tool ", command, " --help");
  }

  [[nodiscard]] const std::string& positional(std::size_t index) const { return paths_.at(index); }
  [[nodiscard]] bool has(const std::string& name) const { return find(name) != nullptr; }
  /// The value of an option, if it was given.
  [[nodiscard]] std::optional<std::string> text(const std::string& name) const {
    const std::vector<std::string>* values = find(name);
    return values == nullptr ? std::nullopt : std::optional(values->at(0));
  }
  /// The values of an option that takes several, if it was given.
  [[nodiscard]] std::optional<std::vector<std::string>> list(const std::string& name) const {
    const std::vector<std::string>* values = find(name);
    return values == nullptr ? std::nullopt : std::optional(*values);
  }
  /// The value of an option, if it was given. Throws ConfigError unless it is a whole number.
  [[nodiscard]] std::optional<std::int64_t> integer(const std::string& name) const {
    const std::optional<std::string> value = text(name);
    if (!value) return std::nullopt;
    PGPT_CHECK(ConfigError,
               !value->empty() && value->size() < 16 && value->find_first_not_of("0123456789") == std::string::npos,
               command_, ": ", name, " takes a whole number, not '", *value, "'");
    return std::stoll(*value);
  }

 private:
  [[nodiscard]] const std::vector<std::string>* find(const std::string& name) const {
    for (auto given = given_.rbegin(); given != given_.rend(); ++given) {
      if (given->first == name) return &given->second;
    }
    return nullptr;
  }

  std::string command_;
  std::vector<std::pair<std::string, std::vector<std::string>>> given_;
  std::vector<std::string> paths_;
};

}  // namespace pgpt::training

#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pgpt/base/error.h"

namespace pgpt::training {

/// Words after a subcommand: switches, options with one value, and a fixed number of paths.
class ToolArguments {
 public:
  /// Throws ConfigError for unknown or missing words.
  ToolArguments(const std::string& command, const std::vector<std::string>& words,
                const std::set<std::string>& switches, const std::set<std::string>& options, std::size_t paths)
      : command_(command) {
    for (std::size_t i = 0; i < words.size(); ++i) {
      const std::string& word = words[i];
      if (switches.count(word) != 0) {
        given_.emplace_back(word, "");
      } else if (options.count(word) != 0) {
        PGPT_CHECK(ConfigError, i + 1 < words.size(), command, ": ", word, " needs a value");
        given_.emplace_back(word, words[++i]);
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
    const std::string* value = find(name);
    return value == nullptr ? std::nullopt : std::optional(*value);
  }
  /// The value of an option, if it was given. Throws ConfigError unless it is a whole number.
  [[nodiscard]] std::optional<std::int64_t> integer(const std::string& name) const {
    const std::string* value = find(name);
    if (value == nullptr) return std::nullopt;
    PGPT_CHECK(ConfigError,
               !value->empty() && value->size() < 16 && value->find_first_not_of("0123456789") == std::string::npos,
               command_, ": ", name, " takes a whole number, not '", *value, "'");
    return std::stoll(*value);
  }

 private:
  [[nodiscard]] const std::string* find(const std::string& name) const {
    for (const auto& [given, value] : given_) {
      if (given == name) return &value;
    }
    return nullptr;
  }

  std::string command_;
  std::vector<std::pair<std::string, std::string>> given_;
  std::vector<std::string> paths_;
};

}  // namespace pgpt::training

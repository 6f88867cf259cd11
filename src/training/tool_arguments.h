#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace pgpt::training {

/// Words after a subcommand: switches, options with one value, options with several, and a fixed number of paths. As
/// in argparse, the last of several occurrences counts, and --name=value is --name value.
class ToolArguments {
 public:
  /// Throws ConfigError for unknown or missing words.
  ToolArguments(const std::string& command, const std::vector<std::string>& words,
                const std::set<std::string>& switches, const std::set<std::string>& options, std::size_t paths,
                const std::set<std::string>& lists = {});

  [[nodiscard]] const std::string& positional(std::size_t index) const { return paths_.at(index); }
  [[nodiscard]] bool has(const std::string& name) const { return find(name) != nullptr; }
  /// The value of an option, if it was given.
  [[nodiscard]] std::optional<std::string> text(const std::string& name) const;
  /// The values of an option that takes several, if it was given.
  [[nodiscard]] std::optional<std::vector<std::string>> list(const std::string& name) const;
  /// The values of all occurrences of an option, in order.
  [[nodiscard]] std::vector<std::string> every(const std::string& name) const;
  /// The value of an option, if it was given. Throws ConfigError unless it is a whole number.
  [[nodiscard]] std::optional<std::int64_t> integer(const std::string& name) const;
  /// The values of all occurrences of an option. Throws ConfigError unless they are whole numbers.
  [[nodiscard]] std::vector<std::int64_t> every_integer(const std::string& name) const;
  /// Throws ConfigError naming all of these options that were not given.
  void require(std::initializer_list<const char*> names) const;

 private:
  [[nodiscard]] const std::vector<std::string>* find(const std::string& name) const;
  [[nodiscard]] std::int64_t whole_number(const std::string& name, const std::string& value) const;

  std::string command_;
  std::vector<std::pair<std::string, std::vector<std::string>>> given_;
  std::vector<std::string> paths_;
};

}  // namespace pgpt::training

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "pgpt/config/option_table.h"

namespace pgpt::config {

/// The value of every destination of the option table, and which were given. Asking for a destination that the table
/// lacks, or as another type, is a programming error (std::logic_error).
class Values {
 public:
  /// All defaults.
  Values();

  /// Stores a value from the command line or a file.
  void give(const std::string& destination, Value value);
  /// Stores a derived value; also adds names for the argument dump that no option has.
  void derive(const std::string& destination, Value value);

  [[nodiscard]] bool given(std::string_view destination) const { return given_.contains(destination); }
  [[nodiscard]] bool is_set(std::string_view destination) const;
  [[nodiscard]] const Value& at(std::string_view destination) const;
  [[nodiscard]] bool flag(std::string_view destination) const;  ///< None counts as false
  [[nodiscard]] std::int64_t integer(std::string_view destination) const;
  [[nodiscard]] double real(std::string_view destination) const;
  [[nodiscard]] std::string text(std::string_view destination) const;  ///< None is empty
  [[nodiscard]] std::vector<std::string> texts(std::string_view destination) const;
  [[nodiscard]] std::vector<std::int64_t> integers(std::string_view destination) const;
  [[nodiscard]] std::optional<std::int64_t> maybe_integer(std::string_view destination) const;
  [[nodiscard]] std::optional<double> maybe_real(std::string_view destination) const;
  [[nodiscard]] const std::map<std::string, Value, std::less<>>& all() const { return values_; }

 private:
  std::map<std::string, Value, std::less<>> values_;
  std::set<std::string, std::less<>> given_;
};

/// One use of an option on the command line.
struct Occurrence {
  const Option* option = nullptr;
  std::string name;                 ///< as written, without "=value"
  std::vector<std::string> tokens;  ///< its values
};

/// Splits the command line by the table, as argparse does. Throws ConfigError.
[[nodiscard]] std::vector<Occurrence> split_arguments(const std::vector<std::string>& arguments);

/// Passes each option once through cxxopts (one token for all of its values) and returns them with the values it read.
[[nodiscard]] std::vector<Occurrence> read_with_cxxopts(const std::vector<Occurrence>& occurrences);

/// The whole file that `option` names. Throws DataError when it cannot be read.
[[nodiscard]] std::string read_option_file(std::string_view option, const std::string& path);

/// Stores the options of a --config file in `values`. Throws ConfigError naming file and key, DataError for a file that
/// cannot be read.
void read_json_config(const std::string& path, Values& values);
/// The same from a text; `origin` is named in errors.
void read_json_text(const std::string& text, const std::string& origin, Values& values);
/// JSON that read_json_config turns into equal values.
[[nodiscard]] std::string write_json_config(const Values& values);

}  // namespace pgpt::config

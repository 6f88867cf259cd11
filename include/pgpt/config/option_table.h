#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace pgpt::config {

/// A parsed option value; monostate is "not set" (printed as None).
using Value = std::variant<std::monostate, bool, std::int64_t, double, std::string, std::vector<std::int64_t>,
                           std::vector<double>, std::vector<std::string>>;

enum class OptionType { kSwitch, kInteger, kReal, kText, kChoice, kPattern };
/// How many values an option takes. Switches take none.
enum class ValueCount { kOne, kOneOrMore, kAnyNumber, kExactly };
/// What happens when an option (or one of its choices) is used.
enum class Status {
  kWorks,     ///< it does what it says
  kNoEffect,  ///< accepted; warns once that it changes nothing here
  kRefused,   ///< stops the run when set to anything but its default
};

/// One permitted word of a choice option.
struct Choice {
  std::string name;
  Status status = Status::kWorks;
  std::string note;  ///< why it is refused or ignored, and what to do instead
};

/// When --use-checkpoint-args takes an option from the checkpoint.
enum class Taken {
  kNever,
  kIfUnset,        ///< where the command line leaves it out and it has no default
  kAlways,         ///< over whatever the command line says
  kWithTokenizer,  ///< the same, unless the tokenizer stays that of the command line
};

/// One row of the option table: everything that parsing, --help, the argument dump and docs/options.md need.
struct Option {
  std::vector<std::string>
      names;                ///< spellings with their dashes, the documented one first; one '*' makes a family of names
  std::string destination;  ///< name in the argument dump and in --config files; rows may share one
  OptionType type = OptionType::kText;
  ValueCount count = ValueCount::kOne;
  std::size_t exact_count = 1;              ///< number of values with ValueCount::kExactly
  bool switch_value = true;                 ///< what a switch stores
  std::optional<std::string> default_text;  ///< as on the command line (lists separated by blanks); unset = None
  std::string group;
  std::string help;
  Status status = Status::kWorks;
  std::string note;  ///< why it is refused or ignored, and what to do instead
  std::vector<Choice> choices;
  bool own = false;             ///< an option of this program that the reference does not have
  bool hidden = false;          ///< not listed by --help
  bool architecture = false;    ///< decides what stored tensors mean: a run that loads them must have the same
  bool imported = false;        ///< known of checkpoints that were converted from other programs' models
  Taken taken = Taken::kNever;  ///< from a checkpoint
  bool place = false;           ///< a file or folder, which may be another one on every rank
  bool action = false;  ///< selects what the program does; not part of the configuration (--help, --config, ...)

  [[nodiscard]] bool is_family() const { return names.front().find('*') != std::string::npos; }
  [[nodiscard]] bool is_list() const { return count != ValueCount::kOne; }
};

/// All rows in the order of the documentation.
[[nodiscard]] const std::vector<Option>& option_table();
/// The row that an option name (with its dashes) belongs to, families included; null when there is none.
[[nodiscard]] const Option* find_option(std::string_view name);
/// The first row with this destination; null when there is none.
[[nodiscard]] const Option* find_destination(std::string_view destination);
/// "--num-layers" for "num_layers": the documented spelling of the option that stores there, which there must be.
[[nodiscard]] std::string option_name(std::string_view destination);
/// The names that --help lists, those of refused options last: what a mistyped name may mean.
[[nodiscard]] std::vector<std::string> listed_names();

/// Converts one option's values strictly, as argparse does. Throws ConfigError that begins with `name`.
[[nodiscard]] Value convert_value(const Option& option, std::string_view name, const std::vector<std::string>& tokens);
/// The value an option has when it is not given.
[[nodiscard]] Value default_value(const Option& option);
/// A value as the argument dump prints it (None, True, 0.1, ['a', 'b'], ...).
[[nodiscard]] std::string print_value(const Value& value);

/// Evaluates an integer or a list expression of digits, comma, brackets, parentheses, + and *, e.g. "([1]*3+[0])*2".
/// A plain integer n gives {n}; `is_list` tells which form it was. Throws ConfigError naming `option`.
[[nodiscard]] std::vector<std::int64_t> evaluate_pattern(std::string_view option, std::string_view text, bool& is_list);

/// The values of an option as --help shows them, e.g. INT, FLOAT ..., a|b; empty for a switch.
[[nodiscard]] std::string placeholder(const Option& option);
/// --help: every documented option, grouped.
[[nodiscard]] std::string help_text();
/// docs/options.md, generated from the table.
[[nodiscard]] std::string help_markdown();

}  // namespace pgpt::config

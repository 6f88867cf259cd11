#include "pgpt/config/parse.h"

#include <algorithm>
#include <map>
#include <set>

#include "derive.h"
#include "pgpt/base/error.h"
#include "pgpt/config/estimate.h"
#include "rows.h"
#include "values.h"

namespace pgpt::config {

namespace {

constexpr auto kVersion = "0.1.0";

/// What the command line said before any check across options.
struct CommandLine {
  Values values;
  std::vector<const Option*> used_families;
  std::map<std::string, std::string> spellings;  ///< destination to the option name that set it
};

[[noreturn]] void refuse(const std::string& what, const std::string& note) {
  throw ConfigError(what + " is not supported: " + note);
}

/// Reads every occurrence, checks earlier ones too, and keeps the last for each destination.
CommandLine read_command_line(const std::vector<std::string>& arguments) {
  CommandLine line;
  std::map<std::string, Occurrence> last;
  std::string config_file;
  for (const Occurrence& use : split_arguments(arguments)) {
    if (use.option->is_family()) {
      if (use.option->status == Status::kRefused) refuse(use.name, use.option->note);
      line.used_families.push_back(use.option);
      continue;
    }
    (void)convert_value(*use.option, use.name, use.tokens);
    last.insert_or_assign(use.option->destination, use);
  }
  if (const auto file = last.find("config"); file != last.end()) {
    read_json_config(file->second.tokens.front(), line.values);
  }
  std::vector<Occurrence> kept;
  for (const auto& [destination, use] : last) kept.push_back(use);
  for (const Occurrence& use : read_with_cxxopts(kept)) {
    line.spellings[use.option->destination] = use.name;
    line.values.give(use.option->destination, convert_value(*use.option, use.name, use.tokens));
  }
  return line;
}

std::vector<std::string> words_of(const Value& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return {*text};
  if (const auto* list = std::get_if<std::vector<std::string>>(&value)) return *list;
  return {};
}

/// Applies the status column: refused options and choices stop, those without effect warn once.
std::vector<std::string> check_status(const CommandLine& line) {
  std::vector<std::string> warnings;
  std::set<std::string> warned;
  const auto warn = [&](const std::string& name, const std::string& note) {
    if (warned.insert(name).second) warnings.push_back(name + " has no effect: " + note);
  };
  std::set<std::string> checked;
  for (const Option& option : option_table()) {
    if (option.is_family() || !line.values.given(option.destination)) continue;
    if (!checked.insert(option.destination).second) continue;
    const Value& value = line.values.at(option.destination);
    const auto spelling = line.spellings.find(option.destination);
    const std::string& name = spelling == line.spellings.end() ? option.names.front() : spelling->second;
    const bool changed = value != default_value(option);
    const std::string shown = option.type == OptionType::kSwitch ? name : concat(name, " ", print_value(value));
    if (option.status == Status::kRefused && changed) refuse(shown, option.note);
    for (const std::string& word : words_of(value)) {
      for (const Choice& choice : option.choices) {
        if (choice.name != word) continue;
        if (choice.status == Status::kRefused) refuse(concat(name, " ", word), choice.note);
        if (choice.status == Status::kNoEffect) warn(concat(name, " ", word), choice.note);
      }
    }
    if (option.status == Status::kNoEffect) warn(name, option.note);
  }
  for (const Option* family : line.used_families) warn(family->names.front(), family->note);
  return warnings;
}

std::int64_t choose_world_size(const Values& values, const ParseContext& context, bool dry_run) {
  const std::optional<std::int64_t> asked = values.maybe_integer("world_size");
  if (!asked) return context.world_size;
  PGPT_CHECK(ConfigError, *asked > 0, "--world-size is ", *asked, "; it must be above 0");
  PGPT_CHECK(ConfigError, dry_run || *asked == context.world_size, "--world-size ", *asked, " contradicts the ",
             context.world_size, " rank(s) of the launch environment; it belongs to --dry-run");
  return *asked;
}

}  // namespace

std::string version() { return kVersion; }

ParsedCommand parse_command_line(const std::vector<std::string>& arguments, const ParseContext& context) {
  using Action = ParsedCommand::Action;
  ParsedCommand command;
  CommandLine line = read_command_line(arguments);
  const Values& given = line.values;
  if (given.flag("help") || given.flag("help_markdown") || given.flag("version")) {
    command.action = given.flag("help")      ? Action::kHelp
                     : given.flag("version") ? Action::kVersion
                                             : Action::kHelpMarkdown;
    command.text = given.flag("help")      ? help_text()
                   : given.flag("version") ? "pretrain_gpt " + version() + "\n"
                                           : help_markdown();
    return command;
  }
  command.warnings = check_status(line);
  const std::string json = write_json_config(given);
  const bool dry_run = given.flag("dry_run");
  const bool print_config = given.flag("print_config");
  if (const std::optional<std::int64_t> local_rank = given.maybe_integer("local_rank")) {
    PGPT_CHECK(ConfigError, *local_rank == context.local_rank, "--local-rank ", *local_rank, " contradicts LOCAL_RANK ",
               context.local_rank, " of the launch environment; remove it");
  }
  Values values = given;
  take_checkpoint_arguments(values, context, command.config.notices);
  values.derive("local_rank", std::int64_t{context.local_rank});
  Derivation derivation{values, command.config, choose_world_size(given, context, dry_run || print_config)};
  derive_all(derivation);
  command.config.dry_run = dry_run;
  if (dry_run || print_config) {
    // No device is looked at: the backend is the given one, or the one that fits what the caller knows.
    if (!command.config.parallel.backend_given) {
      MachineFacts roomy = context.machine;
      roomy.local_world_size = 1;
      resolve_backend(command.config, roomy);
    }
    command.action = dry_run ? Action::kDryRun : Action::kPrintConfig;
    command.text = dry_run ? describe_dry_run(command.config) : json;
    return command;
  }
  check_runnable(command.config);
  resolve_backend(command.config, context.machine);
  check_devices(command.config, context.machine);
  return command;
}

}  // namespace pgpt::config

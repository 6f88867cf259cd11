#include "tool_arguments.h"

#include <cctype>

#include "pgpt/base/error.h"
#include "pgpt/base/spelling.h"

namespace pgpt::training {
namespace {

/// A dash and a letter or another dash: no number and no "-".
bool is_option(const std::string& word) {
  return word.size() > 1 && word[0] == '-' && (word[1] == '-' || std::isalpha(static_cast<unsigned char>(word[1])));
}

std::string see_help(const std::string& command) { return concat("; gpt_tool ", command, " --help shows its words"); }

[[noreturn]] void throw_unknown(const std::string& command, const std::string& word,
                                std::initializer_list<const std::set<std::string>*> known) {
  std::vector<std::string> names;
  for (const auto* part : known) names.insert(names.end(), part->begin(), part->end());
  const std::string near = did_you_mean(word, names);
  throw ConfigError(concat(command, ": unknown option ", word, near.empty() ? see_help(command) : near));
}

}  // namespace

ToolArguments::ToolArguments(const std::string& command, const std::vector<std::string>& words,
                             const std::set<std::string>& switches, const std::set<std::string>& options,
                             std::size_t paths, const std::set<std::string>& lists)
    : command_(command) {
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::size_t equals = is_option(words[i]) ? words[i].find('=') : std::string::npos;
    const std::string word = words[i].substr(0, equals);
    const bool list = lists.count(word) != 0;
    if (switches.count(word) != 0) {
      PGPT_CHECK(ConfigError, equals == std::string::npos, command, ": ", word, " takes no value, found '",
                 words[i].substr(equals + 1), "'; write ", word, " alone, or leave it out");
      given_.push_back({word, {}});
    } else if (list || options.count(word) != 0) {
      std::vector<std::string> values;
      if (equals != std::string::npos) {
        values.push_back(words[i].substr(equals + 1));
      } else {
        const auto more = [&] { return i + 1 < words.size() && !is_option(words[i + 1]); };
        PGPT_CHECK(ConfigError, more(), command, ": ", word, " needs a value, found none", see_help(command));
        do values.push_back(words[++i]);
        while (list && more());
      }
      given_.emplace_back(word, std::move(values));
    } else {
      if (is_option(word)) throw_unknown(command, word, {&switches, &options, &lists});
      PGPT_CHECK(ConfigError, paths_.size() < paths, command, ": unexpected word '", word, "'",
                 i == 0 ? "" : " after " + words[i - 1], see_help(command));
      paths_.push_back(word);
    }
  }
  if (paths_.size() == paths) return;
  std::string advice = see_help(command);
  for (const auto& [name, values] : given_) {
    if (lists.count(name) != 0 && values.size() > 1)
      advice = "; write paths before " + name + ", which takes all words";
  }
  throw ConfigError(concat(command, ": takes ", paths, paths == 1 ? " path" : " paths", ", found ",
                           paths_.empty() ? "none" : "only " + paths_.front(), advice));
}

std::optional<std::string> ToolArguments::text(const std::string& name) const {
  const std::vector<std::string>* values = find(name);
  return values == nullptr ? std::nullopt : std::optional(values->at(0));
}

std::optional<std::vector<std::string>> ToolArguments::list(const std::string& name) const {
  const std::vector<std::string>* values = find(name);
  return values == nullptr ? std::nullopt : std::optional(*values);
}

std::vector<std::string> ToolArguments::every(const std::string& name) const {
  std::vector<std::string> all;
  for (const auto& [given, values] : given_) {
    if (given == name) all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

std::optional<std::int64_t> ToolArguments::integer(const std::string& name) const {
  const std::optional<std::string> value = text(name);
  return value ? std::optional(whole_number(name, *value)) : std::nullopt;
}

std::vector<std::int64_t> ToolArguments::every_integer(const std::string& name) const {
  std::vector<std::int64_t> numbers;
  for (const std::string& value : every(name)) numbers.push_back(whole_number(name, value));
  return numbers;
}

void ToolArguments::require(std::initializer_list<const char*> names) const {
  std::string missing;
  for (const char* name : names) {
    if (!has(name)) missing += (missing.empty() ? "" : ", ") + std::string(name);
  }
  PGPT_CHECK(ConfigError, missing.empty(), command_, ": not given, but needed: ", missing, see_help(command_));
}

const std::vector<std::string>* ToolArguments::find(const std::string& name) const {
  for (auto given = given_.rbegin(); given != given_.rend(); ++given) {
    if (given->first == name) return &given->second;
  }
  return nullptr;
}

std::int64_t ToolArguments::whole_number(const std::string& name, const std::string& value) const {
  PGPT_CHECK(ConfigError,
             !value.empty() && value.size() < 16 && value.find_first_not_of("0123456789") == std::string::npos,
             command_, ": ", name, " takes a whole number, not '", value, "'; write digits, e.g. 12");
  return std::stoll(value);
}

}  // namespace pgpt::training

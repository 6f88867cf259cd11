#include "rows.h"

#include <algorithm>

#include "pgpt/base/error.h"

namespace pgpt::config::rows {

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (true) {
    const std::size_t end = text.find(separator, begin);
    parts.emplace_back(text.substr(begin, end == std::string_view::npos ? end : end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

namespace {

std::string destination_of(std::string_view name) {
  std::string result(name.substr(2));
  std::replace(result.begin(), result.end(), '-', '_');
  return result;
}

}  // namespace

Row::Row(OptionType type, std::string_view name, std::optional<std::string> default_text, std::string_view help) {
  option_.names = {std::string(name)};
  option_.destination = destination_of(name);
  option_.type = type;
  option_.default_text = std::move(default_text);
  option_.help = help;
}

Row&& Row::alias(std::string_view name) && {
  option_.names.emplace_back(name);
  return std::move(*this);
}
Row&& Row::to(std::string_view destination) && {
  option_.destination = destination;
  return std::move(*this);
}
Row&& Row::list() && {
  option_.count = ValueCount::kOneOrMore;
  return std::move(*this);
}
Row&& Row::any_number() && {
  option_.count = ValueCount::kAnyNumber;
  return std::move(*this);
}
Row&& Row::exactly(std::size_t count) && {
  option_.count = ValueCount::kExactly;
  option_.exact_count = count;
  return std::move(*this);
}
Row&& Row::default_none() && {
  option_.default_text.reset();
  return std::move(*this);
}
Row&& Row::starts_true() && {
  option_.default_text = "true";
  return std::move(*this);
}
Row&& Row::no_effect(std::string_view why) && {
  option_.status = Status::kNoEffect;
  option_.note = why;
  return std::move(*this);
}
Row&& Row::refused(std::string_view what_to_do) && {
  option_.status = Status::kRefused;
  option_.note = what_to_do;
  return std::move(*this);
}
Row&& Row::mark(std::string_view choices, Status status, std::string_view note) {
  for (const std::string& name : split(choices, '|')) {
    const auto found =
        std::find_if(option_.choices.begin(), option_.choices.end(), [&](const Choice& c) { return c.name == name; });
    PGPT_ASSERT(found != option_.choices.end(), option_.names.front(), " has no choice ", name);
    found->status = status;
    found->note = note;
  }
  return std::move(*this);
}
Row&& Row::refuse(std::string_view choices, std::string_view what_to_do) && {
  return mark(choices, Status::kRefused, what_to_do);
}
Row&& Row::choice_no_effect(std::string_view choices, std::string_view why) && {
  return mark(choices, Status::kNoEffect, why);
}
Row&& Row::model_size() && {
  option_.architecture = true;
  return std::move(*this).imported().taken(Taken::kIfUnset);
}
Row&& Row::model_kind() && {
  option_.architecture = true;
  return std::move(*this).imported().taken(Taken::kAlways);
}
Row&& Row::imported() && {
  option_.imported = true;
  return std::move(*this);
}
Row&& Row::taken(Taken when) && {
  option_.taken = when;
  return std::move(*this);
}
Row&& Row::own() && {
  option_.own = true;
  return std::move(*this);
}
Row&& Row::action() && {
  option_.action = true;
  return std::move(*this);
}
Row&& Row::hidden() && {
  option_.hidden = true;
  return std::move(*this);
}

Row on(std::string_view name, std::string_view help) { return {OptionType::kSwitch, name, "false", help}; }

Row off(std::string_view name, std::string_view help) {
  Row row(OptionType::kSwitch, name, "true", help);
  row.option_.switch_value = false;
  for (const std::string_view prefix : {"--no-", "--disable-"}) {
    if (name.starts_with(prefix)) {
      row.option_.destination = destination_of("--" + std::string(name.substr(prefix.size())));
    }
  }
  return row;
}

Row off_pair(std::string_view name, std::string_view help) {
  PGPT_ASSERT(name.starts_with("--no-"), name);
  return off(name, help).alias("--disable-" + std::string(name.substr(5)));
}

Row integer(std::string_view name, std::optional<std::string> default_text, std::string_view help) {
  return {OptionType::kInteger, name, std::move(default_text), help};
}
Row real(std::string_view name, std::optional<std::string> default_text, std::string_view help) {
  return {OptionType::kReal, name, std::move(default_text), help};
}
Row text(std::string_view name, std::optional<std::string> default_text, std::string_view help) {
  return {OptionType::kText, name, std::move(default_text), help};
}

Row place(std::string_view name, std::string_view help) {
  Row row = text(name, kNone, help);
  row.option_.place = true;
  return row;
}
Row pattern(std::string_view name, std::optional<std::string> default_text, std::string_view help) {
  return {OptionType::kPattern, name, std::move(default_text), help};
}
Row choice(std::string_view name, std::optional<std::string> default_text, std::string_view choices,
           std::string_view help) {
  Row row(OptionType::kChoice, name, std::move(default_text), help);
  for (std::string& word : split(choices, '|')) row.option_.choices.push_back({std::move(word), Status::kWorks, ""});
  return row;
}

}  // namespace pgpt::config::rows

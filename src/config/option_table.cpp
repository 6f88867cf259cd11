#include "pgpt/config/option_table.h"

#include <map>

#include "pgpt/base/error.h"
#include "rows.h"

namespace pgpt::config {

namespace {

struct Table {
  std::vector<Option> rows;
  std::map<std::string, std::size_t, std::less<>> by_name;
  std::map<std::string, std::size_t, std::less<>> by_destination;
  std::vector<std::size_t> families;
};

void append(Table& table, const char* group, rows::Rows rows) {
  for (Option& row : rows) {
    row.group = group;
    const std::size_t index = table.rows.size();
    if (row.is_family()) table.families.push_back(index);
    for (const std::string& name : row.names) {
      if (!row.is_family()) {
        const bool fresh = table.by_name.emplace(name, index).second;
        PGPT_ASSERT(fresh, name, " stands twice in the option table");
      }
    }
    table.by_destination.emplace(row.destination, index);
    table.rows.push_back(std::move(row));
  }
}

const Table& table() {
  static const Table instance = [] {
    Table t;
    append(t, "Model", rows::model_rows());
    append(t, "Regularisation and initialisation", rows::regularisation_rows());
    append(t, "Optimizer and learning rate", rows::optimizer_rows());
    append(t, "Training", rows::training_rows());
    append(t, "Mixed precision", rows::precision_rows());
    append(t, "Distributed and GTP", rows::distributed_rows());
    append(t, "Mixture of experts", rows::moe_rows());
    append(t, "Data and tokenizer", rows::data_rows());
    append(t, "Validation", rows::validation_rows());
    append(t, "Checkpointing", rows::checkpoint_rows());
    append(t, "Logging", rows::logging_rows());
    append(t, "This program", rows::own_rows());
    return t;
  }();
  return instance;
}

bool matches_family(std::string_view name, std::string_view pattern) {
  const std::size_t star = pattern.find('*');
  const std::string_view head = pattern.substr(0, star);
  const std::string_view tail = pattern.substr(star + 1);
  return name.size() >= head.size() + tail.size() && name.starts_with(head) && name.ends_with(tail);
}

}  // namespace

const std::vector<Option>& option_table() { return table().rows; }

const Option* find_option(std::string_view name) {
  const Table& t = table();
  if (const auto found = t.by_name.find(name); found != t.by_name.end()) return &t.rows[found->second];
  for (const std::size_t index : t.families) {
    if (matches_family(name, t.rows[index].names.front())) return &t.rows[index];
  }
  return nullptr;
}

const Option* find_destination(std::string_view destination) {
  const Table& t = table();
  const auto found = t.by_destination.find(destination);
  return found == t.by_destination.end() ? nullptr : &t.rows[found->second];
}

std::string option_name(std::string_view destination) {
  const Option* option = find_destination(destination);
  PGPT_ASSERT(option != nullptr, destination);
  return option->names.front();
}

std::vector<std::string> listed_names() {
  std::vector<std::string> works, refused;
  for (const Option& row : option_table()) {
    if (row.hidden || row.is_family()) continue;
    std::vector<std::string>& names = row.status == Status::kRefused ? refused : works;
    names.insert(names.end(), row.names.begin(), row.names.end());
  }
  works.insert(works.end(), refused.begin(), refused.end());
  return works;
}

}  // namespace pgpt::config

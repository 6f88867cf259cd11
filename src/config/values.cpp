#include "values.h"

#include <filesystem>
#include <fstream>

#include "pgpt/base/error.h"

namespace pgpt::config {

namespace {

template <class T>
const T& get(const Value& value, std::string_view destination) {
  const T* found = std::get_if<T>(&value);
  PGPT_ASSERT(found != nullptr, "option ", destination, " has another type or no value");
  return *found;
}

}  // namespace

std::string read_option_file(std::string_view option, const std::string& path) {
  std::error_code error;
  PGPT_CHECK(DataError, !std::filesystem::is_directory(path, error), option, " ", path,
             " is a folder; give a file in it");
  std::ifstream file(path, std::ios::binary);
  PGPT_CHECK(DataError, file.good(), option, " ", path, " cannot be read; check path and permissions");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  PGPT_CHECK(DataError, !file.bad(), option, " ", path, " cannot be read to its end");
  return text;
}

Values::Values() {
  for (const Option& option : option_table()) {
    if (!option.is_family()) values_.emplace(option.destination, default_value(option));
  }
}

void Values::give(const std::string& destination, Value value) {
  const auto found = values_.find(destination);
  PGPT_ASSERT(found != values_.end(), "no option stores ", destination);
  found->second = std::move(value);
  given_.insert(destination);
}

void Values::derive(const std::string& destination, Value value) { values_[destination] = std::move(value); }

const Value& Values::at(std::string_view destination) const {
  const auto found = values_.find(destination);
  PGPT_ASSERT(found != values_.end(), "no option stores ", destination);
  return found->second;
}

bool Values::is_set(std::string_view destination) const {
  return !std::holds_alternative<std::monostate>(at(destination));
}
bool Values::flag(std::string_view destination) const {
  return is_set(destination) && get<bool>(at(destination), destination);
}
std::int64_t Values::integer(std::string_view destination) const {
  return get<std::int64_t>(at(destination), destination);
}
double Values::real(std::string_view destination) const { return get<double>(at(destination), destination); }
std::string Values::text(std::string_view destination) const {
  return is_set(destination) ? get<std::string>(at(destination), destination) : "";
}
std::vector<std::string> Values::texts(std::string_view destination) const {
  if (!is_set(destination)) return {};
  return get<std::vector<std::string>>(at(destination), destination);
}
std::vector<std::int64_t> Values::integers(std::string_view destination) const {
  if (!is_set(destination)) return {};
  return get<std::vector<std::int64_t>>(at(destination), destination);
}
std::optional<std::int64_t> Values::maybe_integer(std::string_view destination) const {
  if (!is_set(destination)) return std::nullopt;
  return integer(destination);
}
std::optional<double> Values::maybe_real(std::string_view destination) const {
  if (!is_set(destination)) return std::nullopt;
  return real(destination);
}

}  // namespace pgpt::config

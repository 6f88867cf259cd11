// Words of the command line to values and back, with the strictness of argparse.
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>

#include "pgpt/base/error.h"
#include "pgpt/base/spelling.h"
#include "pgpt/config/option_table.h"
#include "rows.h"

namespace pgpt::config {

namespace {

std::string_view trim(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front()))) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.remove_suffix(1);
  return text;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// Drops the single underscores that Python allows between digits; false when one stands elsewhere.
bool drop_underscores(std::string_view text, std::string& out) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '_') {
      out += text[i];
    } else if (i == 0 || i + 1 == text.size() || !is_digit(text[i - 1]) || !is_digit(text[i + 1])) {
      return false;
    }
  }
  return true;
}

bool parse_integer(std::string_view text, std::int64_t& out) {
  std::string clean;
  text = trim(text);
  if (text.starts_with('+')) {
    text.remove_prefix(1);
    if (text.starts_with('-')) return false;
  }
  if (!drop_underscores(text, clean) || clean.empty()) return false;
  const auto [end, error] = std::from_chars(clean.data(), clean.data() + clean.size(), out);
  return error == std::errc() && end == clean.data() + clean.size();
}

bool parse_real(std::string_view text, double& out) {
  std::string clean;
  text = trim(text);
  const bool negative = text.starts_with('-');
  if (negative || text.starts_with('+')) text.remove_prefix(1);
  if (!drop_underscores(text, clean) || clean.empty() || clean.front() == '-') return false;
  std::string lower = clean;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  if (lower == "inf" || lower == "infinity") {
    out = INFINITY;
  } else if (lower == "nan") {
    out = NAN;
  } else {
    if (!is_digit(clean.front()) && clean.front() != '.') return false;
    const auto [end, error] = std::from_chars(clean.data(), clean.data() + clean.size(), out);
    if (end != clean.data() + clean.size()) return false;
    if (error == std::errc::result_out_of_range) {
      // Python rounds to infinity or zero; the sign of the exponent says which.
      const std::size_t exponent = lower.find('e');
      out = exponent != std::string::npos && lower[exponent + 1] == '-' ? 0.0 : INFINITY;
    } else if (error != std::errc()) {
      return false;
    }
  }
  if (negative) out = -out;
  return true;
}

std::string quoted(std::string_view token) { return concat("'", token, "'"); }

constexpr auto kEmptyValue = "; the value is empty, perhaps a variable of the script is not set";

std::int64_t integer_of(std::string_view name, const std::string& token) {
  std::int64_t value = 0;
  if (parse_integer(token, value)) return value;
  std::string advice = "; write digits, e.g. 12";
  double real = 0;
  if (trim(token).empty()) {
    advice = kEmptyValue;
  } else if (parse_real(token, real) && std::isfinite(real)) {
    const bool fits = std::abs(real) < 0x1p63;
    advice = !fits                      ? "; it must fit into 64 bits"
             : real == std::trunc(real) ? concat("; write ", static_cast<std::int64_t>(real))
                                        : "; give a whole number";
  }
  throw ConfigError(concat(name, " takes an integer, not ", quoted(token), advice));
}

double real_of(std::string_view name, const std::string& token) {
  double value = 0;
  if (parse_real(token, value)) return value;
  std::string advice = "; write e.g. 0.1 or 3e-4";
  std::string with_point = token;
  std::replace(with_point.begin(), with_point.end(), ',', '.');
  if (trim(token).empty()) {
    advice = kEmptyValue;
  } else if (parse_real(with_point, value)) {
    advice = "; write " + with_point;
  }
  throw ConfigError(concat(name, " takes a number, not ", quoted(token), advice));
}

std::string choice_of(const Option& option, std::string_view name, const std::string& token) {
  std::string known;
  std::vector<std::string> names;
  for (const Choice& choice : option.choices) {
    if (choice.name == token) return token;
    if (choice.status == Status::kRefused) continue;
    known += (known.empty() ? "" : ", ") + choice.name;
    names.push_back(choice.name);
  }
  throw ConfigError(concat(name, " takes one of ", known, ", not ", quoted(token),
                           trim(token).empty() ? kEmptyValue : did_you_mean(token, names)));
}

void check_count(const Option& option, std::string_view name, std::size_t count) {
  const std::string found = count == 0 ? "none" : std::to_string(count);
  const std::string advice = name.starts_with("--") ? concat("; write ", name, " ", placeholder(option)) : "";
  switch (option.count) {
    case ValueCount::kOne:
      PGPT_CHECK(ConfigError, count == 1, name, " takes one value, found ", found, advice);
      break;
    case ValueCount::kOneOrMore:
      PGPT_CHECK(ConfigError, count > 0, name, " takes at least one value, found none", advice);
      break;
    case ValueCount::kExactly:
      PGPT_CHECK(ConfigError, count == option.exact_count, name, " takes ", option.exact_count, " values, found ",
                 found, advice);
      break;
    case ValueCount::kAnyNumber:
      break;
  }
}

std::string python_real(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto done = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific);
  const std::string scientific(buffer, done.ptr);
  const std::size_t e = scientific.find('e');
  const int exponent = std::atoi(scientific.c_str() + e + 1);
  if (exponent < -4 || exponent >= 16) return scientific;
  const auto fixed_done = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::fixed);
  std::string fixed(buffer, fixed_done.ptr);
  if (fixed.find('.') == std::string::npos) fixed += ".0";
  return fixed;
}

template <class T, class Print>
std::string print_list(const std::vector<T>& values, const Print& print) {
  std::string out = "[";
  for (std::size_t i = 0; i < values.size(); ++i) out += (i == 0 ? "" : ", ") + print(values[i]);
  return out + "]";
}

struct Printer {
  std::string operator()(std::monostate) const { return "None"; }
  std::string operator()(bool value) const { return value ? "True" : "False"; }
  std::string operator()(std::int64_t value) const { return std::to_string(value); }
  std::string operator()(double value) const { return python_real(value); }
  std::string operator()(const std::string& value) const { return value; }
  std::string operator()(const std::vector<std::int64_t>& v) const {
    return print_list(v, [](std::int64_t x) { return std::to_string(x); });
  }
  std::string operator()(const std::vector<double>& v) const { return print_list(v, python_real); }
  std::string operator()(const std::vector<std::string>& v) const { return print_list(v, quoted); }
};

/// Recursive descent over: sum = product ('+' product)*, product = factor ('*' factor)*, factor = number | list |
/// (sum).
class PatternParser {
 public:
  PatternParser(std::string_view option, std::string_view text) : option_(option), text_(text) {}

  struct Term {
    bool is_list = false;
    std::vector<std::int64_t> items;
  };

  Term parse() {
    Term result = sum();
    if (position_ != text_.size()) fail("unexpected text");
    return result;
  }

 private:
  // A pattern has one entry a layer; far longer ones are typing errors that would fill memory.
  static constexpr std::size_t kMaxItems = 1000000;

  [[noreturn]] void fail(std::string_view what) const {
    throw ConfigError(concat(option_, " takes an integer or a list expression such as ([1]*3+[0])*2; in '", text_, "' ",
                             what, " at position ", position_ + 1));
  }
  void skip_blanks() {
    while (position_ < text_.size() && text_[position_] == ' ') ++position_;
  }
  bool accept(char c) {
    skip_blanks();
    if (position_ == text_.size() || text_[position_] != c) return false;
    ++position_;
    skip_blanks();
    return true;
  }
  Term sum() {
    Term left = product();
    while (accept('+')) {
      const Term right = product();
      if (left.is_list != right.is_list) fail("a list and a number are added");
      if (left.is_list) {
        left.items.insert(left.items.end(), right.items.begin(), right.items.end());
        if (left.items.size() > kMaxItems) fail("the list is too long");
      } else {
        left.items[0] = checked(left.items[0] + right.items[0]);
      }
    }
    return left;
  }
  Term product() {
    Term left = factor();
    while (accept('*')) {
      Term right = factor();
      if (left.is_list && right.is_list) fail("two lists are multiplied");
      if (!left.is_list && !right.is_list) {
        left.items[0] = checked(left.items[0] * right.items[0]);
        continue;
      }
      if (right.is_list) std::swap(left, right);
      const std::size_t times = static_cast<std::size_t>(right.items[0]);
      if (times != 0 && left.items.size() > kMaxItems / times) fail("the list is too long");
      const std::vector<std::int64_t> once = left.items;
      left.items.clear();
      for (std::size_t i = 0; i < times; ++i) left.items.insert(left.items.end(), once.begin(), once.end());
    }
    return left;
  }
  Term factor() {
    if (accept('(')) {
      if (++depth_ > 100) fail("brackets are nested too deeply");
      Term inner = sum();
      if (!accept(')')) fail("')' is missing");
      --depth_;
      return inner;
    }
    if (accept('[')) {
      Term list{true, {}};
      while (!accept(']')) {
        const Term item = sum();
        if (item.is_list) fail("lists are nested");
        list.items.push_back(item.items[0]);
        if (!accept(',')) {
          if (!accept(']')) fail("']' is missing");
          break;
        }
      }
      return list;
    }
    const std::size_t begin = position_;
    while (position_ < text_.size() && is_digit(text_[position_])) ++position_;
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text_.data() + begin, text_.data() + position_, value);
    if (begin == position_ || error != std::errc()) fail("a number is missing");
    skip_blanks();
    return {false, {checked(value)}};
  }
  // Every number is below 1e6, so sums and products of two cannot overflow.
  std::int64_t checked(std::int64_t value) const {
    if (value > static_cast<std::int64_t>(kMaxItems)) fail("the number is too large");
    return value;
  }

  std::string_view option_;
  std::string_view text_;
  std::size_t position_ = 0;
  int depth_ = 0;
};

}  // namespace

Value convert_value(const Option& option, std::string_view name, const std::vector<std::string>& tokens) {
  if (option.type == OptionType::kSwitch) {
    PGPT_CHECK(ConfigError, tokens.empty(), name, " takes no value, found ", quoted(tokens.front()), "; write ", name,
               " alone, or leave it out");
    return option.switch_value;
  }
  check_count(option, name, tokens.size());
  switch (option.type) {
    case OptionType::kInteger: {
      if (!option.is_list()) return integer_of(name, tokens.front());
      std::vector<std::int64_t> values;
      for (const std::string& token : tokens) values.push_back(integer_of(name, token));
      return values;
    }
    case OptionType::kReal: {
      if (!option.is_list()) return real_of(name, tokens.front());
      std::vector<double> values;
      for (const std::string& token : tokens) values.push_back(real_of(name, token));
      return values;
    }
    case OptionType::kChoice: {
      if (!option.is_list()) return choice_of(option, name, tokens.front());
      std::vector<std::string> values;
      for (const std::string& token : tokens) values.push_back(choice_of(option, name, token));
      return values;
    }
    case OptionType::kPattern: {
      bool is_list = false;
      const std::vector<std::int64_t> items = evaluate_pattern(name, tokens.front(), is_list);
      if (!is_list) return items.front();
      return items;
    }
    case OptionType::kText:
    case OptionType::kSwitch:
      break;
  }
  if (option.is_list()) return tokens;
  return tokens.front();
}

Value default_value(const Option& option) {
  if (!option.default_text) return std::monostate{};
  if (option.type == OptionType::kSwitch) return *option.default_text == "true";
  if (!option.is_list()) return convert_value(option, option.names.front(), {*option.default_text});
  return convert_value(option, option.names.front(), rows::split(*option.default_text, ' '));
}

std::string print_value(const Value& value) { return std::visit(Printer{}, value); }

std::vector<std::int64_t> evaluate_pattern(std::string_view option, std::string_view text, bool& is_list) {
  PatternParser::Term term = PatternParser(option, trim(text)).parse();
  is_list = term.is_list;
  return std::move(term.items);
}

}  // namespace pgpt::config

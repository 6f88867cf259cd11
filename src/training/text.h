#pragma once

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <string>

namespace pgpt::training {

/// printf into a string.
[[gnu::format(printf, 1, 2)]] inline std::string text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  va_list again;
  va_copy(again, arguments);
  const int length = std::vsnprintf(nullptr, 0, format, arguments);
  va_end(arguments);
  std::string out(static_cast<std::size_t>(length), '\0');
  std::vsnprintf(out.data(), out.size() + 1, format, again);
  va_end(again);
  return out;
}

/// A NaN without sign, as C prints "-nan" where the reference prints "nan".
inline double unsigned_nan(double value) { return std::isnan(value) ? std::abs(value) : value; }

}  // namespace pgpt::training

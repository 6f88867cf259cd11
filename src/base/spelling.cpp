#include "pgpt/base/spelling.h"

#include <algorithm>
#include <cctype>
#include <numeric>

namespace pgpt {
namespace {

constexpr std::size_t kMostWords = 3;

/// Without what is no mistake.
std::string plain(std::string_view word) {
  std::string result;
  for (const char c : word) {
    result += c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return result;
}

/// Letters without the dashes before them, which are no evidence of what was meant.
std::size_t letters(std::string_view word) {
  const std::size_t first = word.find_first_not_of('-');
  return first == std::string_view::npos ? 0 : word.size() - first;
}

std::vector<std::string> beginning_with(const std::string& typed, const std::vector<std::string>& known) {
  std::vector<std::string> found;
  if (letters(typed) == 0) return found;
  for (const std::string& word : known) {
    if (plain(word).starts_with(typed)) found.push_back(word);
  }
  // The beginning of many words tells nothing about the one that was meant.
  if (found.size() > kMostWords) found.clear();
  return found;
}

}  // namespace

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before, above(b.size() + 1), row(b.size() + 1);
  std::iota(above.begin(), above.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = above[j] + (a[i] == b[j] ? 0 : 1);
      row[j + 1] = std::min({replaced, row[j] + 1, above[j + 1] + 1});
      const bool swapped = i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j];
      if (swapped) row[j + 1] = std::min(row[j + 1], before[j - 1] + 1);
    }
    before = above;
    above = row;
  }
  return above.back();
}

std::vector<std::string> nearest_words(std::string_view word, const std::vector<std::string>& known) {
  const std::string typed = plain(word);
  // Beyond a third of the word, the nearest one is a guess that misleads.
  std::size_t best = std::max<std::size_t>(2, typed.size() / 3);
  std::vector<std::string> found;
  for (const std::string& candidate : known) {
    const std::string other = plain(candidate);
    const std::size_t distance = edit_distance(typed, other);
    const bool shared = distance < std::max(letters(typed), letters(other));
    if (distance > best || (!shared && distance > 0)) continue;
    if (distance < best) found.clear();
    best = distance;
    if (found.size() < kMostWords) found.push_back(candidate);
  }
  return found.empty() ? beginning_with(typed, known) : found;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& known) {
  const std::vector<std::string> found = nearest_words(word, known);
  std::string text;
  for (std::size_t i = 0; i < found.size(); ++i) {
    text += (i == 0 ? "; did you mean " : i + 1 == found.size() ? " or " : ", ") + found[i];
  }
  return text.empty() ? text : text + "?";
}

}  // namespace pgpt

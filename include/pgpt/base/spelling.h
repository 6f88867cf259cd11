#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace pgpt {

/// Insertions, deletions, replacements and swaps of two neighbours that turn `a` into `b`, where no letter is changed
/// twice.
[[nodiscard]] std::size_t edit_distance(std::string_view a, std::string_view b);

/// The known words that a mistyped one may mean, at most three, in the order of `known`: the nearest ones up to a
/// distance of two, or of a third of a longer word; else those that begin with it. Case, and '_' for '-', are no
/// mistakes. Empty when nothing is near enough to be meant.
[[nodiscard]] std::vector<std::string> nearest_words(std::string_view word, const std::vector<std::string>& known);

/// "; did you mean A or B?" of the nearest known words, empty when there are none.
[[nodiscard]] std::string did_you_mean(std::string_view word, const std::vector<std::string>& known);

}  // namespace pgpt

#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace pgpt::training {

struct TableColumn {
  std::string name;
  bool right = false;  ///< cells end at the same place, as numbers do
};

/// A table as text.
struct TableText {
  std::string header;
  std::vector<std::string> lines;     ///< one for each row
  std::vector<std::string> left_out;  ///< names of the columns that did not fit
};

/// Lays out rows of one cell for each column, the columns as wide as their content with two blanks before each. Cells
/// are never cut: the last columns are left out until the lines have at most `width` characters, all but the first.
[[nodiscard]] TableText lay_out(std::vector<TableColumn> columns, const std::vector<std::vector<std::string>>& rows,
                                std::size_t width);

/// Words joined by blanks, in lines of at most `width` characters that begin with `head` and then with as many blanks;
/// only a word that is longer by itself exceeds it.
[[nodiscard]] std::vector<std::string> wrap_words(const std::string& head, const std::vector<std::string>& words,
                                                  std::size_t width);

}  // namespace pgpt::training

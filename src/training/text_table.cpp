#include "pgpt/training/text_table.h"

#include <algorithm>

namespace pgpt::training {
namespace {

constexpr std::size_t kGap = 2;

}  // namespace

TableText lay_out(std::vector<TableColumn> columns, const std::vector<std::vector<std::string>>& rows,
                  std::size_t width) {
  TableText text;
  std::vector<std::size_t> widths;
  std::size_t total = 0;
  for (std::size_t c = 0; c < columns.size(); ++c) {
    widths.push_back(columns[c].name.size());
    for (const auto& row : rows) widths[c] = std::max(widths[c], row.at(c).size());
    total += kGap + widths[c];
  }
  while (columns.size() > 1 && total > width) {
    total -= kGap + widths[columns.size() - 1];
    text.left_out.insert(text.left_out.begin(), columns.back().name);
    columns.pop_back();
  }
  const auto line_of = [&](const auto& cell) {
    std::string line;
    for (std::size_t c = 0; c < columns.size(); ++c) {
      const std::string& content = cell(c);
      const std::string blanks(widths[c] - content.size(), ' ');
      line += std::string(kGap, ' ') + (columns[c].right ? blanks + content : content + blanks);
    }
    return line.substr(0, line.find_last_not_of(' ') + 1);
  };
  text.header = line_of([&](std::size_t c) -> const std::string& { return columns[c].name; });
  for (const auto& row : rows) {
    text.lines.push_back(line_of([&](std::size_t c) -> const std::string& { return row[c]; }));
  }
  return text;
}

std::vector<std::string> wrap_words(const std::string& head, const std::vector<std::string>& words, std::size_t width) {
  std::vector<std::string> lines = {head};
  bool fresh = true;
  for (const std::string& word : words) {
    if (!fresh && lines.back().size() + 1 + word.size() > width) {
      lines.emplace_back(head.size(), ' ');
      fresh = true;
    }
    lines.back() += (fresh ? "" : " ") + word;
    fresh = false;
  }
  return lines;
}

}  // namespace pgpt::training

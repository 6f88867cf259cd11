#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "pgpt/base/error.h"

// Texts, files of text and messages of errors.
namespace pgpt::test {

inline bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

/// Whether some line holds the part.
inline bool has_line(const std::vector<std::string>& lines, std::string_view part) {
  return std::any_of(lines.begin(), lines.end(), [&](const std::string& line) { return contains(line, part); });
}

/// Occurrences of a part, overlapping ones too.
inline std::size_t count(std::string_view text, std::string_view part) {
  std::size_t n = 0;
  for (std::size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

inline std::vector<std::string> split_lines(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

/// Splits at blanks and line ends; double quotes keep words together.
inline std::vector<std::string> split_words(std::string_view text) {
  std::vector<std::string> words;
  std::string word;
  bool quoted = false;
  bool open = false;
  for (const char c : text) {
    if (c == '"') {
      quoted = !quoted;
      open = true;
    } else if ((c == ' ' || c == '\n') && !quoted) {
      if (open) words.push_back(word);
      word.clear();
      open = false;
    } else {
      word += c;
      open = true;
    }
  }
  if (open) words.push_back(word);
  return words;
}

/// The bytes of a file. Throws std::runtime_error when it cannot be opened.
inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open()) throw std::runtime_error("cannot open " + path.string());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline std::vector<std::string> read_lines(const std::filesystem::path& path) { return split_lines(read_text(path)); }

/// Makes a file anew. Throws std::runtime_error when it cannot be written.
inline void write_text(const std::filesystem::path& path, std::string_view text) {
  std::filesystem::remove(path);  // some file systems flush a file that is truncated and written again
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  if (!file.flush()) throw std::runtime_error("cannot write " + path.string());
}

/// The message of the error that `action` throws; empty when it throws none. Errors of other types pass through.
template <class E = Error, class Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return "";
}

}  // namespace pgpt::test

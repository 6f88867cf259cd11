// Tables of gpt_tool: columns as wide as their content, and left out rather than cut.
#include "pgpt/training/text_table.h"
#include "support/catch.h"

using namespace pgpt::training;
using Lines = std::vector<std::string>;

namespace {

const std::vector<TableColumn> kColumns = {{"name"}, {"size", true}, {"sum"}};
const std::vector<std::vector<std::string>> kRows = {{"a", "1 byte", "01"}, {"a.longer.name", "12 bytes", "02"}};

}  // namespace

TEST_CASE("columns are as wide as their widest cell", "[cpu]") {
  const TableText table = lay_out(kColumns, kRows, 120);
  CHECK(table.header == "  name               size  sum");
  CHECK(table.lines == Lines{"  a                1 byte  01", "  a.longer.name  12 bytes  02"});
  CHECK(table.left_out.empty());
  const TableText empty = lay_out(kColumns, {}, 120);
  CHECK(empty.header == "  name  size  sum");
  CHECK(empty.lines.empty());
}

TEST_CASE("the last columns are left out where lines would be too long, the first is never cut", "[cpu]") {
  // 2 + 13 + 2 + 8 + 2 + 3 characters in all.
  CHECK(lay_out(kColumns, kRows, 30).left_out.empty());
  const TableText narrow = lay_out(kColumns, kRows, 29);
  CHECK(narrow.lines == Lines{"  a                1 byte", "  a.longer.name  12 bytes"});
  CHECK(narrow.left_out == Lines{"sum"});
  const TableText names = lay_out(kColumns, kRows, 5);
  CHECK(names.lines == Lines{"  a", "  a.longer.name"});
  CHECK(names.left_out == Lines{"size", "sum"});
}

TEST_CASE("words are wrapped under the head of their line", "[cpu]") {
  CHECK(wrap_words("head ", {"one", "two", "three"}, 12) == Lines{"head one two", "     three"});
  CHECK(wrap_words("head ", {"one", "two"}, 11) == Lines{"head one", "     two"});
  CHECK(wrap_words("head ", {"longer-than-a-line", "x"}, 8) == Lines{"head longer-than-a-line", "     x"});
  CHECK(wrap_words("head", {}, 8) == Lines{"head"});
}

// The .bin/.idx reader and writer, with every kind of damaged file.
#include <sys/stat.h>

#include <cstring>

#include "support/catch.h"
#include "test_data_support.h"

using namespace pgpt;
using namespace pgpt::data;
using namespace pgpt::data::test;

namespace {

std::vector<std::int64_t> read_sequence(const IndexedDataset& dataset, std::int64_t i) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(dataset.length(i)));
  dataset.read(i, 0, dataset.length(i), tokens.data());
  return tokens;
}

template <class T>
std::string with_value(std::string bytes, std::size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof(T));
  return bytes;
}

/// Opens the pair and reads all of it; the message of the error, or "" when all went well.
std::string open_all(const std::string& prefix, bool map = true) {
  return error_of<DataError>([&] {
    const IndexedDataset dataset(prefix, map);
    for (std::int64_t i = 0; i < dataset.size(); ++i) (void)read_sequence(dataset, i);
  });
}

}  // namespace

TEST_CASE("the reader gives every field of the reference's corpora", "[cpu]") {
  const json corpora = golden("corpora.json");
  for (const bool map : {true, false}) {
    for (const auto& [name, expected] : corpora.items()) {
      const IndexedDataset dataset(golden_path(name), map);
      CHECK(static_cast<int>(dataset.token_type()) == expected["dtype_code"].get<int>());
      REQUIRE(dataset.size() == expected["sequence_count"].get<std::int64_t>());
      REQUIRE(dataset.boundaries() == expected["document_count_field"].get<std::int64_t>());
      for (std::int64_t i = 0; i < dataset.size(); ++i) {
        const auto at = static_cast<std::size_t>(i);
        CHECK(dataset.length(i) == expected["sequence_lengths"][at].get<std::int64_t>());
        CHECK(dataset.byte_offset(i) == expected["sequence_pointers"][at].get<std::int64_t>());
        CHECK(read_sequence(dataset, i) == expected["sequences"][at].get<std::vector<std::int64_t>>());
      }
      for (std::int64_t k = 0; k < dataset.boundaries(); ++k) {
        CHECK(dataset.boundary(k) == expected["document_indices"][static_cast<std::size_t>(k)].get<std::int64_t>());
      }
      std::vector<std::int64_t> part(3);
      // The reference reads past the end of a short sequence into the next one; the reader here never does.
      const std::int64_t own = std::min<std::int64_t>(3, dataset.length(2) - 1);
      dataset.read(2, 1, own, part.data());
      dataset.read(3, 0, 3 - own, part.data() + own);
      CHECK(part == expected["get_seq2_off1_len3"].get<std::vector<std::int64_t>>());
    }
  }
}

TEST_CASE("the writer reproduces the reference's files byte for byte", "[cpu]") {
  const TemporaryFolder folder;
  for (const auto& [name, expected] : golden("corpora.json").items()) {
    const std::string prefix = folder / name;
    const auto boundaries = expected["document_indices"].get<std::vector<std::int64_t>>();
    {
      IndexedDatasetWriter writer(prefix, static_cast<TokenType>(expected["dtype_code"].get<int>()));
      std::size_t next = 0;
      for (std::size_t k = 1; k < boundaries.size(); ++k) {
        for (; next < static_cast<std::size_t>(boundaries[k]); ++next) {
          writer.add_sequence(expected["sequences"][next].get<std::vector<std::int64_t>>());
        }
        writer.end_document();
      }
      CHECK_FALSE(std::filesystem::exists(prefix + ".idx"));
      writer.finish();
    }
    CHECK(read_text(prefix + ".idx") == read_text(golden_path(name + ".idx")));
    CHECK(read_text(prefix + ".bin") == read_text(golden_path(name + ".bin")));
    IndexedDatasetWriter copy(folder / "copy", static_cast<TokenType>(expected["dtype_code"].get<int>()));
    copy.append(IndexedDataset(prefix));
    copy.finish();
    CHECK(read_text(folder / "copy.idx") == read_text(prefix + ".idx"));
    CHECK(read_text(folder / "copy.bin") == read_text(prefix + ".bin"));
  }
}

TEST_CASE("all integer element types survive a round trip and refuse what does not fit", "[cpu]") {
  const TemporaryFolder folder;
  struct Case {
    TokenType type;
    std::int64_t low, high;
  };
  const std::int64_t big = std::int64_t{1} << 40;
  for (const Case& c : {Case{TokenType::kUint8, 0, 255}, Case{TokenType::kInt8, -128, 127},
                        Case{TokenType::kInt16, -32768, 32767}, Case{TokenType::kUint16, 0, 65535},
                        Case{TokenType::kInt32, -2147483648LL, 2147483647}, Case{TokenType::kInt64, -big, big}}) {
    write_corpus(folder / "c", {{c.low, 1, c.high}, {}, {7}}, c.type);
    for (const bool map : {true, false}) {
      const IndexedDataset dataset(folder / "c", map);
      CHECK(read_sequence(dataset, 0) == std::vector<std::int64_t>{c.low, 1, c.high});
      CHECK(dataset.length(1) == 0);
      CHECK(read_sequence(dataset, 2) == std::vector<std::int64_t>{7});
    }
    if (c.type == TokenType::kInt64) continue;
    IndexedDatasetWriter writer(folder / "bad", c.type);
    CHECK(contains(error_of([&] { writer.add_sequence(std::vector<std::int64_t>{c.high + 1}); }), "does not fit"));
    CHECK(contains(error_of([&] { writer.add_sequence(std::vector<std::int64_t>{c.low - 1}); }), "does not fit"));
  }
  CHECK(token_type_for_vocab(65499) == TokenType::kUint16);
  CHECK(token_type_for_vocab(65500) == TokenType::kInt32);
}

TEST_CASE("an unfinished writer leaves nothing behind", "[cpu]") {
  const TemporaryFolder folder;
  {
    IndexedDatasetWriter writer(folder / "c", TokenType::kUint16);
    writer.add_sequence(std::vector<std::int64_t>{1, 2});
    writer.end_document();
  }
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("wrong paths are explained in one line", "[cpu]") {
  const TemporaryFolder folder;
  const std::string prefix = folder / "corpus";
  CHECK(contains(open_all(prefix), prefix + ".idx and " + prefix + ".bin"));
  write_corpus(prefix, {{1, 2, 3}});
  CHECK(open_all(prefix).empty());
  CHECK(contains(open_all(prefix + ".bin"), "give the prefix without '.bin'"));
  CHECK(contains(open_all(prefix + ".idx"), "give the prefix without '.idx'"));
  CHECK(contains(open_all(folder.path()), "is a directory"));
  std::filesystem::rename(prefix + ".bin", folder / "away");
  const std::string missing = open_all(prefix);
  CHECK(contains(missing, "cannot find " + prefix + ".bin ("));
  std::filesystem::create_directory(prefix + ".bin");
  CHECK(contains(open_all(prefix), "not a regular file"));
  CHECK(contains(open_all(prefix, false), "not a regular file"));
  std::filesystem::remove(prefix + ".bin");
  std::filesystem::rename(folder / "away", prefix + ".bin");
  if (::geteuid() != 0) {  // root may read everything
    std::filesystem::permissions(prefix + ".idx", std::filesystem::perms::none);
    CHECK(contains(open_all(prefix), "cannot open " + prefix + ".idx: Permission denied"));
  }
}

TEST_CASE("each field of a damaged index is named with its offset", "[cpu]") {
  const TemporaryFolder folder;
  const std::string prefix = folder / "c";
  const std::string index = read_text(golden_path("corpus_c.idx"));  // 8 sequences, 6 boundaries
  std::filesystem::copy_file(golden_path("corpus_c.bin"), prefix + ".bin");
  const std::size_t offsets_at = 34 + 4 * 8;
  const std::size_t boundaries_at = 34 + 12 * 8;
  struct Case {
    std::string bytes;
    std::vector<std::string> expected;
  };
  const std::vector<Case> cases = {
      {with_value(index, 0, 'X'), {"offset 0", "magic"}},
      {with_value(index, 9, std::uint64_t{2}), {"offset 9", "expected version 1, found 2"}},
      {with_value(index, 17, std::uint8_t{99}), {"offset 17", "found 99"}},
      {with_value(index, 17, std::uint8_t{0}), {"offset 17", "found 0"}},
      {with_value(index, 17, std::uint8_t{7}), {"offset 17", "floating-point"}},
      {with_value(index, 18, std::uint64_t{9}), {"9 sequences (offset 18)", "has 178 bytes", "need 190"}},
      {with_value(index, 18, ~std::uint64_t{0}), {"offset 18", "need more"}},
      {with_value(index, 26, std::uint64_t{7}), {"7 document boundaries (offset 26)"}},
      {with_value(index, 26, ~std::uint64_t{0} / 8), {"offset 26"}},
      {with_value(index, 34 + 4, std::int32_t{-1}), {"offset 38", "length of sequence 1", "found -1"}},
      {with_value(index, 34, std::int32_t{2000000000}), {"c.bin has 72 bytes", "sequence 0 needs 4000000000 bytes"}},
      {with_value(index, offsets_at + 8, std::int64_t{-2}), {"offset 74", "byte offset of sequence 1", "found -2"}},
      {with_value(index, offsets_at, std::int64_t{1} << 62), {"sequence 0 needs"}},
      {with_value(index, boundaries_at, std::int64_t{1}), {"offset 130", "must be 0, found 1"}},
      {with_value(index, boundaries_at + 16, std::int64_t{1}), {"offset 146", "document boundary 2", "predecessor 2"}},
      {with_value(index, boundaries_at + 16, std::int64_t{99}), {"offset 146", "found 99"}},
      {with_value(index, boundaries_at + 40, std::int64_t{7}), {"offset 170", "number of sequences 8, found 7"}},
  };
  for (const Case& c : cases) {
    write_text(prefix + ".idx", c.bytes);
    for (const bool map : {true, false}) {
      const std::string message = open_all(prefix, map);
      INFO(message);
      CHECK(contains(message, prefix));
      for (const auto& part : c.expected) CHECK(contains(message, part));
    }
  }
  // The mode bytes of multimodal files are allowed and not read.
  write_text(prefix + ".idx", index + std::string(8, '\1'));
  CHECK(open_all(prefix).empty());
  write_text(prefix + ".idx", index + std::string(7, '\1'));
  CHECK(contains(open_all(prefix), "truncated or damaged"));
  // No boundary at all.
  std::string empty = with_value(with_value(index.substr(0, 34), 18, std::uint64_t{0}), 26, std::uint64_t{0});
  write_text(prefix + ".idx", empty);
  CHECK(contains(open_all(prefix), "at least 1 document boundary"));
}

TEST_CASE("files cut at any byte and indexes with any byte changed never crash", "[cpu]") {
  const TemporaryFolder folder;
  for (const std::string name : {"corpus_a", "corpus_b", "corpus_c"}) {
    const std::string prefix = folder / name;
    const std::string index = read_text(golden_path(name + ".idx"));
    const std::string tokens = read_text(golden_path(name + ".bin"));
    write_text(prefix + ".bin", tokens);
    for (std::size_t size = 0; size < index.size(); ++size) {
      write_text(prefix + ".idx", index.substr(0, size));
      CHECK(contains(open_all(prefix), prefix));
    }
    std::size_t refused = 0;
    for (std::size_t at = 0; at < index.size(); ++at) {
      for (const int flip : {0x01, 0x80}) {
        std::string damaged = index;
        damaged[at] = static_cast<char>(damaged[at] ^ flip);
        write_text(prefix + ".idx", damaged);
        refused += open_all(prefix).empty() ? 0 : 1;
      }
    }
    // Some changes give another valid index (a shorter sequence, an offset moved inside the file), but of the two tried
    // for each byte most cannot.
    CHECK(refused > index.size());
    write_text(prefix + ".idx", index);
    for (std::size_t size = 0; size < tokens.size(); ++size) {
      write_text(prefix + ".bin", tokens.substr(0, size));
      for (const bool map : {true, false}) {
        const std::string message = open_all(prefix, map);
        CHECK(contains(message, concat(".bin has ", size, " bytes")));
      }
    }
  }
}

TEST_CASE("without mapping a file that shrinks while open is an error, not garbage", "[cpu]") {
  const TemporaryFolder folder;
  write_corpus(folder / "c", {{1, 2, 3, 4}, {5, 6, 7, 8}});
  const IndexedDataset dataset(folder / "c", false);
  std::filesystem::resize_file(folder / "c.bin", 10);
  std::vector<std::int64_t> out(4);
  CHECK(contains(error_of<DataError>([&] { dataset.read(1, 0, 4, out.data()); }), "became shorter"));
}

TEST_CASE("an index without sequences opens and is empty", "[cpu]") {
  const TemporaryFolder folder;
  IndexedDatasetWriter writer(folder / "c", TokenType::kUint16);
  writer.end_document();
  writer.finish();
  const IndexedDataset dataset(folder / "c");
  CHECK(dataset.size() == 0);
  CHECK(dataset.boundaries() == 2);
}

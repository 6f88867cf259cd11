// Random streams and checksums of the data pipeline against vectors of numpy and PyTorch.
#include <numeric>

#include "pgpt/data/description.h"
#include "pgpt/data/documents.h"
#include "pgpt/data/random.h"
#include "support/catch.h"
#include "test_data_support.h"

using namespace pgpt::data;
using namespace pgpt::data::test;

namespace {

template <class T>
std::vector<T> arange(std::size_t n) {
  std::vector<T> values(n);
  std::iota(values.begin(), values.end(), T{0});
  return values;
}

template <class T>
void check_shuffle(NumpyRandomState& random, std::size_t n, const json& expected) {
  auto values = arange<T>(n);
  random.shuffle(std::span<T>(values));
  CHECK(crc_of(values) == expected.value("crc32_le", std::uint32_t{0}));
  const auto first = expected.at("first").get<std::vector<T>>();
  CHECK(std::equal(first.begin(), first.end(), values.begin()));
}

}  // namespace

TEST_CASE("the MT19937 stream and the shuffles are those of numpy's RandomState", "[cpu]") {
  const json rng = golden("rng.json");
  NumpyRandomState raw(1234);
  for (const auto& word : rng["mt19937_seed_1234_first_u32"]) CHECK(raw.next32() == word.get<std::uint32_t>());
  CHECK(NumpyRandomState(0).next32() == rng["mt19937_seed_0_first_u32"][0].get<std::uint32_t>());
  for (const auto& [text, expected] : rng["randomstate_1234_shuffle_of_arange"].items()) {
    const std::size_t n = std::stoul(text);
    NumpyRandomState random(1234);
    check_shuffle<std::int32_t>(random, n, expected["int32"]);
    if (!expected.contains("int64")) continue;
    NumpyRandomState wide(1234);
    check_shuffle<std::int64_t>(wide, n, expected["int64"]);
    NumpyRandomState narrow(1234);
    check_shuffle<std::uint32_t>(narrow, n, expected["uint32"]);
    check_shuffle<std::int32_t>(random, n, expected["second_shuffle_same_state_int32"]);
    CHECK(random.next32() == expected["next_raw_u32_after_two_shuffles"].get<std::uint32_t>());
  }
}

TEST_CASE("draws above 32 bits take the high word first", "[cpu]") {
  // Two words of seed 1234 make 822569775 * 2^32 + 2137449171; 2^40 - 1 keeps the low 40 bits.
  NumpyRandomState random(1234);
  const std::uint64_t both = (std::uint64_t{822569775} << 32) | 2137449171U;
  CHECK(random.bounded((std::uint64_t{1} << 40) - 1) == (both & ((std::uint64_t{1} << 40) - 1)));
}

TEST_CASE("the PCG64 chain is that of numpy's default_rng", "[cpu]") {
  const json rng = golden("rng.json");
  NumpyGenerator wide(0);
  CHECK(std::vector<std::uint32_t>(wide.pool().begin(), wide.pool().end()) ==
        rng["seedsequence_0"]["pool_u32"].get<std::vector<std::uint32_t>>());
  for (const auto& hex : rng["pcg64_seed_0"]["first_u64_hex"]) {
    CHECK(wide.next64() == std::stoull(hex.get<std::string>(), nullptr, 16));
  }
  NumpyGenerator halves(0);
  for (const auto& word : rng["pcg64_seed_0"]["first_u32_as_drawn_by_int32_sampler"]) {
    CHECK(halves.next32() == word.get<std::uint32_t>());
  }
}

TEST_CASE("the mock documents have numpy's lengths and the ramp as content", "[cpu]") {
  const json expected = golden("mock_lengths.json");
  const MockDocuments mock(128, 127);
  REQUIRE(mock.size() == expected["count"].get<std::int64_t>());
  std::vector<std::int32_t> lengths;
  for (std::int64_t i = 0; i < mock.size(); ++i) lengths.push_back(static_cast<std::int32_t>(mock.length(i)));
  CHECK(crc_of(lengths) == expected["crc32_le_int32"].get<std::uint32_t>());
  CHECK(std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}) == expected["sum"].get<std::int64_t>());
  for (const auto& [index, document] : expected["example_documents_vocab_128"].items()) {
    const std::int64_t i = std::stoll(index);
    const std::int64_t length = mock.length(i);
    REQUIRE(length == document["length"].get<std::int64_t>());
    std::vector<std::int64_t> tokens(16);
    mock.read(i, 0, 16, tokens.data());
    CHECK(tokens == document["tokens_first16"].get<std::vector<std::int64_t>>());
    mock.read(i, length - 16, 16, tokens.data());
    CHECK(tokens == document["tokens_last16"].get<std::vector<std::int64_t>>());
  }
}

TEST_CASE("randperm is that of a PyTorch CPU generator", "[cpu]") {
  const json rows = golden("rng.json")["torch_randperm_cpu"];
  for (const auto& [name, expected] : rows.items()) {
    long n = 0;
    unsigned long seed = 0;
    REQUIRE(std::sscanf(name.c_str(), "n=%ld,seed=%lu", &n, &seed) == 2);
    const auto values = torch_randperm(n, seed);
    CHECK(crc_of(values) == expected["crc32_le_int64"].get<std::uint32_t>());
    const auto first = expected["first"].get<std::vector<std::int64_t>>();
    CHECK(std::equal(first.begin(), first.end(), values.begin()));
  }
  CHECK(torch_randperm(0, 1).empty());
  CHECK(torch_randperm(1, 1) == std::vector<std::int64_t>{0});
}

TEST_CASE("checksums give the published values", "[cpu]") {
  CHECK(crc_of(std::string("123456789")) == 0xCBF43926U);  // the CRC-32 check value
  const std::string text(1000, 'x');
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(text.data()), text.size());
  for (const std::size_t cut : {0U, 1U, 7U, 8U, 500U})
    CHECK(crc32(bytes.subspan(cut), crc32(bytes.first(cut))) == crc32(bytes));
  // RFC 1321's own examples, and one across the padding boundary.
  CHECK(md5_hex("") == "d41d8cd98f00b204e9800998ecf8427e");
  CHECK(md5_hex("abc") == "900150983cd24fb0d6963f7d28e17f72");
  CHECK(md5_hex("12345678901234567890123456789012345678901234567890123456789012345678901234567890") ==
        "57edf4a22be3c955ac49da2e2107b67a");
}

TEST_CASE("floats print as Python prints them", "[cpu]") {
  CHECK(python_float(1.0) == "1.0");
  CHECK(python_float(0.3333333333333333) == "0.3333333333333333");
  CHECK(python_float(1e-4) == "0.0001");
  CHECK(python_float(1e-5) == "1e-05");
  CHECK(python_float(123456.0) == "123456.0");
  CHECK(python_float(1e15) == "1000000000000000.0");
  CHECK(python_float(1e16) == "1e+16");
  CHECK(python_float(1.5e300) == "1.5e+300");
}

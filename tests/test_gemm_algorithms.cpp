// The choices of matrix product algorithms and their file, without a GPU.

#include "pgpt/base/error.h"
#include "pgpt/kernels/gemm_algorithms.h"
#include "support/catch.h"
#include "support/text.h"

using namespace pgpt;
using namespace pgpt::kernels;
using test::contains;

namespace {

const GemmLibrary kLibrary{"GPU \"A\"", 130100};

GemmShape shape(std::int64_t rows) {
  GemmShape s;
  s.rows = rows;
  s.columns = 24;
  s.inner = 4096;
  s.transpose_b = true;
  s.input = GemmType::kFloat16;
  s.output = GemmType::kFloat32;
  s.accumulate = true;
  s.alignment = 16;
  return s;
}

GemmAlgorithm algorithm(std::int64_t id) {
  GemmAlgorithm a;
  a.id = id;
  a.tile = 20;
  a.stages = 31;
  a.split_k = 2;
  a.reduction_scheme = 2;
  a.swizzle = 1;
  a.custom_option = 3;
  a.inner_shape = 4;
  a.cluster_shape = 5;
  a.workspace = 33554432;
  a.words = {0, 1, 0xFFFFFFFFFFFFFFFFULL, 0x0123456789ABCDEFULL, 4, 5, 6, static_cast<std::uint64_t>(id)};
  a.microseconds = 12.345678;
  a.heuristic_microseconds = 13;
  return a;
}

/// A file with two products.
std::string file_text() {
  GemmAlgorithms algorithms;
  algorithms.add(shape(8), algorithm(66), true);
  algorithms.add(shape(16), algorithm(67), true);
  return algorithms.to_json(kLibrary);
}

std::string replaced(std::string text, const std::string& part, const std::string& by) {
  const std::size_t place = text.find(part);
  REQUIRE(place != std::string::npos);
  return text.replace(place, part.size(), by);
}

std::string error_of(const std::string& text, const GemmLibrary& library = kLibrary) {
  return test::error_of<DataError>([&] { GemmAlgorithms().read(text, "choices.json", library); });
}

}  // namespace

TEST_CASE("the file of algorithms brings back every value of the choices that were measured", "[cpu]") {
  GemmAlgorithms first;
  CHECK_FALSE(first.grown());
  first.add(shape(8), algorithm(66), true);
  first.add(shape(16), algorithm(67), true);
  first.add(shape(24), algorithm(68), false);  // a suggestion that nobody measured
  CHECK(first.grown());
  first.clear_grown();
  CHECK_FALSE(first.grown());
  const std::string text = first.to_json(kLibrary);

  GemmAlgorithms second;
  second.read(text, "choices.json", kLibrary);
  CHECK(second.size() == 2);
  CHECK_FALSE(second.grown());
  CHECK((second.kept() == first.kept()));
  REQUIRE(second.find(shape(16)) != nullptr);
  CHECK(*second.find(shape(16)) == algorithm(67));
  CHECK(second.find(shape(24)) == nullptr);
  CHECK(second.to_json(kLibrary) == text);
}

TEST_CASE("each part of a shape makes it another product", "[cpu]") {
  GemmAlgorithms algorithms;
  algorithms.add(shape(8), algorithm(66), true);
  const auto known = [&](auto change) {
    GemmShape other = shape(8);
    change(other);
    return algorithms.find(other) != nullptr;
  };
  CHECK(known([](GemmShape&) {}));
  CHECK_FALSE(known([](GemmShape& s) { ++s.rows; }));
  CHECK_FALSE(known([](GemmShape& s) { ++s.columns; }));
  CHECK_FALSE(known([](GemmShape& s) { ++s.inner; }));
  CHECK_FALSE(known([](GemmShape& s) { s.transpose_a = true; }));
  CHECK_FALSE(known([](GemmShape& s) { s.transpose_b = false; }));
  CHECK_FALSE(known([](GemmShape& s) { s.input = GemmType::kBFloat16; }));
  CHECK_FALSE(known([](GemmShape& s) { s.output = GemmType::kFloat16; }));
  CHECK_FALSE(known([](GemmShape& s) { s.bias = true; }));
  CHECK_FALSE(known([](GemmShape& s) { s.accumulate = false; }));
  CHECK_FALSE(known([](GemmShape& s) { s.alignment = 128; }));
}

TEST_CASE("a damaged or foreign file of algorithms is refused with its name and what to do", "[cpu]") {
  const std::string good = file_text();
  REQUIRE(error_of(good).empty());
  struct Case {
    std::string text, message;
  };
  const std::vector<Case> cases = {
      {"", "parse error"},
      {good.substr(0, good.size() / 2), "parse error"},
      {"[]", "choices.json"},
      {replaced(good, "version 1", "version 2"), "its format is"},
      {replaced(good, "\"cublaslt_version\": 130100", "\"cublaslt_version\": 120900"),
       "it holds choices for GPU \"A\" and cuBLASLt 120900, but this is GPU \"A\" with cuBLASLt 130100"},
      {replaced(good, "\"rows\":8", "\"rows\":16"), "it has two entries for [16,24] += [16,4096] * [24,4096]^T"},
      {replaced(good, "\"rows\":8", "\"rows\":0"), "a size is not positive"},
      {replaced(good, "\"rows\":8", "\"rows\":8.5"), "values or names"},
      {replaced(good, "\"rows\":8", "\"rows\":\"8\""), "type must be number"},
      {replaced(good, "\"alignment\":16", "\"alignment\":64"), "\"alignment\" is 64"},
      {replaced(good, "\"input\":\"fp16\"", "\"input\":\"fp32\""), "\"input\" is fp32"},
      {replaced(good, "\"input\":\"fp16\"", "\"input\":\"fp8\""), "unknown type fp8"},
      {replaced(good, "\"output\":\"fp32\"", "\"output\":\"bf16\""), "\"output\" does not fit"},
      {replaced(good, "\"tile\":20,", ""), "key 'tile' not found"},
      {replaced(good, "\"tile\":20,", "\"tile\":20,\"more\":1,"), "values or names"},
      {replaced(good, "0123456789abcdef", "0123456789abcde"), "\"words\" has 127 digits"},
      {replaced(good, "0123456789abcdef", "0123456789abcdeg"), "values or names"},
  };
  for (const Case& c : cases) {
    const std::string error = error_of(c.text);
    INFO("file " << c.text << "\nerror " << error);
    CHECK(contains(error, c.message));
    CHECK(contains(error, "--gemm-algorithms choices.json: "));
    CHECK(contains(error, "delete it, or name another file"));
  }
  const std::string other_device = error_of(good, {"GPU B", 130100});
  CHECK(contains(other_device, "but this is GPU B with"));
}

TEST_CASE("every rank takes the choice of rank 0, and ranks that compute different products say so", "[cpu]") {
  std::string sent;
  GemmAlgorithms chooser, follower;
  chooser.tune(true, [&](const std::string& mine) { return sent = mine; });
  follower.tune(false, [&](const std::string&) { return sent; });
  CHECK(chooser.chooser());
  CHECK_FALSE(follower.chooser());
  CHECK(chooser.add_agreed(shape(8), algorithm(66)) == algorithm(66));
  CHECK(follower.add_agreed(shape(8), GemmAlgorithm()) == algorithm(66));
  CHECK(follower.grown());
  CHECK(follower.to_json(kLibrary) == chooser.to_json(kLibrary));
  CHECK_THROWS_AS(follower.add_agreed(shape(16), GemmAlgorithm()), CommError);
  // Alone, a rank keeps its own.
  GemmAlgorithms alone;
  alone.tune(true, {});
  CHECK(alone.add_agreed(shape(8), algorithm(70)) == algorithm(70));
}

// Random fills against golden values of CUDA generators (tests/data/golden_seed).

#include <ATen/Parallel.h>

#include <cmath>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "../src/kernels/parallel.h"
#include "pgpt/base/error.h"
#include "pgpt/kernels/kernels.h"
#include "support/json.h"
#include "support/safetensors_reader.h"
#include "support/tensor_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

const std::string kGolden = std::string(PGPT_TEST_DATA) + "/golden_seed/";

at::ScalarType type_of(const std::string& name) {
  return name == "bfloat16" ? at::kBFloat16 : name == "float16" ? at::kHalf : at::kFloat;
}

at::Tensor golden_tensor(const StoredTensor& stored) {
  REQUIRE(stored.dtype == "BF16");
  at::Tensor tensor = at::empty(stored.shape, at::kBFloat16);
  REQUIRE(tensor.nbytes() == stored.bytes.size());
  std::memcpy(tensor.mutable_data_ptr(), stored.bytes.data(), stored.bytes.size());
  return tensor;
}

// Largest error of an fp32 draw: the GPU's fast sine and cosine are off by at most 2^-21 or so, the radius is below
// sqrt(2 * 33 ln 2) = 6.8, and a few roundoffs are ours.
double normal_error(double std) { return std * 6.8 * (0x1p-21 + 4 * kRoundoff32); }

// One step of bf16 at |value|: 2^-7 of its power of two.
at::Tensor bf16_step(const at::Tensor& value) {
  return at::exp2(at::floor(at::log2(value.abs().clamp_min(1e-30)))) * 0x1p-7;
}

}  // namespace

TEST_CASE("CPU normal fills repeat the draws of CUDA generators", "[cpu]") {
  const nlohmann::json entries = read_json(kGolden + "cuda_normal.json");
  for (const auto& entry : entries) {
    INFO(entry.at("seed") << " " << entry.at("shape") << " " << entry.at("dtype"));
    const at::ScalarType type = type_of(entry.at("dtype").get<std::string>());
    const auto std = entry.at("std").get<double>();
    const auto processors = entry.at("multi_processor_count").get<std::int64_t>();
    PhiloxState state{entry.at("seed").get<std::uint64_t>(), 0};
    at::Tensor tensor = at::empty(entry.at("shape").get<std::vector<std::int64_t>>(), type);
    philox_normal_(tensor, std, state, processors);
    const double error = normal_error(std);
    const auto check = [&](const at::Tensor& actual, const std::vector<double>& expected) {
      const at::Tensor wanted = at::tensor(expected, at::kDouble);
      // In bf16 such an error may end in the neighbouring number.
      const at::Tensor bound = type == at::kFloat ? at::full_like(wanted, error) : error + bf16_step(wanted);
      require_within(actual.flatten(), wanted, bound);
      if (type == at::kBFloat16) CHECK(mismatches(actual.flatten().to(at::kDouble), wanted) <= 1);
    };
    const auto index = entry.at("index").get<std::vector<std::int64_t>>();
    const at::Tensor flat = tensor.flatten();
    check(flat.index_select(0, at::tensor(index, at::kLong)), entry.at("value").get<std::vector<double>>());
    // fp32: every element within the error. bf16: fewer than 1 in 1000 off by one step, which is below std / 2^7 * 4
    // for values below 8 std.
    const auto count = static_cast<double>(flat.numel());
    const double sum_error = type == at::kFloat ? count * error : count / 1000 * std / 32;
    CHECK(std::abs(flat.to(at::kDouble).sum().item<double>() - entry.at("sum").get<double>()) <= sum_error);
    // The next draw on the stream: the offset has moved by 4 for each pass.
    const std::int64_t threads = 256 * std::min<std::int64_t>(8 * processors, (flat.numel() + 255) / 256);
    CHECK(state.offset == static_cast<std::uint64_t>(4 * ((flat.numel() + 4 * threads - 1) / (4 * threads))));
    at::Tensor next = at::empty({5, 3}, type);
    philox_normal_(next, std, state, processors);
    check(next, entry.at("next_draw_5x3").get<std::vector<double>>());
  }
}

TEST_CASE("CPU uniform fills repeat the draws of CUDA generators exactly", "[cpu]") {
  const nlohmann::json entries = read_json(kGolden + "cuda_uniform.json");
  for (const auto& entry : entries) {
    INFO(entry.at("seed") << " " << entry.at("shape") << " " << entry.at("dtype"));
    const at::ScalarType type = type_of(entry.at("dtype").get<std::string>());
    const auto bound = entry.at("bound").get<double>();
    const auto processors = entry.at("multi_processor_count").get<std::int64_t>();
    PhiloxState state{entry.at("seed").get<std::uint64_t>(), 0};
    at::Tensor tensor = at::empty(entry.at("shape").get<std::vector<std::int64_t>>(), type);
    philox_uniform_(tensor, bound, state, processors);
    const at::Tensor flat = tensor.flatten().to(at::kDouble);
    const auto index = entry.at("index").get<std::vector<std::int64_t>>();
    require_within(flat.index_select(0, at::tensor(index, at::kLong)),
                   at::tensor(entry.at("value").get<std::vector<double>>(), at::kDouble), 0.0);
    // Two orders of summing the same numbers in fp64.
    const double sum_error = static_cast<double>(flat.numel()) * kRoundoff64 * flat.abs().sum().item<double>();
    CHECK(std::abs(flat.sum().item<double>() - entry.at("sum").get<double>()) <= sum_error);
    at::Tensor next = at::empty({5, 3}, type);
    philox_uniform_(next, bound, state, processors);
    require_within(next.flatten(), at::tensor(entry.at("next_draw_5x3").get<std::vector<double>>(), at::kDouble), 0.0);
  }
}

TEST_CASE("the initial weights of the seed model come out as the reference drew them", "[cpu]") {
  struct Draw {
    const char* name;
    std::vector<std::int64_t> shape;
    double std;
  };
  const std::vector<Draw> layers = {
      {"self_attention.linear_proj.weight", {128, 128}, 0.01},
      {"self_attention.linear_qkv.weight", {384, 128}, 0.02},
      {"mlp.linear_fc1.weight", {256, 128}, 0.02},
      {"mlp.linear_fc2.weight", {128, 256}, 0.01},
  };
  std::int64_t drawn = 0, different = 0;
  const auto compare = [&](const at::Tensor& actual, const at::Tensor& expected) {
    require_within(actual, expected, bf16_step(expected.to(at::kDouble)) + normal_error(0.02));
    drawn += actual.numel();
    different += mismatches(actual, expected);
  };
  const auto draw = [](const std::vector<std::int64_t>& shape, double std, PhiloxState& state) {
    at::Tensor tensor = at::empty(shape, at::kBFloat16);
    philox_normal_(tensor, std, state, 132);
    return tensor;
  };

  const auto local = read_safetensors(kGolden + "init_local.safetensors");
  const auto name_in = [](const auto& file, const std::string& name) {
    REQUIRE(file.count(name) == 1);
    return golden_tensor(file.at(name));
  };
  PhiloxState stream{3952, 0};
  compare(draw({128, 128}, 0.02, stream), name_in(local, "embedding.word_embeddings.weight"));
  for (const std::string layer : {"decoder.layers.0.", "decoder.layers.1."}) {
    for (const Draw& d : layers) compare(draw(d.shape, d.std, stream), name_in(local, layer + d.name));
  }
  compare(draw({128, 128}, 0.02, stream), name_in(local, "output_layer.weight"));

  const auto sharded = read_safetensors(kGolden + "init_te_gtp2.safetensors");
  for (const std::int64_t rank : {0, 1}) {
    PhiloxState peer{static_cast<std::uint64_t>(3952 + 65536 * (1 + rank)), 0};
    for (const std::string layer : {"decoder.layers.0.", "decoder.layers.1."}) {
      for (const Draw& d : layers) {
        const std::int64_t rows = d.shape[0] / 2;
        compare(draw({rows, d.shape[1]}, d.std, peer), name_in(sharded, layer + d.name).narrow(0, rank * rows, rows));
      }
    }
  }
  // Exact sine and cosine instead of the GPU's: 1 bf16 element in about 4000.
  INFO(different << " of " << drawn << " elements off by one step");
  CHECK(drawn == 2 * 294912 - 2 * 16384);
  CHECK(different * 1000 < drawn);
}

TEST_CASE("random fills do not depend on the number of threads", "[cpu]") {
  const int threads = at::get_num_threads();
  PhiloxState a{7, 8}, b{7, 8};
  at::Tensor one = at::empty({70001}, at::kFloat), two = at::empty({70001}, at::kFloat);
  at::set_num_threads(1);
  philox_normal_(one, 1.0, a, 4);
  at::set_num_threads(2);
  philox_normal_(two, 1.0, b, 4);
  at::set_num_threads(threads);
  require_equal(one, two);
  CHECK(a.offset == b.offset);
}

TEST_CASE("loops of the CPU kernels run on libtorch's threads, cover their range once and pass on errors", "[cpu]") {
  const int threads = at::get_num_threads();
  at::set_num_threads(3);
  std::mutex mutex;
  std::set<std::thread::id> ids;
  std::vector<int> visits(1000, 0);
  kernels::detail::parallel_for(10, 1000, 7, [&](std::int64_t begin, std::int64_t end) {
    const std::lock_guard lock(mutex);
    ids.insert(std::this_thread::get_id());
    for (std::int64_t i = begin; i < end; ++i) ++visits.at(static_cast<std::size_t>(i));
  });
  CHECK(ids.size() == 3);
  for (std::size_t i = 0; i < visits.size(); ++i) CHECK(visits[i] == (i < 10 ? 0 : 1));
  const auto fail = [](std::int64_t, std::int64_t) { throw DataError("an element is wrong"); };
  CHECK_THROWS_AS(kernels::detail::parallel_for(0, 100, 1, fail), DataError);
  at::set_num_threads(threads);
}

// Matrix products through cuBLASLt: against fp64, with the library's suggestions and with timed choices, and the file
// that keeps the choices.

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "pgpt/base/error.h"
#include "pgpt/kernels/gemm_algorithms.h"
#include "support/gpu_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

Policy with(GemmAlgorithms& algorithms) { return {true, true, &algorithms}; }

/// Inputs of one linear layer.
struct Layer {
  Layer(std::int64_t tokens, std::int64_t inputs, std::int64_t outputs, at::ScalarType type, std::uint64_t seed)
      : x(gpu_normal({tokens, inputs}, seed, type)),
        w(gpu_normal({outputs, inputs}, seed + 1, type)),
        dy(gpu_normal({tokens, outputs}, seed + 2, type)),
        bias(gpu_normal({outputs}, seed + 3, type)),
        main(gpu_normal({outputs, inputs}, seed + 4, at::kFloat)) {}
  at::Tensor x, w, dy, bias;
  at::Tensor main;  // [outputs, inputs] fp32, what gradients are added to
};

/// Each of `terms` additions in fp32 is off by at most one unit in the last place, 2 roundoffs, of the sum of
/// magnitudes (tensor cores truncate); three more for scale, bias or old value, and rounding. A sixteenth more, since
/// up to three later roundings to the type multiply that error by at most (1 + 2^-8)^3.
at::Tensor bound(const at::Tensor& exact, const at::Tensor& magnitudes, std::int64_t terms, at::ScalarType type) {
  return exact.abs() * roundoff(type) + magnitudes * (2.0 * (static_cast<double>(terms) * 17 / 16 + 3) * kRoundoff32) +
         0x1p-25;
}

/// Every product of a layer, compared with fp64.
void check_layer(const Layer& l, const Policy& policy) {
  const at::ScalarType type = l.x.scalar_type();
  const at::Tensor x = wide(l.x), w = wide(l.w), dy = wide(l.dy), bias = wide(l.bias), main = wide(l.main);
  const std::int64_t tokens = x.size(0), inputs = x.size(1), outputs = w.size(0);
  const at::Tensor y = x.mm(w.t()), y_size = x.abs().mm(w.abs().t());
  const at::Tensor dx = dy.mm(w), dx_size = dy.abs().mm(w.abs());
  const at::Tensor dw = dy.t().mm(x), dw_size = dy.abs().t().mm(x.abs());
  const auto check = [](const at::Tensor& actual, at::ScalarType wanted, const at::Tensor& exact,
                        const at::Tensor& limit) {
    REQUIRE(actual.scalar_type() == wanted);
    require_within(actual, exact, limit);
  };
  check(kernels::linear(l.x, l.w, {}, true, policy), type, y, bound(y, y_size, inputs, type));
  check(kernels::linear(l.x, l.w, l.bias, true, policy), type, y + bias,
        bound(y + bias, y_size + bias.abs(), inputs, type));
  // Product rounded, then sum rounded.
  check(kernels::linear(l.x, l.w, l.bias, false, policy), type, y + bias,
        bound(y + bias, y_size + bias.abs(), inputs, type) + y.abs() * (roundoff(type) * (1 + roundoff(type))));
  check(linear_input_gradient(l.dy, l.w, policy), type, dx, bound(dx, dx_size, outputs, type));
  check(linear_weight_gradient(l.dy, l.x, type, policy), type, dw, bound(dw, dw_size, tokens, type));
  check(linear_weight_gradient(l.dy, l.x, at::kFloat, policy), at::kFloat, dw, bound(dw, dw_size, tokens, at::kFloat));
  for (const double scale : {1.0, 0.5, 1.0 / 3}) {
    for (const bool overwrite : {false, true}) {
      INFO("scale " << scale << (overwrite ? ", overwriting" : ", adding"));
      at::Tensor gradient = l.main.clone();
      add_weight_gradient(gradient, l.dy, l.x, scale, overwrite, policy);
      const at::Tensor before = overwrite ? at::zeros_like(main) : main;
      check(gradient, at::kFloat, before + dw * scale,
            bound(before + dw * scale, before.abs() + dw_size * scale, tokens, at::kFloat));
      // 16-bit gradients: product rounded, scaled and rounded, added and rounded.
      at::Tensor narrow = l.main.to(type);
      const at::Tensor old = overwrite ? at::zeros_like(main) : wide(narrow);
      add_weight_gradient(narrow, l.dy, l.x, scale, overwrite, policy);
      check(narrow, type, old + dw * scale,
            bound(old + dw * scale, old.abs() + dw_size * scale, tokens, type) +
                (dw * scale).abs() * (roundoff(type) * (2 + 3 * roundoff(type))) + 0x1p-24);
    }
  }
}

/// Results of every kind of product of a layer.
std::vector<at::Tensor> all_products(const Layer& l, const Policy& policy) {
  std::vector<at::Tensor> results = {
      kernels::linear(l.x, l.w, {}, true, policy), kernels::linear(l.x, l.w, l.bias, true, policy),
      linear_input_gradient(l.dy, l.w, policy), linear_weight_gradient(l.dy, l.x, l.x.scalar_type(), policy),
      linear_weight_gradient(l.dy, l.x, at::kFloat, policy)};
  at::Tensor gradient = l.main.clone();
  add_weight_gradient(gradient, l.dy, l.x, 0.5, false, policy);
  results.push_back(gradient);
  return results;
}

/// `t` at an address that is a multiple of 16 bytes but not of 128.
at::Tensor shifted(const at::Tensor& t) {
  const std::int64_t elements = 16 / static_cast<std::int64_t>(t.element_size());
  at::Tensor copy = at::empty({t.numel() + elements}, t.options()).narrow(0, elements, t.numel()).view(t.sizes());
  copy.copy_(t);
  return copy;
}

/// 32 tokens, 16 inputs and 24 outputs, cut out of matrices with `stride` columns.
Layer strided_layer(std::int64_t stride) {
  Layer l(32, 16, 24, at::kBFloat16, 4);
  l.x = gpu_normal({32, stride}, 5, at::kBFloat16).narrow(1, 0, 16);
  l.w = gpu_normal({24, stride}, 6, at::kBFloat16).narrow(1, 0, 16);
  l.dy = gpu_normal({32, stride}, 7, at::kBFloat16).narrow(1, 0, 24);
  return l;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const DataError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("cuBLASLt products of every layout, type, bias, scale and sum match fp64", "[gpu]") {
  if (!at::hasCUDA()) return;
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    for (const bool tuned : {false, true}) {
      GemmAlgorithms algorithms;
      if (tuned) algorithms.tune(true, {});
      // The second has few results and long sums, which get split.
      for (const auto& [tokens, inputs, outputs] : {std::array<std::int64_t, 3>{136, 264, 72}, {4096, 64, 128}}) {
        INFO(type << (tuned ? ", timed, " : ", suggested, ") << tokens << " tokens, " << inputs << " to " << outputs);
        const Layer layer(tokens, inputs, outputs, type, 1);
        check_layer(layer, with(algorithms));
        const std::size_t shapes = algorithms.size();
        CHECK(shapes > 0);
        check_layer(layer, with(algorithms));  // the choices are made: other code runs now
        CHECK(algorithms.size() == shapes);
      }
      // y with and without bias, dx, dw in two types, dw added: for each of the sizes.
      CHECK(algorithms.size() == 2 * 6);
      CHECK(algorithms.kept().size() == (tuned ? algorithms.size() : 0));
    }
  }
}

TEST_CASE("a first product that is timed is added once", "[gpu]") {
  if (!at::hasCUDA()) return;
  // Small whole numbers: every sum is exact, so a second addition would be seen.
  const auto ones = [](at::IntArrayRef sizes) {
    return at::ones(sizes, at::TensorOptions().dtype(at::kBFloat16).device(at::kCUDA));
  };
  GemmAlgorithms algorithms;
  algorithms.tune(true, {});
  at::Tensor sum = at::full({16, 32}, 7, at::TensorOptions().dtype(at::kFloat).device(at::kCUDA));
  const at::Tensor dy = ones({64, 16}), x = ones({64, 32});
  add_weight_gradient(sum, dy, x, 1.0, false, with(algorithms));
  CHECK(sum.eq(7 + 64).all().item<bool>());
  add_weight_gradient(sum, dy, x, 1.0, false, with(algorithms));
  CHECK(sum.eq(7 + 2 * 64).all().item<bool>());
  add_weight_gradient(sum, dy, x, 2.0, true, with(algorithms));
  CHECK(sum.eq(2 * 64).all().item<bool>());
}

TEST_CASE("tensors that cuBLASLt is not used for give libtorch's bits", "[gpu]") {
  if (!at::hasCUDA()) return;
  GemmAlgorithms algorithms;
  const auto same_as_libtorch = [&](const Layer& l) {
    const std::vector<at::Tensor> ours = all_products(l, with(algorithms)), theirs = all_products(l, kFast);
    for (std::size_t i = 0; i < ours.size(); ++i) require_same(ours[i], theirs[i]);
    CHECK(algorithms.size() == 0);
  };
  same_as_libtorch({8, 13, 9, at::kBFloat16, 1});  // rows that are no multiples of 16 bytes
  same_as_libtorch({32, 16, 24, at::kFloat, 2});   // fp32
  same_as_libtorch({32, 16, 24, at::kDouble, 3});  // fp64
  same_as_libtorch(strided_layer(36));             // rows that lie a number of bytes apart that is no multiple of 16
}

TEST_CASE("rows that lie apart are multiplied as contiguous ones", "[gpu]") {
  if (!at::hasCUDA()) return;
  GemmAlgorithms algorithms;
  const Layer strided = strided_layer(48);
  check_layer(strided, with(algorithms));
  CHECK(algorithms.size() == 6);
  Layer packed = strided;
  for (at::Tensor* t : {&packed.x, &packed.w, &packed.dy}) *t = t->contiguous();
  const std::vector<at::Tensor> apart = all_products(strided, with(algorithms)),
                                together = all_products(packed, with(algorithms));
  CHECK(algorithms.size() == 6);  // the same algorithms
  for (std::size_t i = 0; i < apart.size(); ++i) require_same(apart[i], together[i]);
}

TEST_CASE("operands at addresses of 16 bytes are products of their own", "[gpu]") {
  if (!at::hasCUDA()) return;
  GemmAlgorithms algorithms;
  Layer layer(136, 264, 72, at::kBFloat16, 1);
  check_layer(layer, with(algorithms));
  CHECK(algorithms.size() == 6);
  layer.x = shifted(layer.x);
  layer.w = shifted(layer.w);
  check_layer(layer, with(algorithms));
  CHECK(algorithms.size() == 2 * 6);
}

TEST_CASE("a file of algorithms gives the next run the same choices and bits", "[gpu]") {
  if (!at::hasCUDA()) return;
  const std::optional<GemmLibrary> library = gemm_library();
  REQUIRE(library);
  CHECK_FALSE(library->device.empty());
  const std::vector<Layer> layers = {{512, 256, 384, at::kBFloat16, 1}, {4096, 64, 128, at::kBFloat16, 2}};
  GemmAlgorithms first;
  first.tune(true, {});
  std::vector<at::Tensor> results;
  for (const Layer& l : layers) {
    for (const at::Tensor& t : all_products(l, with(first))) results.push_back(t);
  }
  CHECK(first.grown());
  const std::string text = first.to_json(*library);

  GemmAlgorithms second;
  second.read(text, "file", *library);
  check_gemm_algorithms(second, "file");
  CHECK((second.kept() == first.kept()));
  second.tune(true, {});
  std::vector<at::Tensor> again;
  for (const Layer& l : layers) {
    for (const at::Tensor& t : all_products(l, with(second))) again.push_back(t);
  }
  CHECK_FALSE(second.grown());
  REQUIRE(again.size() == results.size());
  for (std::size_t i = 0; i < results.size(); ++i) require_same(again[i], results[i]);
  // Without a file the library's suggestion repeats too.
  GemmAlgorithms plain, also_plain;
  const std::vector<at::Tensor> a = all_products(layers[0], with(plain)), b = all_products(layers[0], with(also_plain));
  for (std::size_t i = 0; i < a.size(); ++i) require_same(a[i], b[i]);
}

TEST_CASE("algorithms that are timed for long compute the same products", "[gpu]") {
  if (!at::hasCUDA()) return;
  GemmAlgorithms algorithms;
  algorithms.tune(true, {}, 12);
  check_layer({512, 256, 384, at::kBFloat16, 1}, with(algorithms));
  CHECK(algorithms.size() == 6);
}

TEST_CASE("an entry that the library does not take is refused by its shape", "[gpu]") {
  if (!at::hasCUDA()) return;
  const GemmLibrary library = gemm_library().value();
  GemmAlgorithms tuned;
  tuned.tune(true, {});
  const Layer layer(512, 256, 384, at::kBFloat16, 1);
  (void)kernels::linear(layer.x, layer.w, {}, true, with(tuned));
  REQUIRE(tuned.kept().size() == 1);
  const auto& [shape, algorithm] = *tuned.kept().begin();
  const auto error_with = [&, s = shape](const GemmAlgorithm& changed) {
    GemmAlgorithms other;
    other.add(s, changed, true);
    return error_of([&] { check_gemm_algorithms(other, "choices.json"); });
  };
  CHECK(error_with(algorithm).empty());
  GemmAlgorithm other_tile = algorithm, other_split = algorithm, nonsense = algorithm;
  ++other_tile.tile;
  nonsense.words.fill(0xFFFFFFFFFFFFFFFFULL);
  ++other_split.split_k;
  for (const GemmAlgorithm& changed : {other_tile, other_split, nonsense}) {
    const std::string error = error_with(changed);
    INFO(error);
    CHECK(error.find("--gemm-algorithms choices.json: the entry for [512,384] = [512,256] * [384,256]^T") !=
          std::string::npos);
    CHECK(error.find("delete the file") != std::string::npos);
  }
}

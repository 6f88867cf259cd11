// Seconds of the matrix products of one step: libtorch's, cuBLASLt's first suggestion, and the fastest suggestion.
// Hidden from normal runs: test_kernels "[.bench-gemm]". About 40 s on one H200.

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "pgpt/kernels/gemm_algorithms.h"
#include "support/gpu_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

struct Matrix {
  const char* name;
  std::int64_t outputs, inputs;
  int count;  // in the model
  bool bias;  // added in the product
};

struct Model {
  const char* name;
  std::int64_t tokens;
  std::vector<Matrix> matrices;
};

/// Recipes of configs/, one micro-batch.
std::vector<Model> models() {
  const auto gpt2 = [](const char* name, int layers, std::int64_t h, std::int64_t tokens) {
    return Model{name,
                 tokens,
                 {{"qkv", 3 * h, h, layers, true},
                  {"proj", h, h, layers, false},
                  {"fc1", 4 * h, h, layers, false},
                  {"fc2", h, 4 * h, layers, false},
                  {"output", 50304, h, 1, false}}};
  };
  const auto llama = [](const char* name, int layers, std::int64_t h, std::int64_t ffn, std::int64_t tokens) {
    return Model{name,
                 tokens,
                 {{"qkv", 3 * h, h, layers, false},
                  {"proj", h, h, layers, false},
                  {"fc1", 2 * ffn, h, layers, false},
                  {"fc2", h, ffn, layers, false},
                  {"output", 32000, h, 1, false}}};
  };
  return {llama("llama-1.3b", 24, 2048, 5504, 8 * 2048), llama("llama-3b", 28, 3072, 8192, 2 * 4096),
          llama("llama-7b", 32, 4096, 11008, 4096), gpt2("gpt2-124m", 12, 768, 64 * 1024),
          gpt2("gpt2-1558m", 48, 1600, 16 * 1024)};
}

constexpr std::size_t kVariants = 3;

/// Runs the calls in turns until the chip has had its power limit for a while.
void warm_up(const std::vector<std::function<void()>>& calls) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1200);
  while (std::chrono::steady_clock::now() < end) {
    for (const auto& call : calls) call();
    at::cuda::getCurrentCUDAStream().synchronize();
  }
}

/// Median microseconds of each call. They take turns, so that all see the same clocks.
std::array<double, kVariants> measure(const std::array<std::function<void()>, kVariants>& calls) {
  constexpr std::size_t kRounds = 15;
  std::vector<at::cuda::CUDAEvent> events;
  for (std::size_t i = 0; i <= kRounds * kVariants; ++i) events.emplace_back(cudaEventDefault);
  events.front().record();
  for (std::size_t i = 0; i < kRounds * kVariants; ++i) {
    calls[i % kVariants]();
    events[i + 1].record();
  }
  events.back().synchronize();
  std::array<double, kVariants> medians{};
  for (std::size_t variant = 0; variant < kVariants; ++variant) {
    std::vector<float> times;
    for (std::size_t i = variant; i < kRounds * kVariants; i += kVariants)
      times.push_back(events[i].elapsed_time(events[i + 1]));
    std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
    medians[variant] = times[kRounds / 2] * 1e3;
  }
  return medians;
}

at::Tensor normal(at::IntArrayRef sizes) {
  return at::randn(sizes, at::TensorOptions().dtype(at::kBFloat16).device(at::kCUDA));
}

void row(const std::string& name, const std::string& product, const std::array<double, kVariants>& us, double flops) {
  std::printf("%-12s %-16s %10.1f us %6.0f TFLOP/s %10.1f us %+6.2f %% %10.1f us %+6.2f %%\n", name.c_str(),
              product.c_str(), us[0], flops / us[0] / 1e6, us[1], (us[1] / us[0] - 1) * 100, us[2],
              (us[2] / us[0] - 1) * 100);
  std::fflush(stdout);
}

void report(const Model& model) {
  std::array<double, kVariants> total{};
  double total_flops = 0;
  GemmAlgorithms suggested, tuned;
  tuned.tune(true, {});
  const std::array<Policy, kVariants> policies = {Policy{true, false, nullptr}, Policy{true, false, &suggested},
                                                  Policy{true, false, &tuned}};
  bool warm = false;
  for (const Matrix& m : model.matrices) {
    const at::Tensor x = normal({model.tokens, m.inputs}), w = normal({m.outputs, m.inputs}).mul_(0.02);
    const at::Tensor dy = normal({model.tokens, m.outputs}), bias = m.bias ? normal({m.outputs}) : at::Tensor();
    at::Tensor gradient = at::zeros({m.outputs, m.inputs}, x.options().dtype(at::kFloat));
    struct Product {
      const char* name;
      std::function<void(const Policy&)> call;
    };
    const std::vector<Product> products = {
        {"forward", [&](const Policy& p) { (void)kernels::linear(x, w, bias, true, p); }},
        {"input gradient", [&](const Policy& p) { (void)linear_input_gradient(dy, w, p); }},
        {"weight gradient", [&](const Policy& p) { add_weight_gradient(gradient, dy, x, 1.0, true, p); }}};
    if (!warm) {
      std::vector<std::function<void()>> calls;
      for (const Product& product : products) calls.push_back([&] { product.call(policies[0]); });
      warm_up(calls);
      warm = true;
    }
    for (const Product& product : products) {
      std::array<std::function<void()>, kVariants> calls;
      for (std::size_t v = 0; v < kVariants; ++v) calls[v] = [&, v] { product.call(policies[v]); };
      for (int i = 0; i < 3; ++i) {
        for (const auto& call : calls) call();  // the first one chooses
      }
      const std::array<double, kVariants> us = measure(calls);
      const double flops = 2.0 * static_cast<double>(model.tokens * m.outputs * m.inputs);
      row(model.name, std::string(m.name) + " " + product.name, us, flops);
      for (std::size_t v = 0; v < kVariants; ++v) total[v] += us[v] * m.count;
      total_flops += flops * m.count;
    }
  }
  row(model.name, "whole step", total, total_flops);
}

}  // namespace

TEST_CASE("time of a step's matrix products by choice of algorithm", "[.bench-gemm]") {
  if (!at::hasCUDA()) return;
  std::printf("%-12s %-16s %13s %14s %13s %8s   %13s\n", "model", "product", "libtorch", "", "suggested", "",
              "fastest");
  for (const Model& model : models()) {
    report(model);
    c10::cuda::CUDACachingAllocator::emptyCache();
  }
}

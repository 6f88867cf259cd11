#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

namespace pgpt::data {

/// The stream of `numpy.random.RandomState(seed)`: MT19937 with the legacy masked bounded draws.
class NumpyRandomState {
 public:
  explicit NumpyRandomState(std::uint32_t seed) : engine_(seed) {}

  /// Next raw 32-bit word.
  std::uint32_t next32() { return static_cast<std::uint32_t>(engine_()); }
  /// Uniform integer in [0, max]; max = 0 draws nothing.
  std::uint64_t bounded(std::uint64_t max);

  /// Shuffles in place, in the order of `RandomState.shuffle`; the element type does not influence the permutation.
  template <class T>
  void shuffle(std::span<T> values) {
    for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[bounded(i - 1)]);
  }

 private:
  std::mt19937 engine_;
};

/// The chain SeedSequence(seed) -> PCG64 of `numpy.random.default_rng(seed)`, for seeds below 2^32.
class NumpyGenerator {
 public:
  explicit NumpyGenerator(std::uint32_t seed);

  std::uint64_t next64();
  /// 32-bit draws take the low half of a 64-bit output first and keep the high half for the next call.
  std::uint32_t next32();
  /// Uniform integer in [low, high) by Lemire's method; 0 < high - low < 2^32.
  std::int64_t integer(std::int64_t low, std::int64_t high);

  /// Entropy pool of the seed sequence, for tests.
  [[nodiscard]] const std::array<std::uint32_t, 4>& pool() const { return pool_; }

 private:
  std::array<std::uint32_t, 4> pool_{};
  unsigned __int128 state_ = 0;
  unsigned __int128 increment_ = 0;
  bool has_half_ = false;
  std::uint32_t half_ = 0;
};

/// `torch.randperm(n)` of a CPU generator with `manual_seed(seed)`.
[[nodiscard]] std::vector<std::int64_t> torch_randperm(std::int64_t n, std::uint64_t seed);

}  // namespace pgpt::data

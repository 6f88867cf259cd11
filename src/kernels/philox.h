#pragma once

// Philox4x32-10 for host and device code; no torch.

#include <cstdint>

#ifdef __CUDACC__
#define PGPT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PGPT_HOST_DEVICE inline
#endif

namespace pgpt::kernels::detail {

inline constexpr std::uint32_t kPhiloxMultiplier0 = 0xD2511F53U;
inline constexpr std::uint32_t kPhiloxMultiplier1 = 0xCD9E8D57U;
inline constexpr std::uint32_t kPhiloxWeyl0 = 0x9E3779B9U;
inline constexpr std::uint32_t kPhiloxWeyl1 = 0xBB67AE85U;
inline constexpr int kPhiloxRounds = 10;

/// Four random 32-bit words.
struct PhiloxWords {
  std::uint32_t word[4];
};

/// The words of key `seed` and the 128-bit counter whose 64-bit halves are `low` and `high`.
PGPT_HOST_DEVICE PhiloxWords philox(std::uint64_t seed, std::uint64_t low, std::uint64_t high) {
  auto k0 = static_cast<std::uint32_t>(seed);
  auto k1 = static_cast<std::uint32_t>(seed >> 32);
  auto c0 = static_cast<std::uint32_t>(low);
  auto c1 = static_cast<std::uint32_t>(low >> 32);
  auto c2 = static_cast<std::uint32_t>(high);
  auto c3 = static_cast<std::uint32_t>(high >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const std::uint64_t p0 = static_cast<std::uint64_t>(kPhiloxMultiplier0) * c0;
    const std::uint64_t p1 = static_cast<std::uint64_t>(kPhiloxMultiplier1) * c2;
    c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

/// Dropout keeps element e exactly when philox(seed, offset, e / 4).word[e % 4] >= dropout_threshold(p).
PGPT_HOST_DEVICE std::uint32_t dropout_threshold(double probability) {
  return static_cast<std::uint32_t>(probability * 4294967296.0);
}

/// Factor of the kept elements, 1 / (1 - p), rounded once to fp32.
PGPT_HOST_DEVICE float dropout_scale(double probability) { return static_cast<float>(1.0 / (1.0 - probability)); }

}  // namespace pgpt::kernels::detail

#include "pgpt/data/random.h"

#include <bit>
#include <limits>
#include <numeric>

#include "pgpt/base/error.h"

namespace pgpt::data {
namespace {

// Constants of numpy's SeedSequence hash and of PCG64.
constexpr std::uint32_t kPoolInit = 0x43b0d7e5U;
constexpr std::uint32_t kPoolMultiplier = 0x931e8875U;
constexpr std::uint32_t kStateInit = 0x8b51f9ddU;
constexpr std::uint32_t kStateMultiplier = 0x58f38dedU;
constexpr std::uint32_t kMixLeft = 0xca01f9ddU;
constexpr std::uint32_t kMixRight = 0x4973f715U;
constexpr unsigned __int128 kPcgMultiplier =
    (static_cast<unsigned __int128>(0x2360ED051FC65DA4ULL) << 64) | 0x4385DF649FCCF645ULL;

std::uint32_t hash_word(std::uint32_t value, std::uint32_t& hash, std::uint32_t multiplier) {
  value ^= hash;
  hash *= multiplier;
  value *= hash;
  return value ^ (value >> 16);
}

unsigned __int128 join(std::uint64_t high, std::uint64_t low) {
  return (static_cast<unsigned __int128>(high) << 64) | low;
}

}  // namespace

std::uint64_t NumpyRandomState::bounded(std::uint64_t max) {
  if (max == 0) return 0;
  const std::uint64_t mask = std::numeric_limits<std::uint64_t>::max() >> std::countl_zero(max);
  std::uint64_t value = 0;
  do {
    if (max <= 0xFFFFFFFFULL) {
      value = next32() & mask;
    } else {
      const std::uint64_t high = next32();
      value = ((high << 32) | next32()) & mask;
    }
  } while (value > max);
  return value;
}

NumpyGenerator::NumpyGenerator(std::uint32_t seed) {
  std::uint32_t hash = kPoolInit;
  for (std::size_t i = 0; i < 4; ++i) pool_[i] = hash_word(i == 0 ? seed : 0, hash, kPoolMultiplier);
  for (std::size_t source = 0; source < 4; ++source) {
    for (std::size_t target = 0; target < 4; ++target) {
      if (source == target) continue;
      const std::uint32_t hashed = hash_word(pool_[source], hash, kPoolMultiplier);
      const std::uint32_t mixed = kMixLeft * pool_[target] - kMixRight * hashed;
      pool_[target] = mixed ^ (mixed >> 16);
    }
  }
  std::array<std::uint64_t, 4> seeds{};
  hash = kStateInit;
  for (std::size_t i = 0; i < 8; ++i) {
    const std::uint64_t word = hash_word(pool_[i % 4], hash, kStateMultiplier);
    seeds[i / 2] |= word << (32 * (i % 2));
  }
  increment_ = 2 * join(seeds[2], seeds[3]) + 1;
  state_ = increment_ + join(seeds[0], seeds[1]);
  state_ = state_ * kPcgMultiplier + increment_;
}

std::uint64_t NumpyGenerator::next64() {
  state_ = state_ * kPcgMultiplier + increment_;
  const auto high = static_cast<std::uint64_t>(state_ >> 64);
  const auto low = static_cast<std::uint64_t>(state_);
  return std::rotr(high ^ low, static_cast<int>(high >> 58));
}

std::uint32_t NumpyGenerator::next32() {
  if (has_half_) {
    has_half_ = false;
    return half_;
  }
  const std::uint64_t value = next64();
  half_ = static_cast<std::uint32_t>(value >> 32);
  has_half_ = true;
  return static_cast<std::uint32_t>(value);
}

std::int64_t NumpyGenerator::integer(std::int64_t low, std::int64_t high) {
  PGPT_ASSERT(high > low && high - low < (std::int64_t{1} << 32));
  const auto range = static_cast<std::uint32_t>(high - low);
  std::uint64_t product = static_cast<std::uint64_t>(next32()) * range;
  if (static_cast<std::uint32_t>(product) < range) {
    const std::uint32_t limit = (0U - range) % range;
    while (static_cast<std::uint32_t>(product) < limit) product = static_cast<std::uint64_t>(next32()) * range;
  }
  return low + static_cast<std::int64_t>(product >> 32);
}

std::vector<std::int64_t> torch_randperm(std::int64_t n, std::uint64_t seed) {
  std::mt19937 engine(static_cast<std::uint32_t>(seed));
  std::vector<std::int64_t> values(static_cast<std::size_t>(n));
  if (n < std::numeric_limits<std::uint32_t>::max() / 20) {
    std::iota(values.begin(), values.end(), 0);
    for (std::int64_t i = 0; i < n - 1; ++i) {
      const auto step = static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(n - i));
      std::swap(values[static_cast<std::size_t>(i)], values[static_cast<std::size_t>(i + step)]);
    }
    return values;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint64_t high = engine();
    const std::uint64_t word = (high << 32) | engine();
    const std::size_t z = word % static_cast<std::uint64_t>(i + 1);
    values[static_cast<std::size_t>(i)] = values[z];
    values[z] = i;
  }
  return values;
}

}  // namespace pgpt::data

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace pgpt {

/// Continues a 32-bit cyclic redundancy check over `size` bytes, eight at a time from tables. `polynomial` has its bits
/// reversed. Callers invert the value before and after, as the usual definitions ask.
template <std::uint32_t polynomial>
[[nodiscard]] std::uint32_t continue_crc(const unsigned char* p, std::size_t size, std::uint32_t crc) {
  using Tables = std::array<std::array<std::uint32_t, 256>, 8>;
  static constexpr Tables kTables = [] {
    Tables tables{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t c = i;
      for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1U) != 0 ? polynomial : 0U);
      tables[0][i] = c;
    }
    for (std::size_t t = 1; t < 8; ++t) {
      for (std::size_t i = 0; i < 256; ++i) {
        const std::uint32_t previous = tables[t - 1][i];
        tables[t][i] = (previous >> 8) ^ tables[0][previous & 0xFFU];
      }
    }
    return tables;
  }();
  for (; size >= 8; size -= 8, p += 8) {
    crc ^= static_cast<std::uint32_t>(p[0]) | static_cast<std::uint32_t>(p[1]) << 8 |
           static_cast<std::uint32_t>(p[2]) << 16 | static_cast<std::uint32_t>(p[3]) << 24;
    crc = kTables[7][crc & 0xFFU] ^ kTables[6][(crc >> 8) & 0xFFU] ^ kTables[5][(crc >> 16) & 0xFFU] ^
          kTables[4][crc >> 24] ^ kTables[3][p[4]] ^ kTables[2][p[5]] ^ kTables[1][p[6]] ^ kTables[0][p[7]];
  }
  for (; size > 0; --size, ++p) crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 0xFFU];
  return crc;
}

}  // namespace pgpt

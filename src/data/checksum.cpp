#include "pgpt/data/checksum.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "pgpt/base/crc.h"

namespace pgpt::data {
namespace {

constexpr std::array<int, 16> kMd5Shifts = {7, 12, 17, 22, 5, 9, 14, 20, 4, 11, 16, 23, 6, 10, 15, 21};

std::array<std::uint32_t, 64> make_md5_constants() {
  std::array<std::uint32_t, 64> constants{};
  for (std::size_t i = 0; i < 64; ++i) {
    constants[i] = static_cast<std::uint32_t>(std::fabs(std::sin(static_cast<double>(i + 1))) * 4294967296.0);
  }
  return constants;
}

void md5_block(const unsigned char* block, std::array<std::uint32_t, 4>& state) {
  static const std::array<std::uint32_t, 64> kConstants = make_md5_constants();
  std::array<std::uint32_t, 16> words{};
  for (std::size_t i = 0; i < 16; ++i) {
    for (std::size_t b = 0; b < 4; ++b) words[i] |= static_cast<std::uint32_t>(block[4 * i + b]) << (8 * b);
  }
  auto [a, b, c, d] = state;
  for (std::size_t i = 0; i < 64; ++i) {
    std::uint32_t mixed = 0;
    std::size_t word = 0;
    switch (i / 16) {
      case 0:
        mixed = (b & c) | (~b & d), word = i;
        break;
      case 1:
        mixed = (d & b) | (~d & c), word = (5 * i + 1) % 16;
        break;
      case 2:
        mixed = b ^ c ^ d, word = (3 * i + 5) % 16;
        break;
      default:
        mixed = c ^ (b | ~d), word = (7 * i) % 16;
        break;
    }
    const std::uint32_t rotated = std::rotl(a + mixed + kConstants[i] + words[word], kMd5Shifts[i / 16 * 4 + i % 4]);
    a = d;
    d = c;
    c = b;
    b += rotated;
  }
  state[0] += a;
  state[1] += b;
  state[2] += c;
  state[3] += d;
}

}  // namespace

std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t crc) {
  return ~continue_crc<0xEDB88320U>(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), ~crc);
}

std::string md5_hex(std::string_view text) {
  std::string padded(text);
  padded.push_back('\x80');
  padded.resize((padded.size() + 8 + 63) / 64 * 64, '\0');
  const std::uint64_t bits = static_cast<std::uint64_t>(text.size()) * 8;
  for (std::size_t i = 0; i < 8; ++i) padded[padded.size() - 8 + i] = static_cast<char>(bits >> (8 * i));

  std::array<std::uint32_t, 4> state = {0x67452301U, 0xefcdab89U, 0x98badcfeU, 0x10325476U};
  for (std::size_t at = 0; at < padded.size(); at += 64) {
    md5_block(reinterpret_cast<const unsigned char*>(padded.data()) + at, state);
  }
  std::string hex;
  for (const std::uint32_t word : state) {
    for (int byte = 0; byte < 4; ++byte) {
      const std::uint32_t value = (word >> (8 * byte)) & 0xFFU;
      hex.push_back("0123456789abcdef"[value >> 4]);
      hex.push_back("0123456789abcdef"[value & 0xFU]);
    }
  }
  return hex;
}

}  // namespace pgpt::data

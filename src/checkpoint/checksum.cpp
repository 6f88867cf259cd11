#include "pgpt/checkpoint/checksum.h"

#include <cstdio>
#include <cstring>

#include "pgpt/base/crc.h"

namespace pgpt::checkpoint {
namespace {

#if defined(__x86_64__) && defined(__GNUC__)
[[gnu::target("sse4.2")]] std::uint32_t with_instruction(const unsigned char* p, std::size_t size, std::uint32_t crc) {
  std::uint64_t wide = crc;
  for (; size >= 8; size -= 8, p += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, p, sizeof word);
    wide = __builtin_ia32_crc32di(wide, word);
  }
  auto narrow = static_cast<std::uint32_t>(wide);
  for (; size > 0; --size, ++p) narrow = __builtin_ia32_crc32qi(narrow, *p);
  return narrow;
}
#endif

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t crc) {
  const auto* bytes = static_cast<const unsigned char*>(data);
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool fast = __builtin_cpu_supports("sse4.2") != 0;
  if (fast) return ~with_instruction(bytes, size, ~crc);
#endif
  return ~continue_crc<0x82F63B78U>(bytes, size, ~crc);
}

std::string checksum_text(std::uint32_t crc) {
  char text[9];
  std::snprintf(text, sizeof text, "%08x", crc);
  return text;
}

}  // namespace pgpt::checkpoint

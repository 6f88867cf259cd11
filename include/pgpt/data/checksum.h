#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace pgpt::data {

/// CRC-32 (zlib's polynomial) of `bytes`, continuing from `crc` (0 to start).
[[nodiscard]] std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t crc = 0);

/// MD5 of `text` as 32 lower-case hexadecimal digits; used for cache file names only.
[[nodiscard]] std::string md5_hex(std::string_view text);

}  // namespace pgpt::data

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pgpt::checkpoint {

/// CRC-32C (Castagnoli) of `size` bytes, continuing from `crc` (0 to start). Uses the processor's instruction where it
/// has one.
[[nodiscard]] std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t crc = 0);

/// Eight lower-case hexadecimal digits.
[[nodiscard]] std::string checksum_text(std::uint32_t crc);

}  // namespace pgpt::checkpoint

#include "piece_json.h"

#include <charconv>

#include "pgpt/base/error.h"
#include "pgpt/checkpoint/checksum.h"
#include "pgpt/checkpoint/safetensors.h"

namespace pgpt::checkpoint {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kDigits = 8;

std::uint32_t checksum_from(const std::string& text, std::size_t at) {
  std::uint32_t crc = 0;
  const char* end = text.data() + at + kDigits;
  const auto [stop, status] = std::from_chars(text.data() + at, end, crc, 16);
  PGPT_CHECK(DataError, status == std::errc() && stop == end, "malformed checksum '", text.substr(at, kDigits), "'");
  return crc;
}

}  // namespace

Json to_json(const FileEntry& file) {
  return {{"bytes", file.bytes}, {"header_crc32c", checksum_text(file.header_checksum)}};
}

Json to_json(const TensorEntry& tensor) {
  Json json = {{"dtype", dtype_name(tensor.dtype)}, {"shape", tensor.shape}, {"pieces", Json::array()}};
  for (const Piece& piece : tensor.pieces) {
    std::string checksums;
    for (const std::uint32_t crc : piece.checksums) checksums += checksum_text(crc);
    json["pieces"].push_back({{"file", piece.file},
                              {"key", piece.key},
                              {"offset", piece.offset},
                              {"shape", piece.shape},
                              {"crc32c", checksums}});
  }
  return json;
}

FileEntry file_from_json(const Json& json) {
  const auto crc = json.at("header_crc32c").get<std::string>();
  PGPT_CHECK(DataError, crc.size() == kDigits, "malformed checksum '", crc, "'");
  return {json.at("bytes").get<std::uint64_t>(), checksum_from(crc, 0)};
}

TensorEntry tensor_from_json(const Json& json) {
  TensorEntry tensor;
  const auto type = json.at("dtype").get<std::string>();
  const std::optional<at::ScalarType> dtype = dtype_named(type);
  PGPT_CHECK(DataError, dtype, "unknown tensor type '", type, "'");
  tensor.dtype = *dtype;
  tensor.shape = json.at("shape").get<std::vector<std::int64_t>>();
  for (const Json& item : json.at("pieces")) {
    Piece piece;
    piece.file = item.at("file").get<std::string>();
    piece.key = item.at("key").get<std::string>();
    piece.offset = item.at("offset").get<std::vector<std::int64_t>>();
    piece.shape = item.at("shape").get<std::vector<std::int64_t>>();
    const auto checksums = item.at("crc32c").get<std::string>();
    PGPT_CHECK(DataError, checksums.size() % kDigits == 0, "malformed checksums of ", piece.key);
    for (std::size_t at = 0; at < checksums.size(); at += kDigits)
      piece.checksums.push_back(checksum_from(checksums, at));
    tensor.pieces.push_back(std::move(piece));
  }
  return tensor;
}

}  // namespace pgpt::checkpoint

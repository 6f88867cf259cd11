#include "pgpt/training/event_file.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>
#include <ctime>

#include "pgpt/base/error.h"
#include "pgpt/checkpoint/checksum.h"
#include "text.h"

namespace pgpt::training {
namespace {

/// Record checksums are rotated and offset so that a checksum over data with embedded checksums stays useful.
std::uint32_t masked_crc(std::string_view bytes) {
  const std::uint32_t crc = checkpoint::crc32c(bytes.data(), bytes.size());
  return std::rotr(crc, 15) + 0xa282ead8U;
}

template <class T>
void append_little_endian(std::string& out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
}

// Protobuf wire format: a key (field << 3 | type), then a varint (0), 8 bytes (1), length and bytes (2) or 4 bytes (5).

void append_varint(std::string& out, std::uint64_t value) {
  while (value >= 0x80) {
    out += static_cast<char>((value & 0x7f) | 0x80);
    value >>= 7;
  }
  out += static_cast<char>(value);
}

void append_integer(std::string& out, unsigned field, std::int64_t value) {
  append_varint(out, field << 3);
  append_varint(out, static_cast<std::uint64_t>(value));
}

void append_double(std::string& out, unsigned field, double value) {
  append_varint(out, field << 3 | 1U);
  append_little_endian(out, std::bit_cast<std::uint64_t>(value));
}

void append_float(std::string& out, unsigned field, float value) {
  append_varint(out, field << 3 | 5U);
  append_little_endian(out, std::bit_cast<std::uint32_t>(value));
}

void append_bytes(std::string& out, unsigned field, std::string_view bytes) {
  append_varint(out, field << 3 | 2U);
  append_varint(out, bytes.size());
  out += bytes;
}

/// Event { wall_time = 1, step = 2, summary = 5 { value = 1 } }.
std::string event_with_value(const std::string& value, std::int64_t step, double wall_time) {
  std::string summary;
  append_bytes(summary, 1, value);
  std::string event;
  append_double(event, 1, wall_time);
  append_integer(event, 2, step);
  append_bytes(event, 5, summary);
  return event;
}

}  // namespace

EventFile::EventFile(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  PGPT_CHECK(DataError, !error, "--tensorboard-dir: cannot make ", folder.string(), ": ", error.message(),
             "; give a folder that can be written");
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  const std::time_t seconds = std::time(nullptr);
  const std::string stem = concat("events.out.tfevents.", training::text("%010lld", static_cast<long long>(seconds)),
                                  ".", host.data(), ".", getpid());
  for (int count = 0;; ++count) {
    path_ = folder / concat(stem, ".", count);
    if (!std::filesystem::exists(path_)) break;
  }
  file_.open(path_, std::ios::binary | std::ios::out);
  PGPT_CHECK(DataError, file_.is_open(), "--tensorboard-dir: cannot write ", path_.string(),
             "; check the folder's permissions");
  std::string event;
  append_double(event, 1, static_cast<double>(seconds));
  append_bytes(event, 3, "brain.Event:2");  // file_version
  record(event);
  flush();
}

void EventFile::record(const std::string& event) {
  std::string length;
  append_little_endian(length, static_cast<std::uint64_t>(event.size()));
  std::string frame = length;
  append_little_endian(frame, masked_crc(length));
  frame += event;
  append_little_endian(frame, masked_crc(event));
  file_.write(frame.data(), static_cast<std::streamsize>(frame.size()));
}

void EventFile::scalar(const std::string& tag, float value, std::int64_t step, double wall_time) {
  std::string entry;  // Summary.Value { tag = 1, simple_value = 2 }
  append_bytes(entry, 1, tag);
  append_float(entry, 2, value);
  record(event_with_value(entry, step, wall_time));
}

void EventFile::text(const std::string& tag, const std::string& value, std::int64_t step, double wall_time) {
  std::string plugin;  // SummaryMetadata { plugin_data = 1 { plugin_name = 1 } }
  append_bytes(plugin, 1, "text");
  std::string metadata;
  append_bytes(metadata, 1, plugin);
  std::string dimension;  // TensorShapeProto { dim = 2 { size = 1 } }
  append_integer(dimension, 1, 1);
  std::string shape;
  append_bytes(shape, 2, dimension);
  constexpr std::int64_t kStringType = 7;
  std::string tensor;  // TensorProto { dtype = 1, tensor_shape = 2, string_val = 8 }
  append_integer(tensor, 1, kStringType);
  append_bytes(tensor, 2, shape);
  append_bytes(tensor, 8, value);
  std::string entry;  // Summary.Value { tag = 1, tensor = 8, metadata = 9 }
  append_bytes(entry, 1, tag + "/text_summary");
  append_bytes(entry, 8, tensor);
  append_bytes(entry, 9, metadata);
  record(event_with_value(entry, step, wall_time));
}

void EventFile::flush() {
  file_.flush();
  PGPT_CHECK(DataError, file_.good(), "--tensorboard-dir: cannot write ", path_.string(), "; check free space");
}

}  // namespace pgpt::training

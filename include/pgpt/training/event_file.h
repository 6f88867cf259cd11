#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace pgpt::training {

/// Writes one TensorBoard event file: framed records with masked checksums around protobuf messages, encoded here, so
/// that no TensorFlow is needed. Every process writes a new file in the folder; TensorBoard reads them together.
class EventFile {
 public:
  /// Creates the folder and a file events.out.tfevents.<seconds>.<host>.<process>. Throws DataError.
  explicit EventFile(const std::filesystem::path& folder);

  /// One point of a curve; `wall_time` is in seconds since 1970.
  void scalar(const std::string& tag, float value, std::int64_t step, double wall_time);
  /// A text under TensorBoard's text tab.
  void text(const std::string& tag, const std::string& value, std::int64_t step, double wall_time);
  /// Hands all records to the operating system. Throws DataError when writing failed.
  void flush();

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  void record(const std::string& event);

  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace pgpt::training

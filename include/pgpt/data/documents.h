#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pgpt::data {

/// A numbered collection of token sequences ("documents"); implementations are immutable and safe to read from several
/// threads.
class DocumentSource {
 public:
  virtual ~DocumentSource() = default;
  /// Number of documents.
  [[nodiscard]] virtual std::int64_t size() const = 0;
  /// Tokens in document `i`, 0 <= i < size().
  [[nodiscard]] virtual std::int64_t length(std::int64_t i) const = 0;
  /// Writes tokens [offset, offset + count) of document `i` to `out`, widened to 64 bits.
  virtual void read(std::int64_t i, std::int64_t offset, std::int64_t count, std::int64_t* out) const = 0;
  /// Path prefix, or what stands for it in messages.
  [[nodiscard]] virtual std::string name() const = 0;
  /// Text that changes whenever the contents may have changed (file sizes and times); part of the index cache's check.
  [[nodiscard]] virtual std::string stamp() const = 0;
};

/// The reference's low-level mock set: 100000 documents of 1 to 4095 tokens, each the ramp 1, 2, 3, ... modulo the
/// vocabulary, ending in EOD.
class MockDocuments : public DocumentSource {
 public:
  static constexpr std::int64_t kCount = 100000;

  MockDocuments(std::int64_t vocab_size, std::int64_t eod);
  [[nodiscard]] std::int64_t size() const override { return kCount; }
  [[nodiscard]] std::int64_t length(std::int64_t i) const override { return lengths_[static_cast<std::size_t>(i)]; }
  void read(std::int64_t i, std::int64_t offset, std::int64_t count, std::int64_t* out) const override;
  [[nodiscard]] std::string name() const override { return "mock data"; }
  [[nodiscard]] std::string stamp() const override { return "mock"; }

 private:
  std::int64_t vocab_size_;
  std::int64_t eod_;
  std::vector<std::int32_t> lengths_;
};

}  // namespace pgpt::data

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pgpt/data/documents.h"
#include "pgpt/data/int_array.h"

namespace pgpt::data {

/// Token element types of a .bin file; the values are the codes stored in the .idx file.
enum class TokenType : std::uint8_t { kUint8 = 1, kInt8 = 2, kInt16 = 3, kInt32 = 4, kInt64 = 5, kUint16 = 8 };

[[nodiscard]] std::int64_t bytes_of(TokenType type);
[[nodiscard]] std::string_view name_of(TokenType type);
/// The type that Megatron's preprocessing picks: uint16 below 65500 tokens, else int32.
[[nodiscard]] TokenType token_type_for_vocab(std::int64_t vocab_size);

/// Reader of a Megatron PREFIX.bin / PREFIX.idx pair. Opening checks both files completely (header, sizes, every
/// offset, every document boundary), so that reading cannot fail because of a wrong index. What is called document
/// elsewhere is one *sequence* of the file; the file's document boundaries are checked but not used.
class IndexedDataset : public DocumentSource {
 public:
  /// Throws DataError with path, offset, expected and found value. `map_bin` = false reads .bin by pread instead of
  /// mapping it.
  explicit IndexedDataset(std::string prefix, bool map_bin = true);
  ~IndexedDataset() override;
  IndexedDataset(const IndexedDataset&) = delete;
  IndexedDataset& operator=(const IndexedDataset&) = delete;

  [[nodiscard]] std::int64_t size() const override { return sequences_; }
  [[nodiscard]] std::int64_t length(std::int64_t i) const override;
  void read(std::int64_t i, std::int64_t offset, std::int64_t count, std::int64_t* out) const override;
  [[nodiscard]] std::string name() const override { return prefix_; }
  [[nodiscard]] std::string stamp() const override { return stamp_; }

  [[nodiscard]] TokenType token_type() const { return type_; }
  /// Byte offset of sequence `i` in the .bin file.
  [[nodiscard]] std::int64_t byte_offset(std::int64_t i) const;
  /// Entries of the boundary array: number of documents plus one.
  [[nodiscard]] std::int64_t boundaries() const { return boundaries_; }
  [[nodiscard]] std::int64_t boundary(std::int64_t k) const;
  /// Bytes of the .bin file behind the last sequence: 0 where the two files belong together.
  [[nodiscard]] std::int64_t unused_bytes() const { return unused_bytes_; }

 private:
  void check_header();
  void check_entries(std::int64_t bin_bytes);

  std::string prefix_;
  std::string stamp_;
  std::shared_ptr<const MappedFile> idx_;
  std::shared_ptr<const MappedFile> bin_;  ///< null with pread
  int bin_fd_ = -1;                        ///< -1 with mapping
  TokenType type_ = TokenType::kInt32;
  std::int64_t sequences_ = 0;
  std::int64_t boundaries_ = 0;
  std::int64_t unused_bytes_ = 0;
};

/// Writes a PREFIX.bin / PREFIX.idx pair. Both files appear under their names only in finish(); an unfinished writer
/// leaves nothing behind.
class IndexedDatasetWriter {
 public:
  IndexedDatasetWriter(std::string prefix, TokenType type);
  ~IndexedDatasetWriter();
  IndexedDatasetWriter(const IndexedDatasetWriter&) = delete;
  IndexedDatasetWriter& operator=(const IndexedDatasetWriter&) = delete;

  /// Appends one sequence; throws DataError when a token does not fit the element type.
  void add_sequence(std::span<const std::int64_t> tokens);
  /// Ends the current document, which may hold no sequence.
  void end_document();
  /// Appends all sequences and documents of `source`, which must have the same element type.
  void append(const IndexedDataset& source);
  /// Writes the index and flushes both files to disk under temporary names; nothing can be added afterwards. Called
  /// for several writers before their finish(), it makes their files appear together.
  void seal();
  /// Seals unless that was done, and renames both files into place.
  void finish();

 private:
  void flush();

  std::string prefix_, bin_temporary_, idx_temporary_;
  TokenType type_;
  int fd_ = -1;
  bool sealed_ = false;
  bool finished_ = false;
  std::vector<char> buffer_;
  std::vector<std::int32_t> lengths_;
  std::vector<std::int64_t> boundaries_;
};

}  // namespace pgpt::data

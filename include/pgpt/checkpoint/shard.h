#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "pgpt/checkpoint/manifest.h"

namespace pgpt::checkpoint {

/// A box of a tensor that lives on this rank. One tensor may be held as several boxes.
struct LocalTensor {
  std::string name;
  std::vector<std::int64_t> shape;   ///< of the whole tensor, no padding
  std::vector<std::int64_t> offset;  ///< of the box in the whole
  at::Tensor values;                 ///< the box: contiguous, any device; may be empty
  std::int64_t replica = 0;          ///< of `replicas` ranks that hold the same box
  std::int64_t replicas = 1;
};

struct IoOptions {
  std::uint64_t block_bytes = std::uint64_t{4} << 20;   ///< unit of checksums, reads and writes; a multiple of 16
  int threads = 1;                                      ///< each holds one block in host memory (pinned for a GPU)
  std::uint64_t file_bytes = std::uint64_t{512} << 20;  ///< about as much as this is worth a file of its own
  const std::atomic<bool>* cancel = nullptr;            ///< set: stop early with DataError
};

/// What this rank writes: large tensors in row stretches shared among the replicas, each small one by a single replica,
/// in turns that follow its place in the list (which must be the same on every rank). With `share` false the first
/// replica writes all.
[[nodiscard]] std::vector<LocalTensor> writers_part(const std::vector<LocalTensor>& tensors, bool share);

/// Bytes that `write_shards` will write, headers aside.
[[nodiscard]] std::uint64_t tensor_bytes(const std::vector<LocalTensor>& parts);

/// Copies all values to the host, into memory (pinned when they come from a GPU) that `buffers` keeps for the next
/// time. The result views it. Returns when the copies are done.
[[nodiscard]] std::vector<LocalTensor> host_snapshot(const std::vector<LocalTensor>& parts,
                                                     std::vector<at::Tensor>& buffers);

/// One written file, ready to be merged into a manifest.
struct ShardSummary {
  std::string file;
  FileEntry entry;
  std::vector<std::pair<std::string, TensorEntry>> tensors;  ///< one piece each; a name may come twice
};

/// Writes and syncs FOLDER/NAME.safetensors, and with many bytes NAME_1.safetensors and so on, so that the threads do
/// not wait for each other. No file without parts. Throws DataError naming path and cause.
[[nodiscard]] std::vector<ShardSummary> write_shards(const std::filesystem::path& folder, const std::string& name,
                                                     const std::vector<LocalTensor>& parts, const IoOptions& options);

/// What a rank tells the one that writes the manifest.
[[nodiscard]] std::string summaries_text(const std::vector<ShardSummary>& summaries);
/// Throws DataError for text that summaries_text did not make.
[[nodiscard]] std::vector<ShardSummary> parse_summaries(const std::string& text);

/// Enters the pieces of one file. Throws DataError when ranks disagree about a tensor's type or shape.
void merge(Manifest& manifest, const ShardSummary& summary);

/// A checkpoint folder opened for reading.
class Checkpoint {
 public:
  /// Reads and checks the manifest. Throws DataError.
  explicit Checkpoint(std::filesystem::path directory);

  [[nodiscard]] const std::filesystem::path& directory() const { return directory_; }
  [[nodiscard]] const Manifest& manifest() const { return manifest_; }
  [[nodiscard]] bool contains(const std::string& name) const { return manifest_.tensors.count(name) != 0; }

  /// Fills every target's box from the pieces that overlap it, whatever layout wrote them; reads no other blocks. Types
  /// must agree unless `convert`. Throws DataError naming path, tensor, what was expected and what was found; targets
  /// are then partly overwritten.
  void load(const std::vector<LocalTensor>& targets, bool convert, const IoOptions& options) const;
  /// One whole tensor in new host memory.
  [[nodiscard]] at::Tensor read(const std::string& name, const IoOptions& options = {}) const;
  /// Reads every byte and checks every checksum. Throws DataError for the first fault found.
  void verify(const IoOptions& options) const;

 private:
  std::filesystem::path directory_;
  Manifest manifest_;
};

}  // namespace pgpt::checkpoint

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "block_file.h"
#include "parallel.h"
#include "pgpt/base/error.h"
#include "pgpt/checkpoint/checksum.h"
#include "pgpt/checkpoint/directory.h"
#include "pgpt/checkpoint/safetensors.h"
#include "pgpt/checkpoint/shard.h"

namespace pgpt::checkpoint {
namespace {

/// One shard opened for reading: its size and its header were those of the manifest.
class OpenShard {
 public:
  OpenShard(const std::filesystem::path& path, const FileEntry& entry) : file_(path.string()) {
    const std::string& name = file_.path();
    PGPT_CHECK(DataError, file_.size() == entry.bytes, name, " has ", file_.size(), " bytes, the manifest says ",
               entry.bytes, ": it was truncated or replaced", kAnotherCheckpoint);
    std::uint64_t length = 0;
    char bytes[sizeof length];
    file_.read(bytes, sizeof bytes, 0);
    std::memcpy(&length, bytes, sizeof length);
    PGPT_CHECK(DataError, length <= entry.bytes - sizeof length, name, " is damaged: its header claims ", length,
               " bytes of ", entry.bytes, kAnotherCheckpoint);
    std::string header(sizeof length + length, '\0');
    file_.read(header.data(), header.size(), 0);
    const std::uint32_t found = crc32c(header.data(), header.size());
    PGPT_CHECK(DataError, found == entry.header_checksum, name, " is damaged: the checksum of its header is ",
               checksum_text(found), ", the manifest says ", checksum_text(entry.header_checksum), kAnotherCheckpoint);
    contents_.emplace(name);
  }

  [[nodiscard]] const InputFile& file() const { return file_; }

  /// First byte of a piece in the file, which must be what the manifest says.
  [[nodiscard]] std::uint64_t begin_of(const Piece& piece, at::ScalarType dtype) const {
    const std::string& name = file_.path();
    PGPT_CHECK(DataError, contents_->contains(piece.key), name, " holds no tensor ", piece.key,
               ", which the manifest places there", kAnotherCheckpoint);
    const SafetensorsFile::Entry& entry = contents_->entries().at(piece.key);
    PGPT_CHECK(DataError, entry.dtype == dtype && entry.shape == piece.shape, name, ": tensor ", piece.key, " is ",
               dtype_name(entry.dtype), " ", shape_text(entry.shape), ", the manifest says ", dtype_name(dtype), " ",
               shape_text(piece.shape), kAnotherCheckpoint);
    return contents_->data_offset() + entry.begin;
  }

 private:
  InputFile file_;
  std::optional<SafetensorsFile> contents_;
};

/// A stretch that lies together in a piece and in a target, in elements of either.
struct Run {
  std::int64_t source = 0, target = 0, count = 0;
};

/// Where the box of a target and a piece overlap: runs in ascending order of both.
std::vector<Run> overlap_runs(const Piece& piece, const LocalTensor& target) {
  const auto target_shape = target.values.sizes();
  const std::size_t dims = piece.shape.size();
  if (dims == 0) return {{0, 0, 1}};
  std::vector<std::int64_t> begin(dims), size(dims);
  for (std::size_t d = 0; d < dims; ++d) {
    begin[d] = std::max(piece.offset[d], target.offset[d]);
    size[d] = std::min(piece.offset[d] + piece.shape[d], target.offset[d] + target_shape[d]) - begin[d];
    if (size[d] <= 0) return {};
  }
  // Dimensions that both hold whole melt into one run.
  std::size_t outer = dims - 1;
  std::int64_t length = size[outer];
  while (outer > 0 && size[outer] == piece.shape[outer] && size[outer] == target_shape[outer]) length *= size[--outer];
  std::vector<Run> runs;
  std::vector<std::int64_t> index(outer, 0);
  while (true) {
    Run run{0, 0, length};
    for (std::size_t d = 0; d < dims; ++d) {
      const std::int64_t at = begin[d] + (d < outer ? index[d] : 0);
      run.source = run.source * piece.shape[d] + at - piece.offset[d];
      run.target = run.target * target_shape[d] + at - target.offset[d];
    }
    runs.push_back(run);
    std::size_t d = outer;
    while (d > 0 && ++index[d - 1] == size[d - 1]) index[--d] = 0;
    if (d == 0) return runs;
  }
}

/// One block of a piece that has to be read, and what becomes of it.
struct BlockTask {
  const std::string* tensor = nullptr;
  const Piece* piece = nullptr;
  const OpenShard* shard = nullptr;
  const LocalTensor* target = nullptr;  // null: only verified
  std::shared_ptr<const std::vector<Run>> runs;
  std::size_t block = 0;
  std::uint64_t file_offset = 0;        // of the piece
  std::uint64_t begin = 0, length = 0;  // bytes inside the piece
  at::ScalarType dtype = at::kFloat;
};

/// Copies the runs that lie in a block which has just been read.
void scatter(const BlockTask& task, char* bytes) {
  const auto element = static_cast<std::int64_t>(c10::elementSize(task.dtype));
  const std::int64_t first = static_cast<std::int64_t>(task.begin) / element;
  const std::int64_t last = first + static_cast<std::int64_t>(task.length) / element;
  at::Tensor values = task.target->values.view({-1});
  auto run = std::upper_bound(task.runs->begin(), task.runs->end(), first,
                              [](std::int64_t at, const Run& r) { return at < r.source + r.count; });
  for (; run != task.runs->end() && run->source < last; ++run) {
    const std::int64_t from = std::max(run->source, first);
    const std::int64_t count = std::min(run->source + run->count, last) - from;
    const std::int64_t to = run->target + from - run->source;
    char* data = bytes + (from - first) * element;
    if (values.is_cpu() && values.scalar_type() == task.dtype) {
      std::memcpy(static_cast<char*>(values.data_ptr()) + to * element, data,
                  static_cast<std::size_t>(count * element));
    } else {
      values.narrow(0, to, count).copy_(at::from_blob(data, {count}, task.dtype));
    }
  }
}

void run_tasks(std::vector<BlockTask>& tasks, std::uint64_t block_bytes, bool pinned, const IoOptions& options) {
  // Along all files at once: some file systems serve one file at a time.
  std::stable_sort(tasks.begin(), tasks.end(), [](const BlockTask& a, const BlockTask& b) {
    return a.file_offset + a.begin < b.file_offset + b.begin;
  });
  std::vector<std::optional<BlockBuffer>> buffers(static_cast<std::size_t>(std::max(options.threads, 1)));
  parallel_tasks(tasks.size(), options.threads, [&](int worker, std::size_t index) {
    const BlockTask& task = tasks[index];
    std::optional<BlockBuffer>& buffer = buffers[static_cast<std::size_t>(worker)];
    if (!buffer) buffer.emplace(block_bytes, pinned);
    const InputFile& file = task.shard->file();
    char* bytes = file.read(*buffer, task.length, task.file_offset + task.begin);
    const std::uint32_t found = crc32c(bytes, task.length);
    const std::uint32_t expected = task.piece->checksums[task.block];
    PGPT_CHECK(DataError, found == expected, file.path(), " is damaged: the checksum of tensor ", *task.tensor,
               ", bytes ", task.begin, " to ", task.begin + task.length, " of its piece there, is ",
               checksum_text(found), ", the manifest says ", checksum_text(expected), kAnotherCheckpoint);
    if (task.target != nullptr) scatter(task, bytes);
  });
}

/// Opens each file once.
class ShardSet {
 public:
  ShardSet(const std::filesystem::path& directory, const Manifest& manifest)
      : directory_(directory), manifest_(manifest) {}
  const OpenShard& open(const std::string& file) {
    std::unique_ptr<OpenShard>& shard = shards_[file];
    if (!shard) shard = std::make_unique<OpenShard>(directory_ / file, manifest_.files.at(file));
    return *shard;
  }

 private:
  const std::filesystem::path& directory_;
  const Manifest& manifest_;
  std::map<std::string, std::unique_ptr<OpenShard>> shards_;
};

void add_block(std::vector<BlockTask>& tasks, BlockTask task, std::size_t block, std::uint64_t block_bytes,
               std::uint64_t piece_bytes) {
  task.block = block;
  task.begin = block * block_bytes;
  task.length = std::min(block_bytes, piece_bytes - task.begin);
  tasks.push_back(std::move(task));
}

}  // namespace

Checkpoint::Checkpoint(std::filesystem::path directory)
    : directory_(std::move(directory)), manifest_(read_manifest(directory_)) {}

void Checkpoint::load(const std::vector<LocalTensor>& targets, bool convert, const IoOptions& options) const {
  ShardSet shards(directory_, manifest_);
  std::vector<BlockTask> tasks;
  bool pinned = false;
  for (const LocalTensor& target : targets) {
    const auto found = manifest_.tensors.find(target.name);
    PGPT_CHECK(DataError, found != manifest_.tensors.end(), directory_.string(), " holds no tensor ", target.name,
               ", which this run needs with shape ", shape_text(target.shape));
    const TensorEntry& tensor = found->second;
    PGPT_CHECK(DataError, tensor.shape == target.shape, "tensor ", target.name, " has shape ", shape_text(tensor.shape),
               " in ", directory_.string(), ", this run needs ", shape_text(target.shape));
    PGPT_CHECK(DataError, convert || tensor.dtype == target.values.scalar_type(), "tensor ", target.name, " has type ",
               dtype_name(tensor.dtype), " in ", directory_.string(), ", this run needs ",
               dtype_name(target.values.scalar_type()),
               "; train with the same precision, or take the weights alone with --no-load-optim or --finetune");
    PGPT_ASSERT(target.values.is_contiguous(), target.name);
    if (target.values.numel() == 0) continue;
    pinned = pinned || target.values.is_cuda();
    for (const Piece& piece : tensor.pieces) {
      auto runs = std::make_shared<const std::vector<Run>>(overlap_runs(piece, target));
      if (runs->empty()) continue;
      BlockTask task;
      task.tensor = &found->first;
      task.piece = &piece;
      task.shard = &shards.open(piece.file);
      task.target = &target;
      task.dtype = tensor.dtype;
      task.file_offset = task.shard->begin_of(piece, tensor.dtype);
      const std::uint64_t element = c10::elementSize(tensor.dtype);
      const std::uint64_t bytes = static_cast<std::uint64_t>(num_elements(piece.shape)) * element;
      std::set<std::size_t> blocks;  // that any run touches
      for (const Run& run : *runs) {
        const std::uint64_t first = static_cast<std::uint64_t>(run.source) * element / manifest_.block_bytes;
        const std::uint64_t last =
            (static_cast<std::uint64_t>(run.source + run.count) * element - 1) / manifest_.block_bytes;
        for (std::uint64_t b = first; b <= last; ++b) blocks.insert(b);
      }
      task.runs = std::move(runs);
      for (const std::size_t b : blocks) add_block(tasks, task, b, manifest_.block_bytes, bytes);
    }
  }
  run_tasks(tasks, manifest_.block_bytes, pinned, options);
}

at::Tensor Checkpoint::read(const std::string& name, const IoOptions& options) const {
  const auto found = manifest_.tensors.find(name);
  PGPT_CHECK(DataError, found != manifest_.tensors.end(), directory_.string(), " holds no tensor ", name);
  LocalTensor target;
  target.name = name;
  target.shape = found->second.shape;
  target.offset.assign(target.shape.size(), 0);
  target.values = at::empty(target.shape, found->second.dtype);
  load({target}, false, options);
  return target.values;
}

void Checkpoint::verify(const IoOptions& options) const {
  ShardSet shards(directory_, manifest_);
  std::vector<BlockTask> tasks;
  for (const auto& [file, entry] : manifest_.files) (void)shards.open(file);
  for (const auto& [name, tensor] : manifest_.tensors) {
    for (const Piece& piece : tensor.pieces) {
      BlockTask task;
      task.tensor = &name;
      task.piece = &piece;
      task.shard = &shards.open(piece.file);
      task.dtype = tensor.dtype;
      task.file_offset = task.shard->begin_of(piece, tensor.dtype);
      const std::uint64_t bytes =
          static_cast<std::uint64_t>(num_elements(piece.shape)) * c10::elementSize(tensor.dtype);
      for (std::size_t b = 0; b < piece.checksums.size(); ++b) add_block(tasks, task, b, manifest_.block_bytes, bytes);
    }
  }
  run_tasks(tasks, manifest_.block_bytes, false, options);
}

}  // namespace pgpt::checkpoint

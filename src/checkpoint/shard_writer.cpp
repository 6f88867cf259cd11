#include <ATen/ATen.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "parallel.h"
#include "pgpt/base/error.h"
#include "pgpt/checkpoint/checksum.h"
#include "pgpt/checkpoint/safetensors.h"
#include "pgpt/checkpoint/shard.h"
#include "piece_json.h"

namespace pgpt::checkpoint {
namespace {

using Json = nlohmann::ordered_json;

/// Below this, cutting a tensor among replicas costs more than it spreads.
constexpr std::uint64_t kSharedBytes = std::uint64_t{1} << 20;
/// Data sections and snapshots start at multiples of this.
constexpr std::uint64_t kAlignment = 64;

std::uint64_t bytes_of(const LocalTensor& tensor) {
  return static_cast<std::uint64_t>(tensor.values.numel()) * tensor.values.element_size();
}

std::uint64_t round_up(std::uint64_t n, std::uint64_t unit) { return (n + unit - 1) / unit * unit; }

/// The file of one shard while it is written.
class ShardFile {
 public:
  ShardFile(std::string path, std::uint64_t size) : path_(std::move(path)) {
    descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    PGPT_CHECK(DataError, descriptor_ >= 0, "cannot create ", path_, ": ", std::strerror(errno));
#ifdef __linux__
    // A disk without room is noticed before anything is written; file systems that cannot reserve space are no error.
    if (size > 0 && ::fallocate(descriptor_, 0, 0, static_cast<off_t>(size)) != 0 && errno != EOPNOTSUPP &&
        errno != ENOSYS)
      fail();
#endif
  }
  ShardFile(const ShardFile&) = delete;
  ShardFile& operator=(const ShardFile&) = delete;
  ~ShardFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  void write(const void* data, std::size_t size, std::uint64_t offset) {
    const char* cursor = static_cast<const char*>(data);
    const std::uint64_t start = offset;
    const std::size_t length = size;
    while (size > 0) {
      const ssize_t n = ::pwrite(descriptor_, cursor, size, static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) fail();
      cursor += n;
      offset += static_cast<std::uint64_t>(n);
      size -= static_cast<std::size_t>(n);
    }
#ifdef SYNC_FILE_RANGE_WRITE
    // Starts the transfer now, so that the final sync finds little left to do.
    (void)::sync_file_range(descriptor_, static_cast<off_t>(start), static_cast<off_t>(length), SYNC_FILE_RANGE_WRITE);
#else
    (void)start;
    (void)length;
#endif
  }

  void finish() {
    if (::fsync(descriptor_) != 0) fail();
    const int closed = ::close(descriptor_);
    descriptor_ = -1;
    if (closed != 0) fail();
  }

 private:
  [[noreturn]] void fail() const {
    const int cause = errno;
    throw DataError(concat("cannot write ", path_, ": ", std::strerror(cause),
                           cause == ENOSPC ? "; free some space or choose another --save" : ""));
  }

  std::string path_;
  int descriptor_ = -1;
};

struct Block {
  std::size_t part = 0;
  std::size_t index = 0;    // in its part
  std::uint64_t begin = 0;  // bytes inside the part
  std::uint64_t length = 0;
};

}  // namespace

std::vector<LocalTensor> writers_part(const std::vector<LocalTensor>& tensors, bool share) {
  std::vector<LocalTensor> mine;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const LocalTensor& tensor = tensors[i];
    if (tensor.values.numel() == 0) continue;
    const std::int64_t rows = tensor.values.dim() == 0 ? 1 : tensor.values.size(0);
    if (!share || tensor.replicas == 1 || bytes_of(tensor) < kSharedBytes || rows < tensor.replicas) {
      const std::int64_t owner = share ? static_cast<std::int64_t>(i) % tensor.replicas : 0;
      if (owner == tensor.replica) mine.push_back(tensor);
      continue;
    }
    const std::int64_t begin = rows * tensor.replica / tensor.replicas;
    const std::int64_t end = rows * (tensor.replica + 1) / tensor.replicas;
    LocalTensor part = tensor;
    part.values = tensor.values.narrow(0, begin, end - begin);
    part.offset[0] += begin;
    mine.push_back(std::move(part));
  }
  return mine;
}

std::uint64_t tensor_bytes(const std::vector<LocalTensor>& parts) {
  std::uint64_t bytes = 0;
  for (const LocalTensor& part : parts) bytes += bytes_of(part);
  return bytes;
}

std::vector<LocalTensor> host_snapshot(const std::vector<LocalTensor>& parts, at::Tensor& buffer) {
  std::uint64_t total = 0;
  bool cuda = false;
  for (const LocalTensor& part : parts) {
    total += round_up(bytes_of(part), kAlignment);
    cuda = cuda || part.values.is_cuda();
  }
  if (!buffer.defined() || buffer.numel() < static_cast<std::int64_t>(total)) {
    buffer = at::Tensor();  // freed first, so that both never exist together
    buffer = at::empty({static_cast<std::int64_t>(total)}, at::TensorOptions().dtype(at::kByte).pinned_memory(cuda));
  }
  std::vector<LocalTensor> copies = parts;
  std::uint64_t offset = 0;
  for (LocalTensor& part : copies) {
    const std::uint64_t bytes = bytes_of(part);
    const at::Tensor target = buffer.narrow(0, static_cast<std::int64_t>(offset), static_cast<std::int64_t>(bytes))
                                  .view(part.values.scalar_type())
                                  .view(part.values.sizes());
    target.copy_(part.values);
    part.values = target;
    offset += round_up(bytes, kAlignment);
  }
  return copies;
}

std::string ShardSummary::to_text() const {
  Json json = {{"file", file}, {"entry", to_json(entry)}, {"tensors", Json::array()}};
  for (const auto& [name, tensor] : tensors) json["tensors"].push_back({{"name", name}, {"tensor", to_json(tensor)}});
  return json.dump();
}

ShardSummary ShardSummary::from_text(const std::string& text) {
  try {
    const Json json = Json::parse(text);
    ShardSummary summary;
    summary.file = json.at("file").get<std::string>();
    summary.entry = file_from_json(json.at("entry"));
    for (const Json& item : json.at("tensors")) {
      summary.tensors.emplace_back(item.at("name").get<std::string>(), tensor_from_json(item.at("tensor")));
    }
    return summary;
  } catch (const Json::exception& e) {
    throw DataError(concat("a rank reported its checkpoint shard wrongly: ", e.what()));
  }
}

ShardSummary write_shard(const std::filesystem::path& folder, const std::string& file,
                         const std::vector<LocalTensor>& parts, const IoOptions& options) {
  PGPT_ASSERT(options.block_bytes > 0 && options.block_bytes % 16 == 0, "block of ", options.block_bytes, " bytes");
  ShardSummary summary;
  if (parts.empty()) return summary;
  summary.file = file;
  Json header = {{"__metadata__", {{"format", "pt"}}}};
  std::map<std::string, int> repeated;
  std::vector<Block> blocks;
  std::vector<std::uint64_t> offsets;
  std::uint64_t offset = 0;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const LocalTensor& part = parts[p];
    PGPT_ASSERT(part.values.is_contiguous(), part.name);
    const int again = repeated[part.name]++;
    Piece piece;
    piece.file = file;
    piece.key = again == 0 ? part.name : part.name + "#" + std::to_string(again);
    piece.offset = part.offset;
    piece.shape = part.values.sizes().vec();
    const std::uint64_t bytes = bytes_of(part);
    header[piece.key] = {{"dtype", dtype_name(part.values.scalar_type())},
                         {"shape", piece.shape},
                         {"data_offsets", {offset, offset + bytes}}};
    const std::size_t count = (bytes + options.block_bytes - 1) / options.block_bytes;
    piece.checksums.resize(count);
    for (std::size_t b = 0; b < count; ++b) {
      const std::uint64_t begin = b * options.block_bytes;
      blocks.push_back({p, b, begin, std::min(options.block_bytes, bytes - begin)});
    }
    offsets.push_back(offset);
    offset += bytes;
    summary.tensors.emplace_back(part.name, TensorEntry{part.values.scalar_type(), part.shape, {std::move(piece)}});
  }
  std::string text = header.dump();
  text.append(round_up(text.size() + sizeof(std::uint64_t), kAlignment) - text.size() - sizeof(std::uint64_t), ' ');
  const std::uint64_t length = text.size();
  std::string prefix(reinterpret_cast<const char*>(&length), sizeof length);
  prefix += text;
  summary.entry = {prefix.size() + offset, crc32c(prefix.data(), prefix.size())};

  ShardFile out((folder / file).string(), summary.entry.bytes);
  out.write(prefix.data(), prefix.size(), 0);
  std::vector<at::Tensor> staging(static_cast<std::size_t>(std::max(options.threads, 1)));
  parallel_tasks(blocks.size(), options.threads, [&](int worker, std::size_t task) {
    PGPT_CHECK(DataError, options.cancel == nullptr || !*options.cancel, "the save into ", folder.string(),
               " was cancelled");
    const Block& block = blocks[task];
    const at::Tensor flat = parts[block.part].values.view({-1});
    const auto element = static_cast<std::uint64_t>(flat.element_size());
    at::Tensor source = flat.narrow(0, static_cast<std::int64_t>(block.begin / element),
                                    static_cast<std::int64_t>(block.length / element));
    if (source.is_cuda()) {
      at::Tensor& own = staging[static_cast<std::size_t>(worker)];
      if (!own.defined()) {
        own = at::empty({static_cast<std::int64_t>(options.block_bytes)},
                        at::TensorOptions().dtype(at::kByte).pinned_memory(true));
      }
      const at::Tensor host = own.narrow(0, 0, static_cast<std::int64_t>(block.length)).view(source.scalar_type());
      host.copy_(source);
      source = host;
    }
    summary.tensors[block.part].second.pieces[0].checksums[block.index] = crc32c(source.data_ptr(), block.length);
    out.write(source.data_ptr(), block.length, prefix.size() + offsets[block.part] + block.begin);
  });
  out.finish();
  return summary;
}

void merge(Manifest& manifest, const ShardSummary& summary) {
  if (summary.file.empty()) return;
  PGPT_CHECK(DataError, manifest.files.emplace(summary.file, summary.entry).second, "two ranks wrote ", summary.file);
  for (const auto& [name, tensor] : summary.tensors) {
    const auto [known, added] = manifest.tensors.emplace(name, TensorEntry{tensor.dtype, tensor.shape, {}});
    PGPT_CHECK(DataError, added || (known->second.dtype == tensor.dtype && known->second.shape == tensor.shape),
               "ranks disagree about tensor ", name, ": ", dtype_name(known->second.dtype), " ",
               shape_text(known->second.shape), " and ", dtype_name(tensor.dtype), " ", shape_text(tensor.shape),
               " in ", summary.file);
    known->second.pieces.insert(known->second.pieces.end(), tensor.pieces.begin(), tensor.pieces.end());
  }
}

}  // namespace pgpt::checkpoint

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "block_file.h"
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
/// Pinned memory comes in powers of two: snapshots are divided, so that little is wasted.
constexpr std::uint64_t kSnapshotBytes = std::uint64_t{1} << 30;
/// Tensors of a snapshot start at multiples of this.
constexpr std::uint64_t kAlignment = 64;

std::uint64_t bytes_of(const LocalTensor& tensor) {
  return static_cast<std::uint64_t>(tensor.values.numel()) * tensor.values.element_size();
}

std::uint64_t round_up(std::uint64_t n, std::uint64_t unit) { return (n + unit - 1) / unit * unit; }

/// One file of a rank while it is written.
struct Shard {
  ShardSummary summary;
  std::vector<LocalTensor> parts;
  std::vector<std::uint64_t> offsets;  // of each part in the file
  std::string header;
  std::unique_ptr<OutputFile> file;
};

/// Lays the parts out in a file and writes its header.
Shard open_shard(const std::filesystem::path& folder, const std::string& file, std::vector<LocalTensor> parts,
                 std::uint64_t block_bytes) {
  // Whole pages first: they stay whole in the file.
  std::stable_partition(parts.begin(), parts.end(), [](const LocalTensor& p) { return bytes_of(p) % kPage == 0; });
  Shard shard;
  shard.summary.file = file;
  Json header = {{"__metadata__", {{"format", "pt"}}}};
  std::map<std::string, int> repeated;
  std::uint64_t offset = 0;
  for (const LocalTensor& part : parts) {
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
    piece.checksums.resize((bytes + block_bytes - 1) / block_bytes);
    shard.offsets.push_back(offset);
    offset += bytes;
    shard.summary.tensors.emplace_back(part.name,
                                       TensorEntry{part.values.scalar_type(), part.shape, {std::move(piece)}});
  }
  std::string text = header.dump();
  text.append(round_up(text.size() + sizeof(std::uint64_t), kPage) - text.size() - sizeof(std::uint64_t), ' ');
  const std::uint64_t length = text.size();
  shard.header.assign(reinterpret_cast<const char*>(&length), sizeof length);
  shard.header += text;
  for (std::uint64_t& at : shard.offsets) at += shard.header.size();
  shard.summary.entry = {shard.header.size() + offset, crc32c(shard.header.data(), shard.header.size())};
  shard.parts = std::move(parts);
  shard.file = std::make_unique<OutputFile>((folder / file).string(), shard.summary.entry.bytes);
  return shard;
}

/// A stretch of a part that is checked and written at once.
struct Block {
  Shard* shard = nullptr;
  std::size_t part = 0, index = 0;  // of the part in the shard, of the block in the part
  std::uint64_t begin = 0, length = 0;
};

/// Copies a block to the host where necessary, notes its checksum and writes it.
void write_block(const Block& block, const IoOptions& options, std::optional<BlockBuffer>& buffer) {
  Shard& shard = *block.shard;
  const at::Tensor bytes = shard.parts[block.part].values.view({-1}).view(at::kByte);
  const at::Tensor source =
      bytes.narrow(0, static_cast<std::int64_t>(block.begin), static_cast<std::int64_t>(block.length));
  const std::uint64_t offset = shard.offsets[block.part] + block.begin;
  const char* data = source.is_cpu() ? static_cast<const char*>(source.data_ptr()) : nullptr;
  if (data == nullptr || shard.file->direct()) {
    if (!buffer) buffer.emplace(options.block_bytes, source.is_cuda());
    char* place = buffer->place(offset);
    if (data != nullptr) {
      std::memcpy(place, data, block.length);
    } else {
      at::from_blob(place, {source.numel()}, at::kByte).copy_(source);
    }
    data = place;
  }
  shard.summary.tensors[block.part].second.pieces[0].checksums[block.index] = crc32c(data, block.length);
  shard.file->write(data, block.length, offset);
}

/// Writes and syncs all shards, with every thread at any of them.
void write_all(std::vector<Shard>& shards, const std::filesystem::path& folder, const IoOptions& options) {
  std::vector<Block> blocks;
  for (Shard& shard : shards) {
    shard.file->write_cached(shard.header.data(), shard.header.size(), 0);
    for (std::size_t p = 0; p < shard.parts.size(); ++p) {
      const std::uint64_t bytes = bytes_of(shard.parts[p]);
      for (std::uint64_t begin = 0; begin < bytes; begin += options.block_bytes) {
        blocks.push_back({&shard, p, begin / options.block_bytes, begin, std::min(options.block_bytes, bytes - begin)});
      }
    }
  }
  std::stable_sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) {
    return a.shard->offsets[a.part] + a.begin < b.shard->offsets[b.part] + b.begin;  // all files grow together
  });
  std::vector<std::optional<BlockBuffer>> buffers(static_cast<std::size_t>(std::max(options.threads, 1)));
  parallel_tasks(blocks.size(), options.threads, [&](int worker, std::size_t task) {
    PGPT_CHECK(DataError, options.cancel == nullptr || !*options.cancel, "the save into ", folder.string(),
               " was cancelled");
    write_block(blocks[task], options, buffers[static_cast<std::size_t>(worker)]);
  });
  parallel_tasks(shards.size(), options.threads, [&](int, std::size_t shard) { shards[shard].file->finish(); });
}

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
    // Cuts between pages, where that still gives every replica something.
    const std::uint64_t row_bytes = bytes_of(tensor) / static_cast<std::uint64_t>(rows);
    auto unit = static_cast<std::int64_t>(kPage / std::gcd(kPage, row_bytes));
    if (unit * tensor.replicas > rows) unit = 1;
    const auto cut = [&](std::int64_t replica) {
      return replica == tensor.replicas ? rows : rows * replica / tensor.replicas / unit * unit;
    };
    const std::int64_t begin = cut(tensor.replica);
    const std::int64_t end = cut(tensor.replica + 1);
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

std::vector<LocalTensor> host_snapshot(const std::vector<LocalTensor>& parts, std::vector<at::Tensor>& buffers) {
  std::vector<LocalTensor> copies = parts;
  std::size_t current = 0;
  std::uint64_t used = 0;
  for (LocalTensor& part : copies) {
    const std::uint64_t bytes = round_up(bytes_of(part), kAlignment);
    while (current < buffers.size() && used + bytes > static_cast<std::uint64_t>(buffers[current].numel())) {
      ++current;
      used = 0;
    }
    if (current == buffers.size()) {
      const auto size = static_cast<std::int64_t>(std::max(bytes, kSnapshotBytes));
      buffers.push_back(at::empty({size}, at::TensorOptions().dtype(at::kByte).pinned_memory(part.values.is_cuda())));
    }
    const at::Tensor target = buffers[current]
                                  .narrow(0, static_cast<std::int64_t>(used), static_cast<std::int64_t>(bytes_of(part)))
                                  .view(part.values.scalar_type())
                                  .view(part.values.sizes());
    target.copy_(part.values);
    part.values = target;
    used += bytes;
  }
  return copies;
}

std::string summaries_text(const std::vector<ShardSummary>& summaries) {
  Json list = Json::array();
  for (const ShardSummary& summary : summaries) {
    Json tensors = Json::array();
    for (const auto& [name, tensor] : summary.tensors) tensors.push_back({{"name", name}, {"tensor", to_json(tensor)}});
    list.push_back({{"file", summary.file}, {"entry", to_json(summary.entry)}, {"tensors", std::move(tensors)}});
  }
  return list.dump();
}

std::vector<ShardSummary> parse_summaries(const std::string& text) {
  try {
    std::vector<ShardSummary> summaries;
    for (const Json& json : Json::parse(text)) {
      ShardSummary summary;
      summary.file = json.at("file").get<std::string>();
      summary.entry = file_from_json(json.at("entry"));
      for (const Json& item : json.at("tensors")) {
        summary.tensors.emplace_back(item.at("name").get<std::string>(), tensor_from_json(item.at("tensor")));
      }
      summaries.push_back(std::move(summary));
    }
    return summaries;
  } catch (const Json::exception& e) {
    throw DataError(concat("a rank reported its checkpoint files wrongly: ", e.what()));
  }
}

std::vector<ShardSummary> write_shards(const std::filesystem::path& folder, const std::string& name,
                                       const std::vector<LocalTensor>& parts, const IoOptions& options) {
  PGPT_ASSERT(options.block_bytes > 0 && options.block_bytes % 16 == 0, "block of ", options.block_bytes, " bytes");
  const std::uint64_t total = tensor_bytes(parts);
  // Many file systems let only one thread at a time write into a file.
  const std::uint64_t files = std::clamp<std::uint64_t>(total / options.file_bytes, 1,
                                                        static_cast<std::uint64_t>(std::max(options.threads, 1)));
  std::vector<std::vector<LocalTensor>> divided(files);
  std::uint64_t before = 0;
  for (const LocalTensor& part : parts) {
    // By the middle of the part, so that the files differ by no more than a tensor.
    const std::uint64_t middle = before + bytes_of(part) / 2;
    divided[std::min(files - 1, total == 0 ? 0 : middle * files / total)].push_back(part);
    before += bytes_of(part);
  }
  std::vector<Shard> shards;
  for (std::size_t i = 0; i < divided.size(); ++i) {
    if (divided[i].empty()) continue;
    const std::string file = name + (i == 0 ? "" : "_" + std::to_string(i)) + ".safetensors";
    shards.push_back(open_shard(folder, file, std::move(divided[i]), options.block_bytes));
  }
  write_all(shards, folder, options);
  std::vector<ShardSummary> summaries;
  for (Shard& shard : shards) summaries.push_back(std::move(shard.summary));
  return summaries;
}

void merge(Manifest& manifest, const ShardSummary& summary) {
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

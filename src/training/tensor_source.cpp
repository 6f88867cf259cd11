#include "pgpt/training/tensor_source.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "pgpt/base/error.h"
#include "pgpt/data/checksum.h"

namespace pgpt::training {
namespace {

using nlohmann::json;

bool starts_with(const std::string& text, const std::string& start) { return text.rfind(start, 0) == 0; }

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

/// Cuts `text` at the first `separator`: the word before it, with `text` left behind it; everything when there is none.
std::string take_word(std::string& text, char separator) {
  const std::size_t end = text.find(separator);
  std::string word = text.substr(0, end);
  text = end == std::string::npos ? "" : text.substr(end + 1);
  return word;
}

/// The number behind a prefix ("iter12" -> 12), or none when the word has another form.
std::optional<std::int64_t> number_after(const std::string& word, const std::string& prefix) {
  if (!starts_with(word, prefix) || word.size() == prefix.size()) return std::nullopt;
  const std::string digits = word.substr(prefix.size());
  if (digits.size() > 15 || digits.find_first_not_of("0123456789") != std::string::npos) return std::nullopt;
  return std::stoll(digits);
}

bool sample_kind(const std::string& kind) {
  return kind == "tokens" || kind == "labels" || kind == "loss_mask" || kind == "token_losses" || kind == "logits" ||
         kind == "activation";
}

bool parameter_kind(const std::string& kind) {
  static const std::set<std::string> kinds = {"main_grad",  "clipped_main_grad", "param",      "delta",
                                              "fp32_param", "exp_avg",           "exp_avg_sq", "momentum_buffer"};
  return kinds.count(kind) != 0;
}

/// Activations that each tensor-parallel rank holds a share of the columns of.
bool column_parallel(const std::string& kind, const std::string& name) {
  if (kind == "logits") return true;
  return kind == "activation" &&
         (contains(name, ".linear_qkv") || contains(name, ".core_attention") || contains(name, ".mlp.activation"));
}

}  // namespace

// ---- opening ----

TensorSource::TensorSource(const std::string& path, std::optional<std::int64_t> final_iteration) : path_(path) {
  if (std::filesystem::is_directory(path)) {
    open_evidence();
  } else {
    open_plain(final_iteration);
  }
}

void TensorSource::open_evidence() {
  namespace fs = std::filesystem;
  std::vector<std::pair<std::int64_t, fs::path>> folders;
  const auto add = [&](const fs::path& folder) {
    const std::optional<std::int64_t> iteration = number_after(folder.filename().string(), "iter_");
    if (iteration && fs::is_directory(folder)) folders.emplace_back(*iteration, folder);
  };
  fs::path itself = fs::path(path_).lexically_normal();
  if (!itself.has_filename()) itself = itself.parent_path();  // a trailing slash
  add(itself);
  if (!folders.empty()) single_iteration_ = folders.front().first;
  if (folders.empty()) {
    for (const auto& entry : fs::directory_iterator(path_)) add(entry.path());
  }
  std::sort(folders.begin(), folders.end());
  PGPT_CHECK(DataError, !folders.empty(), path_,
             " holds no evidence (no folder named iter_NNNNNNN); write some with --evidence-dir");
  if (folders.back().first == 0) description_ = "initial weights";
  for (const auto& [iteration, folder] : folders) {
    int world = 1;
    for (int rank = 0; rank < world; ++rank) {
      char stem[32];
      std::snprintf(stem, sizeof stem, "rank_%05d", rank);
      const std::string base = (folder / stem).string();
      std::ifstream in(base + ".json");
      PGPT_CHECK(DataError, in.good() || !fs::exists(folder / "manifest.json"), folder.string(),
                 " is a checkpoint; gpt_tool diff compares two of them");
      PGPT_CHECK(DataError, in.good(), folder.string(), " is incomplete: ", stem, ".json is missing",
                 rank > 0 ? concat(" of ", world, " ranks") : std::string(),
                 "; the run was stopped while it wrote, so write it again");
      if (rank == 0) {
        const json manifest = json::parse(in, nullptr, false);
        PGPT_CHECK(DataError, manifest.is_object() && manifest.value("format", "") == "pgpt-evidence-1", base,
                   ".json is no evidence manifest of this version");
        world = manifest.value("world_size", 0);
      }
      open_rank(base, iteration, rank);
    }
  }
}

void TensorSource::open_rank(const std::string& stem, std::int64_t iteration, int rank) {
  std::ifstream in(stem + ".json");
  const json manifest = json::parse(in, nullptr, false);
  try {
    PGPT_CHECK(DataError, manifest.is_object() && manifest.at("rank") == rank && manifest.at("iteration") == iteration,
               stem, ".json belongs to another rank or iteration; the folder mixes several runs");
    const json& layout = manifest.at("layout");
    const auto data_rank = layout.at("data_rank").get<std::int64_t>();
    const auto data_size = layout.at("data_size").get<std::int64_t>();
    const auto tensor_index = layout.at("tensor").at("index").get<std::int64_t>();
    const auto tensor_size = layout.at("tensor").at("size").get<std::int64_t>();
    // Context-parallel ranks hold different tokens of the same samples.
    const auto context_size = layout.at("context").at("size").get<std::int64_t>();
    const std::string context =
        context_size > 1 ? concat("@context", layout.at("context").at("index").get<std::int64_t>()) : std::string();
    const auto dtype = manifest.at("parameter_dtype").get<std::string>();
    low_precision_ = low_precision_ || dtype != "Float";

    std::map<std::string, parameter::ShardLayout> layouts;
    for (const auto& [name, entry] : manifest.at("parameters").items()) {
      parameter::ShardLayout& cuts = layouts[name];
      cuts.logical_shape = entry.at("logical_shape").get<std::vector<std::int64_t>>();
      for (const json& cut : entry.at("cuts")) {
        const auto axis = cut.at("axis").get<std::string>();
        cuts.cuts.push_back({axis == "gtp" ? mesh::Axis::kGtp : mesh::Axis::kTensor, cut.at("dim"), cut.at("index"),
                             cut.at("count"), cut.at("padding")});
      }
    }
    std::int64_t micro_batch_size = 1, num_microbatches = 1;
    double loss_scale = 1.0;
    bool per_token = false;
    std::optional<double> clip;
    std::map<std::int64_t, std::int64_t> valid_tokens;
    if (manifest.contains("step")) {
      const json& step = manifest.at("step");
      micro_batch_size = step.at("micro_batch_size");
      num_microbatches = step.at("num_microbatches");
      loss_scale = step.at("loss_scale");
      per_token = step.at("per_token_loss");
      if (step.at("clip_coefficient").is_number()) clip = step.at("clip_coefficient").get<double>();
      for (const json& entry : step.at("micro_batches")) valid_tokens[entry.at("index")] = entry.at("valid_tokens");
    }
    if (rank == 0 && description_.empty() && manifest.contains("step")) {
      description_ =
          concat(manifest.at("world_size").get<int>(), " rank(s), GTP ", layout.at("gtp").at("size").get<int>(),
                 ", data-parallel ", data_size, ", ", num_microbatches, " micro-batch(es) of ", micro_batch_size, ", ",
                 dtype, " on ", manifest.at("device").get<std::string>());
    }

    const std::size_t file = files_.size();
    files_.push_back(std::make_unique<checkpoint::SafetensorsFile>(stem + ".safetensors"));
    checksums_.emplace_back();
    for (const json& entry : manifest.at("tensors")) {
      const auto tensor = entry.at("name").get<std::string>();
      checksums_[file][tensor] = entry.at("crc32").get<std::string>();
      PGPT_CHECK(DataError, files_[file]->contains(tensor), stem, ".safetensors lacks ", tensor,
                 ", which its manifest lists");
      std::string rest = tensor;
      std::string kind = take_word(rest, '.');
      Piece piece{file, tensor, rank, {}, 0, 1, 0};
      if (const std::optional<std::int64_t> index = number_after(kind, "mb")) {
        kind = take_word(rest, '.');
        const std::int64_t first = (*index * data_size + data_rank) * micro_batch_size;
        if (kind == "grad") {
          piece.layout = layouts.at(rest);
          auto& cuts = piece.layout->cuts;
          cuts.erase(
              std::remove_if(cuts.begin(), cuts.end(), [](const auto& cut) { return cut.axis == mesh::Axis::kGtp; }),
              cuts.end());
          Item& item = items_[make_key(iteration, kind, rest + context, first, micro_batch_size)];
          const double tokens = static_cast<double>(std::max<std::int64_t>(valid_tokens[*index], 1));
          item.scale = (per_token ? 1.0 / tokens : static_cast<double>(num_microbatches)) / loss_scale;
          item.pieces.push_back(piece);
          continue;
        }
        piece.parts = micro_batch_size;
        const bool columns = tensor_size > 1 && column_parallel(kind, rest);
        if (columns) piece.column_part = tensor_index;
        for (std::int64_t i = 0; i < micro_batch_size; ++i) {
          piece.part = i;
          Item& item = items_[make_key(iteration, kind, rest + context, first + i, 1)];
          item.column_parts = columns ? tensor_size : 1;
          // Gradients of activations as those of the sum of all token losses, whatever shares the micro-batch.
          const double tokens = static_cast<double>(std::max<std::int64_t>(valid_tokens[*index], 1));
          const bool gradient = kind == "activation" && rest.find(".gradient") != std::string::npos;
          if (gradient) item.scale = (per_token ? 1.0 : static_cast<double>(num_microbatches) * tokens) / loss_scale;
          item.pieces.push_back(piece);
        }
        continue;
      }
      PGPT_CHECK(DataError, parameter_kind(kind), stem, ".json lists ", tensor,
                 ", whose kind is unknown to this version");
      piece.layout = layouts.at(rest);
      items_[make_key(iteration, kind, rest)].pieces.push_back(piece);
      if (kind == "main_grad" && clip) {
        Item& clipped = items_[make_key(iteration, "clipped_main_grad", rest)];
        clipped.pieces.push_back(piece);
        clipped.scale = *clip;
      }
    }
  } catch (const json::exception& error) {
    throw DataError(concat(stem, ".json is damaged: ", error.what()));
  } catch (const std::out_of_range&) {
    throw DataError(concat(stem, ".json lists a tensor of a parameter that it does not describe"));
  }
}

void TensorSource::open_plain(std::optional<std::int64_t> final_iteration) {
  files_.push_back(std::make_unique<checkpoint::SafetensorsFile>(path_));
  checksums_.emplace_back();
  description_ = "plain safetensors";
  std::int64_t last = 0;
  for (const auto& [name, entry] : files_[0]->entries()) {
    std::string rest = name;
    last = std::max(last, number_after(take_word(rest, '.'), "iter").value_or(0));
    low_precision_ = low_precision_ || entry.dtype == at::kBFloat16 || entry.dtype == at::kHalf;
  }
  if (last == 0) last = final_iteration.value_or(0);
  for (const auto& [name, entry] : files_[0]->entries()) {
    std::string rest = name;
    const std::string first = take_word(rest, '.');
    std::optional<std::int64_t> iteration = number_after(first, "iter");
    TensorKey key = make_key(0, "param", name);
    if (first == "final") {
      PGPT_CHECK(DataError, last > 0, path_, ": ", name,
                 " belongs to the last iteration, which no name tells; give --iteration N");
      iteration = last;
    }
    if (iteration) {
      std::string kind = take_word(rest, '.');
      if (const std::optional<std::int64_t> rank = number_after(kind, "rank")) {
        kind = take_word(rest, '.');
        key = make_key(*iteration, kind, rest, *rank, 1);
      } else {
        if (kind == "master") kind = "fp32_param";
        if (kind == "param_after") kind = "param";
        key = make_key(*iteration, kind, rest);
      }
      PGPT_CHECK(DataError, sample_kind(kind) || parameter_kind(kind) || kind == "grad", path_, ": cannot tell what ",
                 name,
                 " is; names are iterN.rankR.logits, iterN.main_grad.NAME, final.exp_avg.NAME, or a parameter's name");
    }
    items_[key].pieces.push_back(Piece{0, name, 0, {}, 0, 1, 0});
  }
}

// ---- reading ----

std::vector<TensorKey> TensorSource::keys() const {
  std::vector<TensorKey> result;
  result.reserve(items_.size());
  for (const auto& [key, item] : items_) result.push_back(key);
  return result;
}

at::Tensor TensorSource::read_piece(const Piece& piece) const {
  at::Tensor tensor = files_[piece.file]->read(piece.tensor);
  const auto& written = checksums_[piece.file];
  if (const auto known = written.find(piece.tensor); known != written.end()) {
    const std::span<const std::byte> bytes(static_cast<const std::byte*>(tensor.data_ptr()),
                                           static_cast<std::size_t>(tensor.nbytes()));
    char now[9];
    std::snprintf(now, sizeof now, "%08x", data::crc32(bytes));
    const std::string note = concat(path_, ": ", piece.tensor, " of rank ", piece.rank,
                                    " was changed after it was written (its checksum does not fit)");
    if (known->second != now && std::find(notes_.begin(), notes_.end(), note) == notes_.end()) notes_.push_back(note);
  }
  if (piece.parts > 1) {
    PGPT_CHECK(DataError, tensor.dim() > 0 && tensor.size(0) % piece.parts == 0, path_, ": ", piece.tensor, " has ",
               tensor.size(0), " rows, which do not divide into ", piece.parts, " samples");
    const std::int64_t rows = tensor.size(0) / piece.parts;
    tensor = tensor.narrow(0, piece.part * rows, rows);
  }
  return tensor;
}

Assembled TensorSource::read(const TensorKey& key) const {
  const Item& item = items_.at(key);
  Assembled result;
  result.scale = item.scale;
  const bool whole = !item.pieces.front().layout || item.pieces.front().layout->cuts.empty();
  if (whole && item.column_parts == 1) {
    // Every rank that holds it must hold the same bits.
    for (const Piece& piece : item.pieces) {
      const at::Tensor tensor = read_piece(piece);
      if (!result.tensor.defined()) {
        result.tensor = tensor;
      } else if (!result.tensor.equal(tensor) && result.conflict.empty()) {
        result.conflict = concat("ranks ", item.pieces.front().rank, " and ", piece.rank, " hold different copies");
      }
    }
  } else if (item.column_parts > 1) {
    std::vector<at::Tensor> parts(static_cast<std::size_t>(item.column_parts));
    for (const Piece& piece : item.pieces) parts.at(static_cast<std::size_t>(piece.column_part)) = read_piece(piece);
    for (const at::Tensor& part : parts)
      PGPT_CHECK(DataError, part.defined(), path_, ": a tensor-parallel part of ", key.text(), " is missing");
    result.tensor = at::cat(parts, -1);
  } else {
    // Each part goes where its cuts say; copies of a part must agree.
    std::map<std::vector<std::int64_t>, std::pair<at::Tensor, int>> seen;
    std::int64_t filled = 0;
    for (const Piece& piece : item.pieces) {
      const parameter::ShardLayout& layout = *piece.layout;
      at::Tensor part = read_piece(piece);
      PGPT_CHECK(DataError, part.sizes().vec() == layout.local_shape(), path_, ": ", piece.tensor, " of rank ",
                 piece.rank, " does not have the shape that its cuts give");
      if (!result.tensor.defined()) result.tensor = at::zeros(layout.logical_shape, part.options());
      at::Tensor place = result.tensor;
      std::vector<std::int64_t> where;
      for (std::int64_t dim = 0; dim < place.dim(); ++dim) {
        const parameter::ShardLayout::Range range = layout.local_range(dim);
        place = place.narrow(dim, range.begin, range.end - range.begin);
        part = part.narrow(dim, 0, range.end - range.begin);
        where.push_back(range.begin);
        where.push_back(range.end);
      }
      const auto [it, fresh] = seen.try_emplace(where, part, piece.rank);
      if (fresh) {
        place.copy_(part);
        filled += part.numel();
      } else if (!it->second.first.equal(part) && result.conflict.empty()) {
        result.conflict =
            concat("ranks ", it->second.second, " and ", piece.rank, " hold different copies of one shard");
      }
    }
    PGPT_CHECK(DataError, filled == result.tensor.numel(), path_, ": the shards of ", key.text(), " cover ", filled,
               " of ", result.tensor.numel(), " elements");
  }
  if (key.kind == "clipped_main_grad") {
    result.tensor = result.tensor.mul(item.scale);
    result.scale = 1.0;
  }
  if (key.kind == "tokens" || key.kind == "labels") result.tensor = result.tensor.reshape({-1});
  return result;
}

std::optional<int> TensorSource::owner(const TensorKey& key, const std::vector<std::int64_t>& coordinates) const {
  std::optional<int> found;
  if (checksums_.front().empty()) return found;  // a plain file has no ranks
  for (const Piece& piece : items_.at(key).pieces) {
    bool inside = true;
    if (piece.layout) {
      for (std::size_t dim = 0; dim < coordinates.size(); ++dim) {
        const parameter::ShardLayout::Range range = piece.layout->local_range(static_cast<std::int64_t>(dim));
        inside = inside && coordinates[dim] >= range.begin && coordinates[dim] < range.end;
      }
    }
    if (!inside) continue;
    if (found) return std::nullopt;
    found = piece.rank;
  }
  return found;
}

at::Tensor TensorSource::initial(const std::string& name) const {
  const TensorKey start = make_key(0, "param", name);
  if (contains(start)) return read(start).tensor.to(at::kDouble);
  const TensorKey after = make_key(1, "param", name);
  const TensorKey delta = make_key(1, "delta", name);
  if (contains(after) && contains(delta))
    return read(after).tensor.to(at::kDouble).sub(read(delta).tensor.to(at::kDouble));
  return {};
}

void TensorSource::renumber_samples(std::int64_t iteration, const std::map<std::int64_t, std::int64_t>& order) {
  std::map<TensorKey, Item> renamed;
  for (auto& [key, item] : items_) {
    TensorKey changed = key;
    if (key.iteration == iteration && key.sample >= 0) changed.sample = order.at(key.sample);
    renamed.emplace(std::move(changed), std::move(item));
  }
  items_ = std::move(renamed);
}

void TensorSource::renumber_iteration(std::int64_t iteration) {
  std::map<TensorKey, Item> renamed;
  for (auto& [key, item] : items_) {
    TensorKey changed = key;
    changed.iteration = iteration;
    renamed.emplace(std::move(changed), std::move(item));
  }
  items_ = std::move(renamed);
  single_iteration_ = iteration;
}

}  // namespace pgpt::training

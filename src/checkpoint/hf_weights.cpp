// The safetensors files of a Hugging Face model.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "pgpt/base/error.h"
#include "pgpt/checkpoint/hugging_face.h"
#include "pgpt/checkpoint/manifest.h"

namespace pgpt::checkpoint {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kWeights = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

/// Buffers that old files store beside the weights: causal masks and rotary frequencies, which follow from the
/// configuration.
bool is_buffer(const std::string& name) {
  return ends_with(name, ".attn.bias") || ends_with(name, ".attn.masked_bias") ||
         ends_with(name, ".rotary_emb.inv_freq");
}

/// A name without the prefix that only models with an output layer have.
std::string without_prefix(const std::string& name) {
  for (const std::string prefix : {"transformer.", "model."}) {
    if (name.rfind(prefix, 0) == 0) return name.substr(prefix.size());
  }
  return name;
}

}  // namespace

HfWeights::HfWeights(const fs::path& folder) : folder_(folder) {
  const auto open = [&](const std::string& file) {
    if (files_.count(file) == 0) files_[file] = std::make_unique<SafetensorsFile>((folder / file).string());
  };
  if (fs::exists(folder / kIndex)) {
    std::ifstream in(folder / kIndex);
    const Json index = Json::parse(in, nullptr, false);
    PGPT_CHECK(DataError, index.is_object() && index.contains("weight_map") && index["weight_map"].is_object(),
               (folder / kIndex).string(), " is no index of safetensors files: it has no weight_map");
    for (const auto& [name, file] : index["weight_map"].items()) {
      PGPT_CHECK(DataError, file.is_string() && file.get<std::string>().find('/') == std::string::npos,
                 (folder / kIndex).string(), ": tensor ", name, " is in no file of this folder");
      const auto file_name = file.get<std::string>();
      open(file_name);
      PGPT_CHECK(DataError, files_[file_name]->contains(name), (folder / file_name).string(), " lacks tensor ", name,
                 ", which ", kIndex, " places there");
      places_[name] = {file_name, name};
    }
    return;
  }
  PGPT_CHECK(DataError, fs::exists(folder / kWeights), folder.string(), " holds neither ", kWeights, " nor ", kIndex,
             "; save the model with save_pretrained(FOLDER) of the transformers library, which writes safetensors");
  open(kWeights);
  for (const auto& [name, entry] : files_[kWeights]->entries()) places_[name] = {kWeights, name};
}

const HfWeights::Place* HfWeights::find(const std::string& name) const {
  auto found = places_.find(name);
  if (found == places_.end()) found = places_.find(without_prefix(name));
  return found == places_.end() ? nullptr : &found->second;
}

void HfWeights::check(const std::vector<HfLink>& links, HfFamily family, const config::ModelConfig& model) const {
  std::set<std::string> used;
  for (const HfLink& link : links) {
    for (std::size_t i = 0; i < link.names.size(); ++i) {
      const Place* place = find(link.names[i]);
      PGPT_CHECK(DataError, place != nullptr, folder_.string(), " has no tensor ", link.names[i], ", which a ",
                 family_name(family), " model with this config.json has");
      const SafetensorsFile::Entry& entry = files_.at(place->file)->entries().at(place->stored_name);
      const std::vector<std::int64_t>& shape = entry.shape;
      PGPT_CHECK(DataError, at::isFloatingType(entry.dtype), folder_.string(), ": tensor ", link.names[i], " has type ",
                 dtype_name(entry.dtype), ", which is no floating-point type; give the model before quantisation");
      PGPT_CHECK(DataError, shape == link.shapes[i], folder_.string(), ": tensor ", link.names[i], " has shape ",
                 shape_text(shape), ", by config.json it should have ", shape_text(link.shapes[i]));
      used.insert(place->stored_name);
    }
  }
  for (const auto& [name, place] : places_) {
    // Tied models may store their output matrix again.
    const bool tied_output = !model.untie_embeddings && name == "lm_head.weight";
    PGPT_CHECK(DataError, used.count(name) != 0 || is_buffer(name) || tied_output, folder_.string(), " has a tensor ",
               name, ", for which the model here has no place");
  }
}

at::Tensor HfWeights::read(const std::string& name) const {
  const Place* place = find(name);
  PGPT_CHECK(DataError, place != nullptr, folder_.string(), " has no tensor ", name);
  return files_.at(place->file)->read(place->stored_name);
}

at::ScalarType HfWeights::dtype() const {
  std::map<at::ScalarType, std::int64_t> counts;
  for (const auto& [name, place] : places_) {
    const SafetensorsFile::Entry& entry = files_.at(place.file)->entries().at(name);
    if (at::isFloatingType(entry.dtype)) counts[entry.dtype] += num_elements(entry.shape);
  }
  PGPT_CHECK(DataError, !counts.empty(), folder_.string(), " holds no floating-point tensors");
  return std::max_element(counts.begin(), counts.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; })
      ->first;
}

at::Tensor HfWeights::read_native(const HfLink& link, const config::ModelConfig& model) const {
  std::vector<at::Tensor> parts;
  for (const std::string& name : link.names) parts.push_back(read(name));
  return from_hf(link, parts, model);
}

std::size_t write_hf_weights(const fs::path& folder, const std::vector<HfLink>& links, const config::ModelConfig& model,
                             at::ScalarType dtype, std::uint64_t shard_bytes,
                             const std::function<at::Tensor(const std::string&)>& read) {
  const auto bytes_of = [&](const HfLink& link) {
    std::uint64_t bytes = 0;
    for (const auto& shape : link.shapes)
      bytes += static_cast<std::uint64_t>(num_elements(shape)) * c10::elementSize(dtype);
    return bytes;
  };
  // Files are filled in the order of the layers; what comes from one tensor here stays together.
  std::vector<std::vector<const HfLink*>> files(1);
  std::uint64_t filled = 0;
  std::uint64_t total = 0;
  for (const HfLink& link : links) {
    const std::uint64_t bytes = bytes_of(link);
    if (filled > 0 && filled + bytes > shard_bytes) {
      files.emplace_back();
      filled = 0;
    }
    files.back().push_back(&link);
    filled += bytes;
    total += bytes;
  }
  Json weight_map = Json::object();
  for (std::size_t i = 0; i < files.size(); ++i) {
    char name[64] = "model.safetensors";
    if (files.size() > 1) std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, files.size());
    NamedTensors tensors;
    for (const HfLink* link : files[i]) {
      std::vector<at::Tensor> parts = to_hf(*link, read(link->native), model);
      for (std::size_t p = 0; p < parts.size(); ++p) {
        PGPT_ASSERT(parts[p].sizes().vec() == link->shapes[p], link->names[p]);
        at::Tensor values = parts[p].to(dtype);
        PGPT_CHECK(DataError, dtype != at::kHalf || values.isfinite().all().item<bool>(), "tensor ", link->names[p],
                   " does not fit into float16; use --dtype bfloat16 or float32");
        tensors.emplace_back(link->names[p], std::move(values));
        weight_map[link->names[p]] = name;
      }
    }
    write_safetensors((folder / name).string(), tensors, {{"format", "pt"}});
  }
  if (files.size() > 1) {
    const Json index = {{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
    write_text_atomically((folder / kIndex).string(), index.dump(2) + "\n");
  }
  return files.size();
}

}  // namespace pgpt::checkpoint

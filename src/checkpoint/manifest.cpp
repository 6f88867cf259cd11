#include "pgpt/checkpoint/manifest.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "pgpt/base/error.h"
#include "pgpt/checkpoint/checksum.h"
#include "pgpt/checkpoint/directory.h"
#include "pgpt/checkpoint/safetensors.h"
#include "piece_json.h"

namespace pgpt::checkpoint {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "pgpt-checkpoint";
constexpr int kVersion = 1;
// The text starts with the checksum of the same text whose eight digits are zeros.
constexpr const char* kPrefix = "{\n \"crc32c\": \"";
constexpr std::size_t kDigits = 8;

Json state_list(const StateList& list) {
  Json json = Json::object();
  for (const auto& [key, value] : list) {
    std::visit([&json, &key = key](const auto& v) { json[key] = v; }, value);
  }
  return json;
}

StateList state_list(const Json& json) {
  StateList list;
  for (const auto& [key, value] : json.items()) {
    if (value.is_number_integer()) {
      list.emplace_back(key, value.get<std::int64_t>());
    } else if (value.is_number()) {
      list.emplace_back(key, value.get<double>());
    } else {
      list.emplace_back(key, value.get<std::string>());
    }
  }
  return list;
}

Json run_state(const RunState& s) {
  Json json = {{"iteration", s.iteration},
               {"consumed_train_samples", s.consumed_samples},
               {"skipped_train_samples", s.skipped_samples},
               {"consumed_valid_samples", s.consumed_valid_samples},
               {"num_floating_point_operations_so_far", s.floating_point_operations}};
  if (!s.optimizer.empty()) {
    json["optimizer"] = {{"kind", s.optimizer}, {"step", s.optimizer_steps}};
    json["opt_param_scheduler"] = state_list(s.scheduler);
    if (s.scaler) {
      json["loss_scaler"] = {
          {"scale", s.scaler->scale}, {"good_steps", s.scaler->good_steps}, {"hysteresis", s.scaler->hysteresis}};
    }
  }
  if (s.random) {
    json["random"] = {{"seed", s.random->seed},
                      {"hidden_dropout_offset", s.random->hidden_dropout_offset},
                      {"attention_dropout_offset", s.random->attention_dropout_offset}};
  }
  return json;
}

RunState run_state(const Json& json) {
  RunState s;
  s.iteration = json.at("iteration").get<std::int64_t>();
  s.consumed_samples = json.at("consumed_train_samples").get<std::int64_t>();
  s.skipped_samples = json.at("skipped_train_samples").get<std::int64_t>();
  s.consumed_valid_samples = json.at("consumed_valid_samples").get<std::int64_t>();
  s.floating_point_operations = json.at("num_floating_point_operations_so_far").get<double>();
  if (json.contains("optimizer")) {
    s.optimizer = json.at("optimizer").at("kind").get<std::string>();
    s.optimizer_steps = json.at("optimizer").at("step").get<std::int64_t>();
    s.scheduler = state_list(json.at("opt_param_scheduler"));
    if (json.contains("loss_scaler")) {
      const Json& scaler = json.at("loss_scaler");
      s.scaler = ScalerState{scaler.at("scale").get<double>(), scaler.at("good_steps").get<std::int64_t>(),
                             scaler.at("hysteresis").get<std::int64_t>()};
    }
  }
  if (json.contains("random")) {
    const Json& random = json.at("random");
    s.random =
        RandomState{random.at("seed").get<std::int64_t>(), random.at("hidden_dropout_offset").get<std::uint64_t>(),
                    random.at("attention_dropout_offset").get<std::uint64_t>()};
  }
  return s;
}

bool overlap(const Piece& a, const Piece& b) {
  for (std::size_t d = 0; d < a.offset.size(); ++d) {
    if (a.offset[d] >= b.offset[d] + b.shape[d] || b.offset[d] >= a.offset[d] + a.shape[d]) return false;
  }
  return true;
}

Manifest parse(const std::string& text, const std::string& path) {
  const Json json = Json::parse(text);
  PGPT_CHECK(DataError, json.at("format").get<std::string>() == kFormat, path,
             " is not a checkpoint manifest of this program");
  const int version = json.at("format_version").get<int>();
  PGPT_CHECK(DataError, version == kVersion, path, " has format version ", version, "; this program reads version ",
             kVersion, ", use the program that wrote it (", json.value("program", "unknown"), ") or a newer one");
  Manifest m;
  m.program = json.at("program").get<std::string>();
  m.libtorch = json.at("libtorch").get<std::string>();
  m.state = run_state(json.at("state"));
  const Json& layout = json.at("layout");
  m.layout = {layout.at("world_size").get<std::int64_t>(), layout.at("tensor").get<std::int64_t>(),
              layout.at("pipeline").get<std::int64_t>(),   layout.at("context").get<std::int64_t>(),
              layout.at("gtp").get<std::int64_t>(),        layout.at("replicate_data").get<std::int64_t>(),
              layout.at("gtp_padding").get<bool>()};
  for (const auto& [name, value] : json.at("arguments").items()) m.arguments[name] = value.get<std::string>();
  m.block_bytes = json.at("block_bytes").get<std::uint64_t>();
  PGPT_CHECK(DataError, m.block_bytes > 0 && m.block_bytes % 16 == 0, path, " has block_bytes ", m.block_bytes,
             ", which is not a positive multiple of 16");
  for (const auto& [name, value] : json.at("files").items()) m.files[name] = file_from_json(value);
  for (const auto& [name, value] : json.at("tensors").items()) m.tensors[name] = tensor_from_json(value);
  return m;
}

}  // namespace

std::int64_t num_elements(const std::vector<std::int64_t>& shape) {
  std::int64_t n = 1;
  for (const std::int64_t size : shape) n *= size;
  return n;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

std::uint64_t Manifest::tensor_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& [name, tensor] : tensors)
    bytes += static_cast<std::uint64_t>(num_elements(tensor.shape)) * c10::elementSize(tensor.dtype);
  return bytes;
}

void check_coverage(const Manifest& manifest, const std::string& where) {
  for (const auto& [name, tensor] : manifest.tensors) {
    std::int64_t covered = 0;
    std::vector<const Piece*> order;
    for (const Piece& piece : tensor.pieces) {
      PGPT_CHECK(DataError, manifest.files.count(piece.file) != 0, where, ": tensor ", name, " lies in ", piece.file,
                 ", which is not in the list of files");
      const bool same_rank = piece.offset.size() == tensor.shape.size() && piece.shape.size() == tensor.shape.size();
      bool inside = same_rank;
      for (std::size_t d = 0; inside && d < tensor.shape.size(); ++d) {
        inside = piece.offset[d] >= 0 && piece.shape[d] >= 0 && piece.offset[d] + piece.shape[d] <= tensor.shape[d];
      }
      PGPT_CHECK(DataError, inside, where, ": tensor ", name, " of shape ", shape_text(tensor.shape),
                 " has a piece of shape ", shape_text(piece.shape), " at ", shape_text(piece.offset), " in ",
                 piece.file);
      const std::uint64_t bytes =
          static_cast<std::uint64_t>(num_elements(piece.shape)) * c10::elementSize(tensor.dtype);
      PGPT_CHECK(DataError, piece.checksums.size() == (bytes + manifest.block_bytes - 1) / manifest.block_bytes, where,
                 ": tensor ", name, " has ", piece.checksums.size(), " checksums for ", bytes, " bytes in ",
                 piece.file);
      covered += num_elements(piece.shape);
      order.push_back(&piece);
    }
    PGPT_CHECK(DataError, covered == num_elements(tensor.shape), where, ": the pieces of tensor ", name, " hold ",
               covered, " elements of ", num_elements(tensor.shape), " (shape ", shape_text(tensor.shape), ")");
    if (tensor.shape.empty()) continue;
    std::sort(order.begin(), order.end(), [](const Piece* a, const Piece* b) { return a->offset < b->offset; });
    for (std::size_t i = 0; i < order.size(); ++i) {
      const std::int64_t end = order[i]->offset[0] + order[i]->shape[0];
      for (std::size_t j = i + 1; j < order.size() && order[j]->offset[0] < end; ++j) {
        PGPT_CHECK(DataError, !overlap(*order[i], *order[j]), where, ": two pieces of tensor ", name, " overlap, in ",
                   order[i]->file, " and ", order[j]->file);
      }
    }
  }
}

std::string manifest_text(const Manifest& m) {
  Json json;
  json["crc32c"] = std::string(kDigits, '0');
  json["format"] = kFormat;
  json["format_version"] = kVersion;
  json["program"] = m.program;
  json["libtorch"] = m.libtorch;
  json["checkpoint_version"] = 3.0;
  json["state"] = run_state(m.state);
  json["layout"] = {
      {"world_size", m.layout.world_size},  {"tensor", m.layout.tensor}, {"pipeline", m.layout.pipeline},
      {"context", m.layout.context},        {"gtp", m.layout.gtp},       {"replicate_data", m.layout.replicate_data},
      {"gtp_padding", m.layout.gtp_padding}};
  json["arguments"] = m.arguments;
  json["block_bytes"] = m.block_bytes;
  json["files"] = Json::object();
  for (const auto& [name, file] : m.files) json["files"][name] = to_json(file);
  json["tensors"] = Json::object();
  for (const auto& [name, tensor] : m.tensors) json["tensors"][name] = to_json(tensor);
  std::string text = json.dump(1) + "\n";
  const std::string crc = checksum_text(crc32c(text.data(), text.size()));
  PGPT_ASSERT(text.rfind(kPrefix, 0) == 0);
  text.replace(std::strlen(kPrefix), kDigits, crc);
  return text;
}

Manifest parse_manifest(const std::string& text, const std::string& where) {
  try {
    return parse(text, where);
  } catch (const Json::exception& e) {
    throw DataError(concat(where, " is malformed: ", e.what()));
  }
}

Manifest read_manifest(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / kManifestName;
  std::error_code error;
  PGPT_CHECK(DataError, std::filesystem::is_directory(directory, error), "there is no checkpoint folder ",
             directory.string(), error ? concat(": ", error.message()) : std::string(),
             "; check --load and --ckpt-step (gpt_tool: DIR and --step)");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open()) {
    const std::string cause = std::strerror(errno);
    const bool reference = std::filesystem::exists(directory / "metadata.json", error) ||
                           std::filesystem::exists(directory / ".metadata", error);
    PGPT_CHECK(DataError, !reference, directory.string(),
               " is a Megatron-LM checkpoint; convert it first with scripts/convert_megatron_checkpoint.py "
               "(docs/conversion.md)");
    throw DataError(
        concat("cannot open ", path.string(), ": ", cause, "; without its manifest the checkpoint is not complete"));
  }
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  PGPT_CHECK(DataError, !file.bad(), "cannot read ", path.string(), ": ", std::strerror(errno));
  const std::size_t at = std::strlen(kPrefix);
  PGPT_CHECK(DataError, text.size() > at + kDigits && text.rfind(kPrefix, 0) == 0, path.string(),
             " is damaged: it does not start with its checksum");
  const std::string stored = text.substr(at, kDigits);
  text.replace(at, kDigits, std::string(kDigits, '0'));
  const std::string found = checksum_text(crc32c(text.data(), text.size()));
  PGPT_CHECK(DataError, stored == found, path.string(), " is damaged: its checksum is ", stored,
             ", that of its text is ", found, kAnotherCheckpoint);
  try {
    Manifest manifest = parse(text, path.string());
    check_coverage(manifest, path.string());
    return manifest;
  } catch (const Json::exception& e) {
    throw DataError(concat(path.string(), " is malformed: ", e.what()));
  }
}

}  // namespace pgpt::checkpoint

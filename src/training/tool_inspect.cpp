// gpt_tool inspect: what a checkpoint holds.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "pgpt/checkpoint/checksum.h"
#include "pgpt/checkpoint/directory.h"
#include "pgpt/checkpoint/safetensors.h"
#include "pgpt/checkpoint/shard.h"
#include "pgpt/training/text_table.h"
#include "pgpt/training/tool_commands.h"
#include "text.h"
#include "tool_arguments.h"

namespace pgpt::training {
namespace {

using checkpoint::Manifest;
using checkpoint::TensorEntry;

/// Characters of a line of the tables.
constexpr std::size_t kWidth = 120;

std::string size_text(std::uint64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes >= std::uint64_t{1} << 30) return text("%.2f GiB", value / 0x1p30);
  if (bytes >= std::uint64_t{1} << 20) return text("%.2f MiB", value / 0x1p20);
  if (bytes >= std::uint64_t{1} << 10) return text("%.2f KiB", value / 0x1p10);
  return text("%llu bytes", static_cast<unsigned long long>(bytes));
}

std::uint64_t bytes_of(const TensorEntry& tensor) {
  return static_cast<std::uint64_t>(checkpoint::num_elements(tensor.shape)) * c10::elementSize(tensor.dtype);
}

/// One number for the checksums of all blocks of a tensor.
std::string checksum_of(const TensorEntry& tensor) {
  std::uint32_t crc = 0;
  for (const checkpoint::Piece& piece : tensor.pieces) {
    crc = checkpoint::crc32c(piece.checksums.data(), piece.checksums.size() * sizeof(std::uint32_t), crc);
  }
  return checkpoint::checksum_text(crc);
}

struct Totals {
  std::int64_t parameters = 0;
  std::uint64_t weights = 0, optimizer = 0, padding = 0, files = 0;
};

Totals totals_of(const Manifest& manifest) {
  Totals totals;
  for (const auto& [name, tensor] : manifest.tensors) {
    if (name.find(".gtp_padding") != std::string::npos) {
      totals.padding += bytes_of(tensor);
    } else if (name.rfind("optimizer.state.", 0) == 0) {
      totals.optimizer += bytes_of(tensor);
    } else {
      totals.weights += bytes_of(tensor);
      totals.parameters += checkpoint::num_elements(tensor.shape);
    }
  }
  for (const auto& [name, file] : manifest.files) totals.files += file.bytes;
  return totals;
}

/// "optimizer.state.exp_avg." of such names, which would make a table too wide when every line repeated it.
std::string prefix_of(const std::string& name) {
  const std::string state = "optimizer.state.";
  if (!name.starts_with(state)) return "";
  const std::size_t dot = name.find('.', state.size());
  return dot == std::string::npos ? "" : name.substr(0, dot + 1);
}

/// A word that orders names with the numbers in them by value: layers.2 before layers.10.
std::string order_of(const std::string& name) {
  std::string order, digits;
  for (const char c : name + '.') {
    if (c >= '0' && c <= '9') {
      digits += c;
      continue;
    }
    if (!digits.empty()) order += std::string(digits.size() < 9 ? 9 - digits.size() : 0, '0') + digits;
    digits.clear();
    order += c;
  }
  return order;
}

/// Weights first, then each kind of optimizer state under its own heading.
void print_tensors(const Manifest& m) {
  std::map<std::string, std::map<std::string, std::string>> groups;  // prefix, order, name
  bool split = false;
  for (const auto& [name, tensor] : m.tensors) {
    groups[prefix_of(name)][order_of(name)] = name;
    split = split || tensor.pieces.size() != 1;
  }
  // The last ones are left out where lines would be too long.
  std::vector<TableColumn> columns = {{"name"}, {"type"}, {"shape"}, {"size", true}, {"checksum"}};
  if (split) columns.push_back({"pieces", true});
  std::vector<std::vector<std::string>> rows;
  for (const auto& [prefix, names] : groups) {
    for (const auto& [order, name] : names) {
      const TensorEntry& tensor = m.tensors.at(name);
      rows.push_back({name.substr(prefix.size()), checkpoint::dtype_name(tensor.dtype),
                      checkpoint::shape_text(tensor.shape), size_text(bytes_of(tensor)), checksum_of(tensor)});
      if (split) rows.back().push_back(std::to_string(tensor.pieces.size()));
    }
  }
  const TableText table = lay_out(std::move(columns), rows, kWidth);
  auto line = table.lines.begin();
  for (const auto& [prefix, names] : groups) {
    std::printf("\ntensors%s%s\n", prefix.empty() ? "" : " of ", prefix.c_str());
    if (line == table.lines.begin()) std::printf("%s\n", table.header.c_str());
    for (std::size_t i = 0; i < names.size(); ++i) std::printf("%s\n", (line++)->c_str());
  }
  if (table.left_out.empty()) return;
  std::string missing;
  for (const std::string& name : table.left_out) missing += (missing.empty() ? "" : ", ") + name;
  std::printf("\nnames are long; --json shows also: %s\n", missing.c_str());
}

void print_text(const std::string& directory, const Manifest& m, bool arguments) {
  const Totals totals = totals_of(m);
  const checkpoint::RunState& s = m.state;
  std::printf("checkpoint   %s\n", directory.c_str());
  std::printf("written by   %s, libtorch %s\n", m.program.c_str(), m.libtorch.c_str());
  std::printf("iteration    %lld; samples: %lld consumed, %lld skipped, %lld of validation; %.6e FLOP\n",
              static_cast<long long>(s.iteration), static_cast<long long>(s.consumed_samples),
              static_cast<long long>(s.skipped_samples), static_cast<long long>(s.consumed_valid_samples),
              s.floating_point_operations);
  std::printf("layout       %lld rank(s): tensor %lld, GTP %lld, data parallel %lld, context %lld, pipeline %lld\n",
              static_cast<long long>(m.layout.world_size), static_cast<long long>(m.layout.tensor),
              static_cast<long long>(m.layout.gtp), static_cast<long long>(m.layout.replicate_data),
              static_cast<long long>(m.layout.context), static_cast<long long>(m.layout.pipeline));
  if (s.optimizer.empty()) {
    std::printf("optimizer    none\n");
  } else {
    std::printf("optimizer    %s after %lld steps\n", s.optimizer.c_str(), static_cast<long long>(s.optimizer_steps));
    std::vector<std::string> entries;
    for (const auto& [key, value] : s.scheduler) {
      entries.push_back(std::visit([&key = key](const auto& v) { return concat(key, "=", v); }, value));
    }
    for (const std::string& line : wrap_words("schedule     ", entries, kWidth)) std::printf("%s\n", line.c_str());
    if (s.scaler) {
      std::printf("loss scale   %g after %lld good steps, hysteresis %lld\n", s.scaler->scale,
                  static_cast<long long>(s.scaler->good_steps), static_cast<long long>(s.scaler->hysteresis));
    }
  }
  if (s.random) {
    std::printf("random       seed %lld, dropout at %llu (hidden) and %llu (attention)\n",
                static_cast<long long>(s.random->seed),
                static_cast<unsigned long long>(s.random->hidden_dropout_offset),
                static_cast<unsigned long long>(s.random->attention_dropout_offset));
  } else {
    std::printf("random       none\n");
  }
  std::printf("parameters   %lld; weights %s, optimizer %s, padding %s; files %s\n",
              static_cast<long long>(totals.parameters), size_text(totals.weights).c_str(),
              size_text(totals.optimizer).c_str(), size_text(totals.padding).c_str(), size_text(totals.files).c_str());
  std::printf("\nfiles\n");
  std::vector<std::vector<std::string>> files;
  for (const auto& [name, file] : m.files) files.push_back({name, concat(file.bytes, " bytes")});
  for (const std::string& line : lay_out({{"name"}, {"size", true}}, files, std::string::npos).lines) {
    std::printf("%s\n", line.c_str());
  }
  print_tensors(m);
  if (!arguments) return;
  std::printf("\narguments\n");
  std::vector<std::vector<std::string>> pairs;
  for (const auto& [name, value] : m.arguments) pairs.push_back({name, value});
  // Values may be long paths, which nothing shortens.
  const TableText table = lay_out({{"name"}, {"value"}}, pairs, std::string::npos);
  for (const std::string& line : table.lines) std::printf("%s\n", line.c_str());
}

}  // namespace

ExitCode tool_inspect(const std::vector<std::string>& words) {
  const ToolArguments arguments("inspect", words, {"--verify", "--json", "--arguments"}, {"--step"}, 1);
  const std::filesystem::path directory =
      checkpoint::find_checkpoint(arguments.positional(0), arguments.integer("--step"));
  const checkpoint::Checkpoint checkpoint(directory);
  const Manifest& manifest = checkpoint.manifest();
  if (arguments.has("--verify")) {
    checkpoint::IoOptions options;
    options.threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 8U));
    checkpoint.verify(options);
  }
  if (arguments.has("--json")) {
    std::ifstream file(directory / checkpoint::kManifestName);
    nlohmann::ordered_json json = nlohmann::ordered_json::parse(file);
    const Totals totals = totals_of(manifest);
    json["directory"] = directory.string();
    json["verified"] = arguments.has("--verify");
    json["totals"] = {{"parameters", totals.parameters},
                      {"weight_bytes", totals.weights},
                      {"optimizer_bytes", totals.optimizer},
                      {"padding_bytes", totals.padding},
                      {"file_bytes", totals.files}};
    std::printf("%s\n", json.dump(1).c_str());
    return ExitCode::kDone;
  }
  print_text(directory.string(), manifest, arguments.has("--arguments"));
  if (arguments.has("--verify")) std::printf("\nevery byte was read and every checksum is right\n");
  return ExitCode::kDone;
}

}  // namespace pgpt::training

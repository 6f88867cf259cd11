// gpt_tool inspect: what a checkpoint holds.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "pgpt/checkpoint/checksum.h"
#include "pgpt/checkpoint/directory.h"
#include "pgpt/checkpoint/safetensors.h"
#include "pgpt/checkpoint/shard.h"
#include "pgpt/training/tool_commands.h"
#include "text.h"
#include "tool_arguments.h"

namespace pgpt::training {
namespace {

using checkpoint::Manifest;
using checkpoint::TensorEntry;

std::string size_text(std::uint64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes >= std::uint64_t{1} << 30) return text("%.2f GiB", value / 0x1p30);
  if (bytes >= std::uint64_t{1} << 20) return text("%.2f MiB", value / 0x1p20);
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
    std::printf("schedule    ");
    for (const auto& [key, value] : s.scheduler) {
      std::visit([&key = key](const auto& v) { std::printf(" %s=%s", key.c_str(), concat(v).c_str()); }, value);
    }
    std::printf("\n");
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
  for (const auto& [name, file] : m.files) {
    std::printf("  %-32s %16llu bytes\n", name.c_str(), static_cast<unsigned long long>(file.bytes));
  }
  std::printf("\ntensors (type, shape, bytes, pieces, checksum)\n");
  for (const auto& [name, tensor] : m.tensors) {
    std::printf("  %-72s %-4s %-16s %14llu %4zu %s\n", name.c_str(), checkpoint::dtype_name(tensor.dtype).c_str(),
                checkpoint::shape_text(tensor.shape).c_str(), static_cast<unsigned long long>(bytes_of(tensor)),
                tensor.pieces.size(), checksum_of(tensor).c_str());
  }
  if (!arguments) return;
  std::printf("\narguments\n");
  for (const auto& [name, value] : m.arguments) std::printf("  %-48s %s\n", name.c_str(), value.c_str());
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

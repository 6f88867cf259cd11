// gpt_tool diff: two checkpoints, tensor by tensor; layouts may differ, since tensors are compared whole.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "pgpt/checkpoint/directory.h"
#include "pgpt/checkpoint/safetensors.h"
#include "pgpt/checkpoint/shard.h"
#include "pgpt/training/tool_commands.h"
#include "tool_arguments.h"

namespace pgpt::training {
namespace {

using checkpoint::Checkpoint;

/// What diff returns when the checkpoints differ.
constexpr auto kDiffer = static_cast<ExitCode>(1);

/// The "state" part of both manifests, flattened to "a.b" names.
nlohmann::json state_of(const Checkpoint& checkpoint) {
  const auto document = nlohmann::json::parse(checkpoint::manifest_text(checkpoint.manifest()));
  return document.at("state").flatten();
}

std::int64_t diff_values(const std::string& what, const nlohmann::json& a, const nlohmann::json& b) {
  std::set<std::string> names;
  for (const auto& [name, value] : a.items()) names.insert(name);
  for (const auto& [name, value] : b.items()) names.insert(name);
  std::int64_t differences = 0;
  for (const std::string& name : names) {
    const std::string left = a.contains(name) ? a.at(name).dump() : "absent";
    const std::string right = b.contains(name) ? b.at(name).dump() : "absent";
    if (left == right) continue;
    ++differences;
    std::printf("%s %s: %s, %s\n", what.c_str(), name.c_str(), left.c_str(), right.c_str());
  }
  return differences;
}

bool diff_tensor(const std::string& name, const Checkpoint& a, const Checkpoint& b,
                 const checkpoint::IoOptions& options) {
  const auto& ta = a.manifest().tensors.at(name);
  const auto& tb = b.manifest().tensors.at(name);
  if (ta.dtype != tb.dtype || ta.shape != tb.shape) {
    std::printf("tensor %s: %s %s, %s %s\n", name.c_str(), checkpoint::dtype_name(ta.dtype).c_str(),
                checkpoint::shape_text(ta.shape).c_str(), checkpoint::dtype_name(tb.dtype).c_str(),
                checkpoint::shape_text(tb.shape).c_str());
    return true;
  }
  const at::Tensor left = a.read(name, options);
  const at::Tensor right = b.read(name, options);
  if (std::memcmp(left.data_ptr(), right.data_ptr(), static_cast<std::size_t>(left.numel()) * left.element_size()) == 0)
    return false;
  const at::Tensor x = left.to(at::kDouble);
  const at::Tensor y = right.to(at::kDouble);
  const at::Tensor difference = (x - y).abs();
  const double norm = y.norm().item<double>();
  std::printf("tensor %s: %lld of %lld elements differ, largest difference %.6g, relative L2 %.6g\n", name.c_str(),
              static_cast<long long>((x != y).sum().item<std::int64_t>()), static_cast<long long>(x.numel()),
              difference.max().item<double>(),
              norm > 0 ? difference.norm().item<double>() / norm : difference.norm().item<double>());
  return true;
}

}  // namespace

ExitCode tool_diff(const std::vector<std::string>& words) {
  const ToolArguments arguments("diff", words, {}, {"--step-a", "--step-b"}, 2);
  const Checkpoint a(checkpoint::find_checkpoint(arguments.positional(0), arguments.integer("--step-a")));
  const Checkpoint b(checkpoint::find_checkpoint(arguments.positional(1), arguments.integer("--step-b")));
  checkpoint::IoOptions options;
  options.threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 8U));
  // Arguments and layouts are told, but only state and tensors decide.
  (void)diff_values("argument", a.manifest().arguments, b.manifest().arguments);
  std::int64_t differences = diff_values("state", state_of(a), state_of(b));
  std::int64_t equal = 0;
  std::set<std::string> names;
  for (const auto& [name, tensor] : a.manifest().tensors) names.insert(name);
  for (const auto& [name, tensor] : b.manifest().tensors) names.insert(name);
  for (const std::string& name : names) {
    if (!a.contains(name) || !b.contains(name)) {
      std::printf("tensor %s: only in %s\n", name.c_str(), (a.contains(name) ? a : b).directory().c_str());
      ++differences;
    } else if (diff_tensor(name, a, b, options)) {
      ++differences;
    } else {
      ++equal;
    }
  }
  std::printf("%lld tensor(s) equal, %lld difference(s)\n", static_cast<long long>(equal),
              static_cast<long long>(differences));
  return differences == 0 ? ExitCode::kDone : kDiffer;
}

}  // namespace pgpt::training

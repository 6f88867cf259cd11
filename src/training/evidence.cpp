#include "pgpt/training/evidence.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "pgpt/base/error.h"
#include "pgpt/checkpoint/safetensors.h"

namespace pgpt::training {

const std::vector<std::string>& Evidence::kinds() {
  static const std::vector<std::string> all = {"inputs",         "activations", "logits", "token-losses", "gradients",
                                               "main-gradients", "parameters",  "deltas", "optimizer",    "groups"};
  return all;
}

Evidence::Evidence(const config::Config& config, int rank, int world_size)
    : directory_(config.logging.evidence_dir),
      iterations_(config.logging.evidence_iterations),
      content_(config.logging.evidence_content),
      arguments_(config.arguments),
      rank_(rank),
      world_size_(world_size) {
  for (const std::string& kind : content_) {
    PGPT_CHECK(ConfigError, std::find(kinds().begin(), kinds().end(), kind) != kinds().end(), "--evidence-content: unknown kind '", kind,
               "'; use any of inputs, activations, logits, token-losses, gradients, main-gradients, parameters, deltas, optimizer, groups");
  }
}

bool Evidence::wants(const std::string& kind) const {
  return content_.empty() || std::find(content_.begin(), content_.end(), kind) != content_.end();
}

void Evidence::keep(std::string name, const at::Tensor& value) {
  // A copy: most of these tensors are overwritten or freed before the iteration ends.
  tensors_.emplace_back(std::move(name), value.detach().to(at::kCPU, value.scalar_type(), /*non_blocking=*/false, /*copy=*/true).contiguous());
}

void Evidence::begin_iteration(std::int64_t iteration, const parameter::ParameterStore& store) {
  iteration_ = iteration;
  active_ = !directory_.empty() &&
            (iterations_.empty() || std::find(iterations_.begin(), iterations_.end(), iteration) != iterations_.end());
  if (!active_ || !wants("deltas")) return;
  for (const parameter::Parameter& parameter : store.parameters()) before_.emplace_back(parameter.spec.name, parameter.weight.clone());
}

const model::Observer* Evidence::observer(std::int64_t micro_batch) {
  if (!active_) return nullptr;
  const std::string prefix = "mb" + std::to_string(micro_batch) + ".";
  observer_ = {};
  if (wants("activations") || wants("logits")) {
    observer_.activation = [this, prefix](const std::string& name, const at::Tensor& value) {
      if (name == "logits") {
        if (wants("logits")) keep(prefix + name, value);
      } else if (wants("activations")) {
        keep(prefix + "activation." + name, value);
      }
    };
  }
  if (wants("gradients")) {
    observer_.gradient = [this, prefix](const std::string& name, const at::Tensor& gradient) {
      const std::string full = prefix + "grad." + name;
      const auto earlier = std::find_if(tensors_.begin(), tensors_.end(), [&](const auto& t) { return t.first == full; });
      if (earlier == tensors_.end()) {
        keep(full, gradient);
      } else {  // second use of a tied embedding
        earlier->second = earlier->second.to(at::kFloat).add(gradient.to(at::kCPU, at::kFloat));
      }
    };
  }
  return &observer_;
}

void Evidence::add_input(std::int64_t micro_batch, const std::string& name, const at::Tensor& value) {
  if (active_ && wants("inputs")) keep("mb" + std::to_string(micro_batch) + "." + name, value);
}

void Evidence::add_token_losses(std::int64_t micro_batch, const at::Tensor& value) {
  if (active_ && wants("token-losses")) keep("mb" + std::to_string(micro_batch) + ".token_losses", value);
}

void Evidence::add_main_gradients(const parameter::ParameterStore& store) {
  if (!active_ || !wants("main-gradients")) return;
  for (const parameter::Parameter& parameter : store.parameters()) keep("main_grad." + parameter.spec.name, parameter.main_gradient);
}

std::string Evidence::manifest(const parameter::ParameterStore& store) const {
  using nlohmann::json;
  json parameters = json::object();
  for (const parameter::Parameter& parameter : store.parameters()) {
    json cuts = json::array();
    for (const parameter::Cut& cut : parameter.layout.cuts) {
      cuts.push_back({{"axis", cut.axis == mesh::Axis::kGtp ? "gtp" : "tensor"},
                      {"dim", cut.dim},
                      {"index", cut.index},
                      {"count", cut.count},
                      {"padding", cut.padding}});
    }
    parameters[parameter.spec.name] = {{"logical_shape", parameter.layout.logical_shape},
                                       {"local_shape", parameter.weight.sizes().vec()},
                                       {"dtype", c10::toString(parameter.weight.scalar_type())},
                                       {"duplicate", parameter.gtp_duplicate},
                                       {"cuts", cuts}};
  }
  json document = {{"format", "pgpt-evidence-1"}, {"iteration", iteration_}, {"rank", rank_}, {"world_size", world_size_}};
  document["arguments"] = json::object();
  for (const auto& [name, value] : arguments_) document["arguments"][name] = value;
  document["parameters"] = std::move(parameters);
  json tensors = json::array();
  for (const auto& tensor : tensors_) tensors.push_back(tensor.first);
  document["tensors"] = std::move(tensors);
  return document.dump(1);
}

void Evidence::finish_iteration(const parameter::ParameterStore& store, const optim::Optimizer& optimizer) {
  if (!active_) return;
  if (wants("parameters")) {
    for (const parameter::Parameter& parameter : store.parameters()) keep("param." + parameter.spec.name, parameter.weight);
  }
  for (const auto& [name, weight] : before_) {
    const auto& parameters = store.parameters();
    const auto it = std::find_if(parameters.begin(), parameters.end(), [&](const auto& p) { return p.spec.name == name; });
    keep("delta." + name, it->weight.to(at::kFloat).sub(weight.to(at::kFloat)));
  }
  before_.clear();
  if (wants("optimizer")) {
    for (const auto& [kind, flat] : optimizer.state()) {
      for (const parameter::Parameter& parameter : store.parameters()) {
        keep(kind + "." + parameter.spec.name, flat.narrow(0, parameter.offset, parameter.num_elements()).view(parameter.weight.sizes()));
      }
    }
  }
  char folder[32];
  std::snprintf(folder, sizeof folder, "iter_%07lld", static_cast<long long>(iteration_));
  char file[32];
  std::snprintf(file, sizeof file, "rank_%05d", rank_);
  const std::filesystem::path base = std::filesystem::path(directory_) / folder;
  std::error_code error;
  std::filesystem::create_directories(base, error);
  PGPT_CHECK(DataError, !error, "--evidence-dir: cannot create ", base.string(), ": ", error.message());
  checkpoint::write_safetensors((base / file).string() + ".safetensors", tensors_, {{"format", "pt"}});
  checkpoint::write_text_atomically((base / file).string() + ".json", manifest(store));
  tensors_.clear();
}

}  // namespace pgpt::training

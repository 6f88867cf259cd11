#include "pgpt/training/evidence.h"

#include <ATen/ATen.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>

#include "pgpt/base/error.h"
#include "pgpt/checkpoint/safetensors.h"
#include "pgpt/config/parse.h"
#include "pgpt/data/checksum.h"

namespace pgpt::training {
namespace {

using nlohmann::json;

const char* axis_name(mesh::Axis axis) {
  switch (axis) {
    case mesh::Axis::kTensor:
      return "tensor";
    case mesh::Axis::kGtp:
      return "gtp";
    case mesh::Axis::kContext:
      return "context";
    case mesh::Axis::kExpert:
      return "expert";
    case mesh::Axis::kData:
      return "data";
    case mesh::Axis::kPipeline:
      return "pipeline";
  }
  return "?";
}

std::string checksum(const at::Tensor& host) {
  const std::span<const std::byte> bytes(static_cast<const std::byte*>(host.data_ptr()),
                                         static_cast<std::size_t>(host.nbytes()));
  char text[9];
  std::snprintf(text, sizeof text, "%08x", data::crc32(bytes));
  return text;
}

}  // namespace

const std::vector<std::string>& Evidence::kinds() {
  static const std::vector<std::string> all = {"inputs",         "activations", "logits", "token-losses", "gradients",
                                               "main-gradients", "parameters",  "deltas", "optimizer",    "groups"};
  return all;
}

Evidence::Evidence(const config::Config& config, const mesh::Mesh& mesh, int rank)
    : config_(config), mesh_(mesh), rank_(rank) {
  for (const std::string& kind : config_.logging.evidence_content) {
    PGPT_CHECK(ConfigError, std::find(kinds().begin(), kinds().end(), kind) != kinds().end(),
               "--evidence-content: unknown kind '", kind,
               "'; use any of inputs, activations, logits, token-losses, gradients, main-gradients, parameters, "
               "deltas, optimizer, groups");
  }
  for (const std::int64_t iteration : config_.logging.evidence_iterations) {
    PGPT_CHECK(ConfigError, iteration >= 0, "--evidence-iterations: ", iteration,
               " is no iteration; they count from 1, and 0 stands for the initial weights");
  }
}

bool Evidence::wants(const std::string& kind) const {
  const std::vector<std::string>& content = config_.logging.evidence_content;
  return content.empty() || std::find(content.begin(), content.end(), kind) != content.end();
}

bool Evidence::wants_iteration(std::int64_t iteration) const {
  const std::vector<std::int64_t>& chosen = config_.logging.evidence_iterations;
  return !config_.logging.evidence_dir.empty() &&
         (chosen.empty() || std::find(chosen.begin(), chosen.end(), iteration) != chosen.end());
}

void Evidence::keep(std::string name, const at::Tensor& value) {
  // A copy: most of these tensors are overwritten or freed before the iteration ends.
  tensors_.emplace_back(
      std::move(name),
      value.detach().to(at::kCPU, value.scalar_type(), /*non_blocking=*/false, /*copy=*/true).contiguous());
}

void Evidence::keep_gradient(const std::string& name, const at::Tensor& gradient) {
  const auto earlier = std::find_if(tensors_.begin(), tensors_.end(), [&](const auto& t) { return t.first == name; });
  if (earlier == tensors_.end()) {
    keep(name, gradient);
  } else {  // second use of a tied embedding: the sum in fp32, as the main gradient takes it
    earlier->second = earlier->second.to(at::kFloat).add(gradient.to(at::kCPU, at::kFloat));
  }
}

void Evidence::begin_iteration(std::int64_t iteration, const LossScaling& scaling,
                               const parameter::ParameterStore& store) {
  const bool initial = iteration == 1 && wants_iteration(0) && wants("parameters");
  active_ = wants_iteration(iteration) || initial;
  if (!active_) return;
  if (initial) {
    for (const parameter::Parameter& parameter : store.parameters())
      keep("param." + parameter.spec.name, parameter.weight);
    initial_.swap(tensors_);
  }
  iteration_ = iteration;
  scaling_ = scaling;
  if (!wants("deltas") || !wants_iteration(iteration)) return;
  for (const parameter::Parameter& parameter : store.parameters()) before_.push_back(parameter.weight.clone());
}

const model::Observer* Evidence::observer(std::int64_t micro_batch) {
  if (!active_ || !wants_iteration(iteration_)) return nullptr;
  std::unique_ptr<model::Observer>& observer = observers_[micro_batch];
  if (observer) return observer.get();
  observer = std::make_unique<model::Observer>();
  const std::string prefix = "mb" + std::to_string(micro_batch) + ".";
  if (wants("activations") || wants("logits")) {
    observer->activation = [this, prefix](const std::string& name, const at::Tensor& value) {
      if (name == "logits") {
        if (wants("logits")) keep(prefix + name, value);
      } else if (wants("activations")) {
        keep(prefix + "activation." + name, value);
      }
    };
  }
  if (wants("gradients")) {
    observer->gradient = [this, prefix](const std::string& name, const at::Tensor& gradient) {
      keep_gradient(prefix + "grad." + name, gradient);
    };
  }
  return observer.get();
}

void Evidence::add_inputs(std::int64_t micro_batch, const model::Batch& batch) {
  if (!active_ || !wants_iteration(iteration_)) return;
  valid_tokens_[micro_batch] = static_cast<std::int64_t>(batch.loss_mask.sum().item<double>());
  if (!wants("inputs")) return;
  const std::string prefix = "mb" + std::to_string(micro_batch) + ".";
  keep(prefix + "tokens", batch.tokens);
  keep(prefix + "labels", batch.labels);
  keep(prefix + "loss_mask", batch.loss_mask);
}

void Evidence::add_token_losses(std::int64_t micro_batch, const at::Tensor& value) {
  if (active_ && wants_iteration(iteration_) && wants("token-losses"))
    keep("mb" + std::to_string(micro_batch) + ".token_losses", value);
}

void Evidence::add_main_gradients(const parameter::ParameterStore& store) {
  if (!active_ || !wants_iteration(iteration_) || !wants("main-gradients")) return;
  for (const parameter::Parameter& parameter : store.parameters())
    keep("main_grad." + parameter.spec.name, parameter.main_gradient);
}

void Evidence::finish_iteration(const parameter::ParameterStore& store, const optim::Optimizer& optimizer,
                                std::optional<double> gradient_norm) {
  if (!active_) return;
  if (!initial_.empty()) {
    tensors_.swap(initial_);
    write(0, store);
    tensors_.swap(initial_);
    initial_.clear();
  }
  if (wants_iteration(iteration_)) {
    if (wants("parameters")) {
      for (const parameter::Parameter& parameter : store.parameters())
        keep("param." + parameter.spec.name, parameter.weight);
    }
    for (std::size_t i = 0; i < before_.size(); ++i) {
      const parameter::Parameter& parameter = store.parameters()[i];
      keep("delta." + parameter.spec.name, parameter.weight.to(at::kFloat).sub(before_[i].to(at::kFloat)));
    }
    if (wants("optimizer")) {
      for (const auto& [kind, flat] : optimizer.state()) {
        for (const parameter::Parameter& parameter : store.parameters()) {
          keep(kind + "." + parameter.spec.name,
               flat.narrow(0, parameter.offset, parameter.num_elements()).view(parameter.weight.sizes()));
        }
      }
    }
    clip_coefficient_.reset();
    if (gradient_norm) {
      const auto norm = static_cast<float>(*gradient_norm);
      const auto clip = static_cast<float>(config_.optimizer.clip_grad);
      clip_coefficient_ = clip > 0.0F ? std::min(1.0F, clip / (norm + 1.0e-6F)) : 1.0F;
    }
    write(iteration_, store);
  }
  tensors_.clear();
  before_.clear();
  observers_.clear();
  valid_tokens_.clear();
}

void Evidence::write(std::int64_t iteration, const parameter::ParameterStore& store) {
  char folder[32];
  std::snprintf(folder, sizeof folder, "iter_%07lld", static_cast<long long>(iteration));
  char file[32];
  std::snprintf(file, sizeof file, "rank_%05d", rank_);
  const std::filesystem::path base = std::filesystem::path(config_.logging.evidence_dir) / folder;
  std::error_code error;
  std::filesystem::create_directories(base, error);
  PGPT_CHECK(DataError, !error, "--evidence-dir: cannot create ", base.string(), ": ", error.message(),
             "; give a folder that can be written, or remove the option");
  try {
    // The manifest says that the tensors beside it are complete, so an older one goes first.
    std::filesystem::remove(base / (std::string(file) + ".json"), error);
    checkpoint::write_safetensors((base / file).string() + ".safetensors", tensors_, {{"format", "pt"}});
    checkpoint::write_text_atomically((base / file).string() + ".json", manifest(iteration, store));
  } catch (const DataError& failure) {
    throw DataError(concat("--evidence-dir: rank ", rank_, ", iteration ", iteration, ": ", failure.what(),
                           "; free space or choose fewer --evidence-iterations or --evidence-content"));
  }
}

std::string Evidence::manifest(std::int64_t iteration, const parameter::ParameterStore& store) const {
  json parameters = json::object();
  for (const parameter::Parameter& parameter : store.parameters()) {
    json cuts = json::array();
    for (const parameter::Cut& cut : parameter.layout.cuts) {
      cuts.push_back({{"axis", axis_name(cut.axis)},
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
  const mesh::Grid& grid = mesh_.dense();
  json layout = {{"data_rank", mesh_.data_rank(rank_)}, {"data_size", config_.parallel.data_ranks()}};
  for (const mesh::Axis axis :
       {mesh::Axis::kTensor, mesh::Axis::kGtp, mesh::Axis::kContext, mesh::Axis::kData, mesh::Axis::kPipeline}) {
    layout[axis_name(axis)] = {{"index", grid.coordinate(rank_, axis)}, {"size", grid.size(axis)}};
  }
  json document = {{"format", "pgpt-evidence-1"},
                   {"iteration", iteration},
                   {"rank", rank_},
                   {"world_size", config_.parallel.world_size}};
  document["layout"] = std::move(layout);
  document["versions"] = {{"pretrain_gpt", config::version()}, {"torch", TORCH_VERSION}};
  document["device"] = store.weights().device().is_cuda() ? "cuda" : "cpu";
  document["parameter_dtype"] = c10::toString(store.weights().scalar_type());
  document["gradient_dtype"] = c10::toString(store.gradients().scalar_type());
  document["vocab_size"] = config_.model.vocab_size;
  if (iteration == iteration_) {
    json micro_batches = json::array();
    for (const auto& [index, tokens] : valid_tokens_)
      micro_batches.push_back({{"index", index}, {"valid_tokens", tokens}});
    document["step"] = {{"micro_batch_size", config_.training.micro_batch_size},
                        {"num_microbatches", scaling_.num_microbatches},
                        {"loss_scale", scaling_.loss_scale},
                        {"per_token_loss", scaling_.per_token},
                        {"micro_batches", std::move(micro_batches)},
                        {"clip_coefficient", clip_coefficient_ ? json(*clip_coefficient_) : json()}};
  }
  document["arguments"] = json::object();
  for (const auto& [name, value] : config_.arguments) document["arguments"][name] = value;
  if (wants("groups")) {
    json groups = json::object();
    for (const mesh::NamedGroup& group : mesh::Mesh::named_groups())
      groups[group.name] = mesh_.group(group.name, rank_);
    document["groups"] = std::move(groups);
  }
  document["parameters"] = std::move(parameters);
  json tensors = json::array();
  for (const auto& [name, tensor] : tensors_) {
    tensors.push_back({{"name", name}, {"dtype", c10::toString(tensor.scalar_type())}, {"crc32", checksum(tensor)}});
  }
  document["tensors"] = std::move(tensors);
  return document.dump(1);
}

}  // namespace pgpt::training

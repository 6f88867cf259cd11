// Names of a step's tensors and the order in which the step computes them.

#include "pgpt/base/error.h"
#include "pgpt/training/tensor_source.h"

namespace pgpt::training {
namespace {

constexpr std::int64_t kLayerStride = 100;
constexpr std::int64_t kAfterLayers = std::int64_t{1} << 40;

struct Component {
  const char* part;
  std::int64_t place;
};
// Searched in this order, so that longer names stand before the ones they contain. Places follow the forward pass of a
// layer.
constexpr Component kLayerComponents[] = {{"linear_qkv.layer_norm_", 10},
                                          {"input_layernorm", 10},
                                          {"input_norm", 10},
                                          {"linear_fc1.layer_norm_", 50},
                                          {"pre_mlp_layernorm", 50},
                                          {"pre_mlp_norm", 50},
                                          {"linear_qkv", 20},
                                          {"q_layernorm", 24},
                                          {"k_layernorm", 26},
                                          {"core_attention", 30},
                                          {"linear_proj", 35},
                                          {"self_attention", 40},
                                          {"router", 55},
                                          {"linear_fc1", 60},
                                          {"activation", 65},
                                          {"linear_fc2", 70},
                                          {"mlp", 80},
                                          {"gradient", 0}};

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

/// Place of a parameter or activation in the forward pass.
std::int64_t forward_place(const std::string& name) {
  if (contains(name, "embedding")) {
    if (contains(name, ".gradient")) return 0;
    return contains(name, "word_embeddings") ? 1 : contains(name, "position_embeddings") ? 2 : 3;
  }
  const std::string layers = "layers.";
  if (const std::size_t at = name.find(layers); at != std::string::npos) {
    std::int64_t layer = 0;
    for (std::size_t i = at + layers.size(); i < name.size() && name[i] >= '0' && name[i] <= '9'; ++i)
      layer = layer * 10 + (name[i] - '0');
    std::int64_t place = 75;
    for (const Component& component : kLayerComponents) {
      if (contains(name, component.part)) {
        place = component.place;
        break;
      }
    }
    // The reference's multi-token prediction layers follow the decoder.
    return (contains(name, "mtp.") ? kAfterLayers / 2 : 0) + (layer + 1) * kLayerStride + place +
           (contains(name, "bias") ? 1 : 0);
  }
  if (contains(name, "output_layer")) return kAfterLayers + 10;
  if (contains(name, "final_layernorm")) return kAfterLayers + (contains(name, "bias") ? 1 : 0);
  return kAfterLayers + 20;
}

}  // namespace

std::string TensorKey::label() const { return name.empty() ? kind : kind + "." + name; }

std::string TensorKey::text() const {
  std::string text = iteration == 0 ? std::string("initial weights") : concat("iteration ", iteration);
  if (sample >= 0)
    text += samples > 1 ? concat(", samples ", sample, "-", sample + samples - 1) : concat(", sample ", sample);
  return text + ": " + label();
}

TensorKey make_key(std::int64_t iteration, const std::string& kind, const std::string& name, std::int64_t sample,
                   std::int64_t samples) {
  TensorKey key;
  key.iteration = iteration;
  key.kind = kind;
  key.name = name;
  key.sample = sample;
  key.samples = samples;
  const std::int64_t place = forward_place(name);
  const bool gradient_of_activation = kind == "activation" && contains(name, ".gradient");
  if (kind == "tokens" || kind == "labels" || kind == "loss_mask") {
    key.phase = Phase::kInput;
    key.position = kind == "tokens" ? 0 : kind == "labels" ? 1 : 2;
  } else if (kind == "grad" || gradient_of_activation) {
    key.phase = Phase::kBackward;
    key.position = -place;
  } else if (kind == "activation") {
    key.phase = Phase::kForward;
    key.position = place;
  } else if (kind == "logits" || kind == "token_losses") {
    key.phase = Phase::kForward;
    key.position = kAfterLayers + (kind == "logits" ? 100 : 101);
  } else if (kind == "main_grad" || kind == "clipped_main_grad") {
    key.phase = Phase::kMainGradient;
    key.position = (kind == "main_grad" ? 0 : 2 * kAfterLayers) - place;
  } else {
    key.phase = Phase::kOptimizer;
    const std::int64_t order = kind == "exp_avg" || kind == "momentum_buffer" ? 0
                               : kind == "exp_avg_sq"                         ? 1
                               : kind == "fp32_param"                         ? 2
                               : kind == "param"                              ? 3
                                                                              : 4;
    key.position = order * 2 * kAfterLayers + place;
  }
  return key;
}

}  // namespace pgpt::training

// The whole model's hand-written backward against libtorch autograd in fp64, over every kind of layer.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <map>
#include <optional>

#include "pgpt/comm/world.h"
#include "pgpt/model/gpt.h"
#include "support/catch.h"
#include "support/tensor_check.h"
#include "support/thread_ranks.h"

using namespace pgpt;
using at::Tensor;

namespace {

using Leaves = std::map<std::string, Tensor>;

Tensor reference_norm(const config::ModelConfig& c, const Leaves& p, const std::string& prefix, const Tensor& x) {
  Tensor gain = p.at(prefix + "weight");
  if (c.zero_centered_gamma) gain = gain + 1;
  if (c.normalization == config::Normalization::kRMSNorm) {
    return x * at::rsqrt(x.square().mean(-1, true) + c.norm_epsilon) * gain;
  }
  const Tensor centred = x - x.mean(-1, true);
  return centred * at::rsqrt(centred.square().mean(-1, true) + c.norm_epsilon) * gain + p.at(prefix + "bias");
}

/// Positions [b,s] as rotary embeddings count them.
Tensor reference_positions(const model::Batch& batch) {
  const std::int64_t b = batch.tokens.size(0), s = batch.tokens.size(1);
  return batch.rope_positions.defined() ? batch.rope_positions.to(at::kLong) : at::arange(s, at::kLong).expand({b, s});
}

Tensor reference_rope(const kernels::RopeTable& table, const Tensor& positions, const Tensor& x) {
  const std::int64_t dim = table.options.dim;
  const Tensor cos = table.cos.to(at::kDouble).index({positions}).unsqueeze(2);  // [b,s,1,dim/2]
  const Tensor sin = table.sin.to(at::kDouble).index({positions}).unsqueeze(2);
  const Tensor turned = x.narrow(-1, 0, dim);
  Tensor result;
  if (table.options.interleaved) {
    const Tensor a = turned.slice(-1, 0, dim, 2), b = turned.slice(-1, 1, dim, 2);
    result = at::stack({a * cos - b * sin, b * cos + a * sin}, -1).flatten(-2);
  } else {
    const Tensor a = turned.narrow(-1, 0, dim / 2), b = turned.narrow(-1, dim / 2, dim / 2);
    result = at::cat({a * cos - b * sin, b * cos + a * sin}, -1);
  }
  return at::cat({result, x.narrow(-1, dim, x.size(-1) - dim)}, -1);
}

Tensor reference_activation(const config::ModelConfig& c, const Tensor& y) {
  if (c.gated()) {
    const Tensor gate = y.narrow(-1, 0, c.ffn_hidden_size), linear = y.narrow(-1, c.ffn_hidden_size, c.ffn_hidden_size);
    if (c.activation == config::Activation::kSwiglu) return at::silu(gate) * linear;
    return gate * at::sigmoid(1.702 * gate) * (linear + c.glu_linear_offset);
  }
  if (c.activation == config::Activation::kSquaredRelu) return at::relu(y).square();
  if (c.activation == config::Activation::kGeluErf) return 0.5 * y * (1 + at::erf(y / std::sqrt(2.0)));
  return 0.5 * y * (1 + at::tanh(0.79788456 * y * (1 + 0.044715 * y * y)));
}

/// Sum of token losses times scale, by autograd operations; the formulas of spec/model.md 4 written out once more.
Tensor reference_objective(const config::ModelConfig& c, const Leaves& p, const model::Batch& batch,
                           const kernels::RopeTable* rope) {
  const std::int64_t b = batch.tokens.size(0), s = batch.tokens.size(1), d = c.kv_channels;
  const std::int64_t heads = c.num_attention_heads, groups = c.num_query_groups, per_group = heads / groups;
  const auto affine = [&](const Tensor& x, const std::string& name) {
    Tensor y = at::matmul(x, p.at(name + ".weight").t());
    return p.count(name + ".bias") != 0 ? y + p.at(name + ".bias") : y;
  };
  Tensor x = p.at("embedding.word_embeddings.weight").index({batch.tokens});
  if (p.count("embedding.position_embeddings.weight") != 0) {
    x = x + p.at("embedding.position_embeddings.weight").index({batch.position_ids});
  }
  // [b,1,s,s]: later tokens, and those of other segments.
  Tensor hidden = at::ones({b, 1, s, s}, at::kBool).triu(1);
  if (batch.segments.defined()) {
    const Tensor& starts = batch.segments.starts;
    hidden = hidden.logical_or((starts.unsqueeze(2) != starts.unsqueeze(1)).unsqueeze(1));
  }
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const std::string layer = "decoder.layers." + std::to_string(i) + ".";
    const std::string attention = layer + "self_attention.";
    const Tensor y = reference_norm(c, p, attention + "linear_qkv.layer_norm_", x);
    const Tensor packed = affine(y, attention + "linear_qkv").view({b, s, groups, per_group + 2, d});
    Tensor q = packed.narrow(3, 0, per_group).reshape({b, s, heads, d});
    Tensor k = packed.select(3, per_group);
    const Tensor v = packed.select(3, per_group + 1);
    if (c.qk_layernorm) {
      q = reference_norm(c, p, attention + "q_layernorm.", q);
      k = reference_norm(c, p, attention + "k_layernorm.", k);
    }
    if (rope != nullptr) {
      q = reference_rope(*rope, reference_positions(batch), q);
      k = reference_rope(*rope, reference_positions(batch), k);
    }
    const auto by_head = [&](const Tensor& t) {
      return at::repeat_interleave(t, heads / t.size(2), 2).transpose(1, 2);
    };
    const Tensor scores = at::matmul(by_head(q), by_head(k).transpose(2, 3)) / std::sqrt(static_cast<double>(d));
    const Tensor weights = at::softmax(scores.masked_fill(hidden, -INFINITY), -1);
    x = x +
        affine(at::matmul(weights, by_head(v)).transpose(1, 2).reshape({b, s, heads * d}), attention + "linear_proj");
    const Tensor z = reference_norm(c, p, layer + "mlp.linear_fc1.layer_norm_", x);
    x = x + affine(reference_activation(c, affine(z, layer + "mlp.linear_fc1")), layer + "mlp.linear_fc2");
  }
  const std::string output = c.untie_embeddings ? "output_layer.weight" : "embedding.word_embeddings.weight";
  const Tensor logits = at::matmul(reference_norm(c, p, "decoder.final_layernorm.", x), p.at(output).t()).flatten(0, 1);
  const Tensor losses = -at::log_softmax(logits, -1).gather(1, batch.labels.unsqueeze(1)).squeeze(1);
  return (losses * batch.gradient_scale).sum();
}

/// Which tokens of a micro-batch of two samples of 12 see each other.
enum class Documents { kIgnored, kApart, kApartWithPositions };

/// A small model in fp64 with random weights, run without a Trainer.
struct SmallModel {
  explicit SmallModel(const std::string& flags)
      : parsed(test::parse(
            "--mock-data --tokenizer-type NullTokenizer --vocab-size 40 --make-vocab-size-divisible-by 8 --num-layers "
            "2 "
            "--hidden-size 24 --ffn-hidden-size 36 "
            "--num-attention-heads 4 --kv-channels 8 --seq-length 12 --max-position-embeddings 16 --micro-batch-size 2 "
            "--train-iters 1 --lr 1e-3 "
            "--eval-iters 0 --attention-dropout 0 --hidden-dropout 0 " +
                flags,
            1)),
        worlds(comm::World::connect_threads(1)),
        group(worlds[0]->create_group("one", {0})),
        store(model::GptModel::parameter_specs(parsed.model), fp64()) {
    std::uint64_t seed = 1;
    for (parameter::Parameter& parameter : store.parameters()) {
      const Tensor noise = test::random_normal(parameter.weight.sizes(), seed++) * 0.3;
      parameter.weight.copy_(parameter.spec.init == parameter::InitRule::kOnes ? noise + 1 : noise);
    }
    reducer.emplace(store, *group, *group, parameter::ReducerOptions{});
    gpt.emplace(parsed.model, parsed.training, store, at::kCPU);
    chain.emplace(gpt->chain_uses(), *group, *group, gtp::ChainOptions{},
                  [this](parameter::Parameter& p) { reducer->parameter_ready(p); });
  }
  static parameter::StoreOptions fp64() {
    parameter::StoreOptions options;
    options.weight_dtype = options.gradient_dtype = at::kDouble;
    return options;
  }

  model::StepContext context(bool training) {
    model::StepContext result;
    result.config = &parsed.model;
    result.chain = &*chain;
    result.reducer = training ? &*reducer : nullptr;
    result.training = training;
    result.dropout = &cursor;
    return result;
  }
  model::LossSum train(const model::Batch& batch) {
    reducer->begin_step();
    reducer->begin_last_microbatch();
    model::LossSum loss = gpt->forward_backward(context(true), batch);
    chain->finish_gradients();
    reducer->finish();
    return loss;
  }
  /// Losses of all tokens [T].
  Tensor losses(const model::Batch& batch) { return gpt->forward(context(false), batch).token_losses; }

  config::Config parsed;
  std::vector<std::unique_ptr<comm::World>> worlds;
  std::unique_ptr<comm::Communicator> group;
  parameter::ParameterStore store;
  std::optional<parameter::GradientReducer> reducer;
  std::optional<model::GptModel> gpt;
  std::optional<gtp::WeightChain> chain;
  model::DropoutCursor cursor;
};

const std::vector<std::int32_t> kDocumentEnds{0, 5, 6, 12, 14, 14, 24};

model::Batch random_batch(Documents documents) {
  model::Batch batch;
  at::Generator generator = at::detail::createCPUGenerator(7);
  batch.tokens = at::randint(40, {2, 12}, generator, at::TensorOptions().dtype(at::kLong));
  batch.labels = at::randint(40, {24}, generator, at::TensorOptions().dtype(at::kLong));
  batch.position_ids = at::arange(12, at::kLong).expand({2, 12}).contiguous();
  batch.loss_mask = at::ones({24}, at::kDouble);
  batch.gradient_scale = test::random_normal({24}, 8);
  if (documents != Documents::kIgnored) batch.segments = kernels::make_attention_segments(kDocumentEnds, 2, 12);
  if (documents == Documents::kApartWithPositions) {
    batch.rope_positions = at::arange(12, at::kInt).expand({2, 12}) - batch.segments.starts;
    batch.position_ids = batch.rope_positions.to(at::kLong);
  }
  return batch;
}

void check_model(const std::string& flags, double relative_bound, Documents documents = Documents::kIgnored) {
  INFO(flags << " documents " << static_cast<int>(documents));
  const at::NoGradGuard no_grad;
  SmallModel small(flags);
  const config::ModelConfig& c = small.parsed.model;
  Leaves leaves;
  for (const parameter::Parameter& parameter : small.store.parameters()) {
    const at::AutoGradMode with_grad(true);
    leaves[parameter.spec.name] = test::leaf(parameter.weight);
  }
  const model::Batch batch = random_batch(documents);
  const model::LossSum loss = small.train(batch);

  std::unique_ptr<kernels::RopeTable> rope;
  if (c.has_rope()) {
    kernels::RopeOptions rope_options;
    rope_options.dim = static_cast<std::int64_t>(static_cast<double>(c.kv_channels) * c.rotary_percent);
    rope_options.base = static_cast<double>(c.rotary_base);
    rope_options.interleaved = c.rotary_interleaved;
    rope = std::make_unique<kernels::RopeTable>(kernels::make_rope_table(c.seq_length, rope_options, at::kCPU));
  }
  const at::AutoGradMode with_grad(true);
  const Tensor objective = reference_objective(c, leaves, batch, rope.get());
  objective.backward();
  const double ours = (loss.token_losses.to(at::kDouble) * batch.gradient_scale).sum().item<double>();
  CHECK(std::abs(ours - objective.item<double>()) <= relative_bound * 100);  // 24 losses of size 4
  for (const parameter::Parameter& parameter : small.store.parameters()) {
    INFO(parameter.spec.name);
    const Tensor expected = leaves.at(parameter.spec.name).grad();
    REQUIRE(expected.defined());
    test::require_within(parameter.main_gradient, expected,
                         relative_bound * std::max(1.0, expected.abs().max().item<double>()));
  }
}

// Both sides evaluate the same formulas in fp64. Chains of about 20 contractions (2 layers, forward and backward) over
// at most 480 terms each give relative errors below 20 * 480 * 2^-53 = 1.1e-12 of values no larger than the largest
// gradient; the weights' size amplifies by less than 10.
constexpr double kBound = 1.1e-11;
// The published derivative of tanh GELU has constants of ten digits.
constexpr double kTanhBound = 1e-9;

}  // namespace

TEST_CASE("the model's backward equals libtorch autograd in fp64", "[cpu][model]") {
  const std::string untied = "--untie-embeddings-and-output-weights ";
  const std::string plain = "--disable-bias-linear ";
  const std::string rope = "--position-embedding-type rope ";
  check_model("", kTanhBound);  // GPT-2: biases, tanh GELU, tied, learned positions, LayerNorm
  check_model("--no-bias-gelu-fusion " + untied, kBound);  // erf GELU with biases
  check_model(plain + untied + "--apply-layernorm-1p ", kBound);
  check_model(plain + untied + "--squared-relu --position-embedding-type none ", kBound);
  check_model(plain + untied + "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 " + rope,
              kBound);
  check_model(
      plain + "--swiglu --normalization RMSNorm --qk-layernorm --group-query-attention --num-query-groups 1 " + rope,
      kBound);
  check_model(plain + untied + "--qk-layernorm --add-qkv-bias --rotary-interleaved --no-rope-fusion " + rope, kBound);
  check_model(plain + untied + "--quick-geglu --rotary-percent 0.5 " + rope, kBound);
  check_model(plain + untied + "--attention-backend unfused ", kBound);
}

TEST_CASE("logits in parts give the same gradients in fp64", "[cpu][model]") {
  // 24 tokens in 3 equal parts, in 5 with a short last one, and more parts than tokens.
  for (const char* parts : {"--logits-chunks 3 ", "--logits-chunks 5 ", "--logits-chunks 100 "}) {
    check_model(std::string(parts) + "--no-bias-gelu-fusion --untie-embeddings-and-output-weights ", kBound);
    check_model(std::string(parts) + "--no-bias-gelu-fusion ", kBound);  // tied: two gradients of one weight
  }
}

TEST_CASE("recompute gives the same gradients in fp64", "[cpu][model]") {
  const std::string model =
      "--disable-bias-linear --swiglu --normalization RMSNorm --qk-layernorm --group-query-attention "
      "--num-query-groups 2 --position-embedding-type rope ";
  check_model(model + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 ", kBound);
  check_model(model + "--recompute-granularity selective --recompute-modules core_attn layernorm mlp ", kBound);
}

TEST_CASE("documents kept apart inside samples give autograd's gradients in fp64", "[cpu][model]") {
  const std::string plain = "--disable-bias-linear ";
  const std::string rope = "--position-embedding-type rope ";
  const std::string llama = plain + "--swiglu --normalization RMSNorm " + rope;
  const std::string groups = "--group-query-attention --num-query-groups 2 ";
  for (const Documents documents : {Documents::kApart, Documents::kApartWithPositions}) {
    check_model("--no-bias-gelu-fusion ", kBound, documents);  // learned positions
    check_model(llama, kBound, documents);
    check_model(llama + groups, kBound, documents);
    check_model(llama + groups + "--qk-layernorm --rotary-interleaved --rotary-percent 0.5 ", kBound, documents);
    check_model(llama + groups + "--attention-backend unfused ", kBound, documents);
    check_model(llama + "--logits-chunks 5 ", kBound, documents);
    check_model(llama + groups + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 ",
                kBound, documents);
    check_model(llama + groups + "--recompute-granularity selective --recompute-modules core_attn layernorm mlp ",
                kBound, documents);
  }
}

TEST_CASE("a document gives the same losses inside a sample as alone", "[cpu][model]") {
  const at::NoGradGuard no_grad;
  for (const char* flags : {"", "--position-embedding-type rope --swiglu --group-query-attention --num-query-groups 2 ",
                            "--position-embedding-type rope --qk-layernorm ",
                            "--position-embedding-type rope --attention-backend unfused "}) {
    INFO(flags);
    SmallModel small(flags);
    const model::Batch batch = random_batch(Documents::kApartWithPositions);
    const Tensor packed = small.losses(batch);
    for (std::size_t i = 1; i < kDocumentEnds.size(); ++i) {
      const std::int64_t begin = kDocumentEnds[i - 1], length = kDocumentEnds[i] - begin;
      if (length == 0) continue;
      const auto part = [&](const Tensor& t) { return t.flatten().narrow(0, begin, length).contiguous(); };
      model::Batch alone;
      alone.tokens = part(batch.tokens).view({1, length});
      alone.position_ids = at::arange(length, at::kLong).view({1, length});
      alone.labels = part(batch.labels);
      alone.loss_mask = part(batch.loss_mask);
      alone.gradient_scale = part(batch.gradient_scale);
      // Losses of size 4 by the same formulas in fp64; products may add up in another order.
      test::require_within(part(packed), small.losses(alone), kBound * 4);
    }
    // Not so when documents see each other.
    const Tensor mixed = small.losses(random_batch(Documents::kIgnored));
    CHECK((mixed - packed).abs().max().item<double>() > 1e-3);
  }
}

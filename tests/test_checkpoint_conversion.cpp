// How tensors and options translate to other programs' models; tests/python compares with those programs themselves.
#include <ATen/ATen.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "pgpt/base/error.h"
#include "pgpt/checkpoint/architecture.h"
#include "pgpt/checkpoint/hugging_face.h"
#include "support/catch.h"
#include "support/text.h"
#include "test_checkpoint_support.h"

using namespace pgpt;
using namespace pgpt::checkpoint;
using test::contains;

namespace {

config::ModelConfig llama() {
  config::ModelConfig m;
  m.num_layers = 2;
  m.hidden_size = 24;
  m.ffn_hidden_size = 40;
  m.num_attention_heads = 6;
  m.num_query_groups = 2;
  m.kv_channels = 4;
  m.max_position_embeddings = 32;
  m.vocab_size = 50;
  m.padded_vocab_size = 64;
  m.position_embedding = config::PositionEmbedding::kRope;
  m.normalization = config::Normalization::kRMSNorm;
  m.activation = config::Activation::kSwiglu;
  m.add_bias_linear = m.add_qkv_bias = false;
  m.untie_embeddings = true;
  return m;
}

config::ModelConfig gpt2() {
  config::ModelConfig m;
  m.num_layers = 2;
  m.hidden_size = 24;
  m.ffn_hidden_size = 96;
  m.num_attention_heads = m.num_query_groups = 6;
  m.kv_channels = 4;
  m.max_position_embeddings = 32;
  m.vocab_size = 50;
  m.padded_vocab_size = 64;
  return m;
}

struct Case {
  HfFamily family;
  config::ModelConfig model;
};

std::vector<Case> cases() {
  std::vector<Case> all = {{HfFamily::kGpt2, gpt2()}, {HfFamily::kLlama, llama()}, {HfFamily::kMistral, llama()}};
  config::ModelConfig biased = llama();
  biased.add_bias_linear = biased.add_qkv_bias = true;
  all.push_back({HfFamily::kLlama, biased});
  config::ModelConfig qwen2 = llama();
  qwen2.add_qkv_bias = true;
  qwen2.untie_embeddings = false;
  all.push_back({HfFamily::kQwen2, qwen2});
  config::ModelConfig qwen3 = llama();
  qwen3.qk_layernorm = true;
  qwen3.kv_channels = 10;
  qwen3.transformer_impl = config::TransformerImpl::kLocal;
  all.push_back({HfFamily::kQwen3, qwen3});
  return all;
}

std::string refusal(const config::ModelConfig& model, const std::string& wanted = "") {
  return test::error_of<ConfigError>([&] { (void)choose_family(model, wanted); });
}

}  // namespace

TEST_CASE("query, key and value rows of each group land where the other layout has them", "[cpu][checkpoint]") {
  const config::ModelConfig m = llama();
  const std::int64_t d = m.kv_channels;
  const std::int64_t heads_of_group = m.num_attention_heads / m.num_query_groups;
  const std::vector<HfLink> links = hf_links(HfFamily::kLlama, m, m.vocab_size);
  const auto link =
      std::find_if(links.begin(), links.end(), [](const HfLink& l) { return l.kind == HfLink::Kind::kQkv; });
  REQUIRE(link != links.end());
  const at::Tensor packed = at::arange(m.qkv_rows() * m.hidden_size, at::kFloat).view({m.qkv_rows(), m.hidden_size});
  const std::vector<at::Tensor> parts = to_hf(*link, packed, m);
  REQUIRE(parts.size() == 3);
  std::int64_t row = 0;  // of the packed matrix, in its own order
  for (std::int64_t group = 0; group < m.num_query_groups; ++group) {
    for (std::int64_t head = 0; head < heads_of_group; ++head) {
      for (std::int64_t i = 0; i < d; ++i)
        CHECK(parts[0][(group * heads_of_group + head) * d + i].equal(packed[row++]));
    }
    for (std::int64_t i = 0; i < d; ++i) CHECK(parts[1][group * d + i].equal(packed[row++]));
    for (std::int64_t i = 0; i < d; ++i) CHECK(parts[2][group * d + i].equal(packed[row++]));
  }
  CHECK(row == m.qkv_rows());
}

TEST_CASE("every tensor of every family returns bit for bit, and pad rows of the vocabulary as zeros",
          "[cpu][checkpoint]") {
  for (const Case& c : cases()) {
    INFO(family_name(c.family));
    CHECK(refusal(c.model, family_name(c.family)).empty());
    for (const HfLink& link : hf_links(c.family, c.model, c.model.vocab_size)) {
      INFO(link.native);
      at::Tensor native = at::randn(link.native_shape);
      if (link.kind == HfLink::Kind::kVocabulary) native.narrow(0, 50, 14).zero_();
      const std::vector<at::Tensor> parts = to_hf(link, native, c.model);
      REQUIRE(parts.size() == link.names.size());
      for (std::size_t i = 0; i < parts.size(); ++i) {
        CHECK(parts[i].is_contiguous());
        CHECK(parts[i].sizes().vec() == link.shapes[i]);
      }
      CHECK(from_hf(link, parts, c.model).equal(native));
    }
  }
}

TEST_CASE("files are cut at the size limit and the index finds every tensor", "[cpu][checkpoint]") {
  const Case c = cases()[1];
  const std::vector<HfLink> links = hf_links(c.family, c.model, c.model.vocab_size);
  std::map<std::string, at::Tensor> native;
  for (const HfLink& link : links) native[link.native] = at::randn(link.native_shape);
  const test::ScratchFolder folder;
  const std::filesystem::path path = folder.path("model");
  std::filesystem::create_directories(path);
  constexpr std::uint64_t kLimit = 8000;
  const std::size_t files = write_hf_weights(path, links, c.model, at::kFloat, kLimit,
                                             [&](const std::string& name) { return native.at(name); });
  CHECK(files > 3);
  std::size_t found = 0;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (entry.path().extension() != ".safetensors") continue;
    ++found;
    const SafetensorsFile file(entry.path().string());
    CHECK(file.metadata().at("format") == "pt");
    // A file above the limit holds what comes from one tensor, which stays together.
    if (std::filesystem::file_size(entry.path()) - file.data_offset() > kLimit) CHECK(file.entries().size() <= 3);
  }
  CHECK(found == files);
  const HfWeights weights(path);
  weights.check(links, c.family, c.model);
  for (const HfLink& link : links) {
    const at::Tensor back = weights.read_native(link, c.model);
    const at::Tensor& sent = native.at(link.native);
    if (link.kind == HfLink::Kind::kVocabulary) {
      CHECK(back.narrow(0, 0, 50).equal(sent.narrow(0, 0, 50)));
    } else {
      CHECK(back.equal(sent));
    }
  }
}

TEST_CASE("a model survives config.json, and command line and argument dump", "[cpu][checkpoint]") {
  for (const Case& c : cases()) {
    INFO(family_name(c.family));
    const test::ScratchFolder folder;
    const std::filesystem::path path = folder.path("model");
    std::filesystem::create_directories(path);
    std::ofstream(path / "config.json") << hf_config_text(c.family, c.model, c.model.vocab_size, at::kFloat, {});
    const HfConfig read = read_hf_config(path);
    CHECK(read.family == c.family);
    CHECK_FALSE(read.sliding_window);
    CHECK((traits(read.model) == traits(c.model)));
    const config::ModelConfig again = model_of_arguments(arguments_of_model(c.model), "the dump");
    CHECK((traits(again) == traits(c.model)));
    CHECK(again.padded_vocab_size == c.model.padded_vocab_size);
    CHECK(again.transformer_impl == c.model.transformer_impl);
    CHECK(again.max_position_embeddings == c.model.max_position_embeddings);
  }
}

TEST_CASE("the family follows from the flags, and what fits none says why", "[cpu][checkpoint]") {
  CHECK(choose_family(gpt2(), "") == HfFamily::kGpt2);
  CHECK(choose_family(llama(), "") == HfFamily::kLlama);
  CHECK(choose_family(llama(), "mistral") == HfFamily::kMistral);
  CHECK(choose_family(cases()[4].model, "") == HfFamily::kQwen2);
  CHECK(choose_family(cases()[5].model, "") == HfFamily::kQwen3);
  config::ModelConfig m = llama();
  m.zero_centered_gamma = true;
  CHECK(contains(refusal(m), "--apply-layernorm-1p"));
  m = llama();
  m.rotary_interleaved = true;
  CHECK(contains(refusal(m), "--rotary-interleaved"));
  m = gpt2();
  m.add_bias_linear = m.add_qkv_bias = false;
  CHECK(contains(refusal(m), "--disable-bias-linear"));
  m = gpt2();
  m.position_embedding = config::PositionEmbedding::kNone;
  CHECK(contains(refusal(m), "learned_absolute"));
  CHECK(contains(refusal(llama(), "qwen2"), "--add-qkv-bias"));
  CHECK(contains(refusal(llama(), "bert"), "known are gpt2, llama, mistral, qwen2 and qwen3"));
}

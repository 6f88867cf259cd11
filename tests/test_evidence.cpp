// Evidence: what is written, that it changes nothing, that a failed write ends every rank, and that equal commands give
// equal bits.

#include <nlohmann/json.hpp>

#include "pgpt/base/error.h"
#include "pgpt/data/checksum.h"
#include "support/catch.h"
#include "support/evidence_runs.h"
#include "support/json.h"
#include "support/processes.h"
#include "support/text.h"

using namespace pgpt;
using namespace pgpt::test;
using nlohmann::json;

namespace {

json manifest(const std::string& stem) { return read_json(stem + ".json"); }

}  // namespace

TEST_CASE("training with evidence on has the bits of training with it off", "[cpu][dist]") {
  struct Case {
    const char* name;
    std::string flags;
    int ranks;
  };
  const Case cases[] = {
      {"one rank, fused accumulation", "--bf16 --disable-bias-linear --global-batch-size 2 ", 1},
      {"one rank, no fusion", "--bf16 --no-gradient-accumulation-fusion --global-batch-size 2 ", 1},
      {"one rank, tied embeddings are the default, fp32", "--global-batch-size 2 ", 1},
      {"data parallel 2, untied, fused", "--bf16 --untie-embeddings-and-output-weights --global-batch-size 4 ", 2},
      {"GTP 2, fused accumulation", "--bf16 --global-batch-size 4 " + kGtp2, 2},
      {"GTP 2, no fusion, untied",
       "--bf16 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights --global-batch-size 2 " + kGtp2,
       2},
      {"GTP 2, tied, no fusion", "--bf16 --no-gradient-accumulation-fusion --global-batch-size 4 " + kGtp2, 2},
      {"GTP 2, recompute",
       "--bf16 --global-batch-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers "
       "1 " +
           kGtp2,
       2},
  };
  for (const Case& c : cases) {
    INFO(c.name);
    const TemporaryFolder folder;
    const Bits off = train(kSmallFlags + c.flags, c.ranks);
    const Bits on = train(kSmallFlags + c.flags + "--evidence-dir " + folder / "e", c.ranks);
    CHECK(off == on);
    CHECK(std::filesystem::exists(folder / "e/iter_0000002/rank_00000.json"));
  }
}

TEST_CASE("evidence holds every kind of tensor and a manifest that describes it", "[cpu][dist]") {
  const TemporaryFolder folder;
  train(kSmallFlags + "--bf16 --global-batch-size 4 " + kGtp2 + "--evidence-dir " + folder / "e", 2);
  for (int rank = 0; rank < 2; ++rank) {
    const std::string stem = folder / "e/iter_0000001/rank_0000" + std::to_string(rank);
    const json m = manifest(stem);
    CHECK(m["iteration"] == 1);
    CHECK(m["rank"] == rank);
    CHECK(m["world_size"] == 2);
    CHECK(m["layout"]["gtp"]["size"] == 2);
    CHECK(m["layout"]["gtp"]["index"] == rank);
    CHECK(m["layout"]["data_rank"] == rank);
    CHECK(m["layout"]["data_size"] == 2);
    CHECK(m["groups"]["gtp"] == std::vector<int>{0, 1});
    CHECK(m["groups"]["replicate_dp"] == std::vector<int>{rank});
    CHECK(m["arguments"]["hidden_size"] == "24");
    CHECK(m["parameter_dtype"] == "BFloat16");
    CHECK(m["gradient_dtype"] == "Float");
    CHECK(m["versions"].contains("torch"));
    CHECK(m["step"]["num_microbatches"] == 2);
    // 40 rows over two ranks in multiples of 16 rows: 24 rows of padding.
    const json& fc1 = m["parameters"]["decoder.layers.0.mlp.linear_fc1.weight"];
    CHECK(fc1["cuts"][0]["padding"] == 24);
    CHECK(fc1["cuts"][0]["index"] == rank);
    CHECK(fc1["local_shape"] == std::vector<int>{32, 24});

    const checkpoint::SafetensorsFile file(stem + ".safetensors");
    for (const char* name :
         {"mb0.tokens", "mb1.labels", "mb1.loss_mask", "mb0.token_losses", "mb1.logits", "mb0.activation.embedding",
          "mb0.activation.decoder.layers.1.mlp", "mb0.activation.decoder.layers.0.gradient",
          "mb1.grad.embedding.word_embeddings.weight", "mb0.grad.decoder.final_layernorm.weight",
          "main_grad.decoder.layers.0.mlp.linear_fc1.weight", "param.decoder.layers.0.mlp.linear_fc1.weight",
          "delta.decoder.layers.0.mlp.linear_fc1.weight", "fp32_param.embedding.word_embeddings.weight",
          "exp_avg.decoder.layers.0.mlp.linear_fc1.weight", "exp_avg_sq.decoder.layers.0.mlp.linear_fc1.weight"}) {
      INFO(name);
      CHECK(file.contains(name));
    }
    CHECK(m["tensors"].size() == file.entries().size());
    for (const json& entry : m["tensors"]) {
      const at::Tensor tensor = file.read(entry["name"].get<std::string>());
      const auto* bytes = static_cast<const std::byte*>(tensor.data_ptr());
      char text[9];
      std::snprintf(text, sizeof text, "%08x", data::crc32({bytes, static_cast<std::size_t>(tensor.nbytes())}));
      CHECK(entry["crc32"] == text);
    }
    // The weights before the first step, and their change by it.
    const checkpoint::SafetensorsFile start(folder / "e/iter_0000000/rank_0000" + std::to_string(rank) +
                                            ".safetensors");
    const std::string parameter = "decoder.layers.0.mlp.linear_fc1.weight";
    CHECK(file.read("param." + parameter)
              .to(at::kFloat)
              .sub(start.read("param." + parameter).to(at::kFloat))
              .equal(file.read("delta." + parameter)));
  }
}

TEST_CASE("evidence content and iterations are chosen, and nothing else is written", "[cpu]") {
  const TemporaryFolder folder;
  train(kSmallFlags +
            "--global-batch-size 1 --evidence-iterations 2 --evidence-content logits optimizer --evidence-dir " +
            folder / "e",
        1);
  CHECK_FALSE(std::filesystem::exists(folder / "e/iter_0000000"));
  CHECK_FALSE(std::filesystem::exists(folder / "e/iter_0000001"));
  const checkpoint::SafetensorsFile file(folder / "e/iter_0000002/rank_00000.safetensors");
  for (const auto& [name, entry] : file.entries()) {
    INFO(name);
    CHECK((name == "mb0.logits" || name.rfind("exp_avg", 0) == 0));
  }
  CHECK_FALSE(manifest(folder / "e/iter_0000002/rank_00000").contains("groups"));
  CHECK_THROWS_AS(
      train(kSmallFlags + "--global-batch-size 1 --evidence-content logit --evidence-dir " + folder / "x", 1),
      ConfigError);
  CHECK_THROWS_AS(
      train(kSmallFlags + "--global-batch-size 1 --evidence-iterations -1 --evidence-dir " + folder / "x", 1),
      ConfigError);
}

TEST_CASE("a rank that cannot write its evidence ends all ranks with exit code 2 and one message", "[cpu][dist]") {
  const TemporaryFolder folder;
  // Rank 1's file cannot replace a folder that is not empty.
  std::filesystem::create_directories(folder / "e/iter_0000001/rank_00001.safetensors/in-the-way");
  const config::Config config = parse(
      kSmallFlags + "--global-batch-size 2 --evidence-iterations 1 --evidence-dir " + folder / "e" + " " + kGtp2, 2);
  int spoke[2] = {0, 0};
  run_ranks(config, 2, [&](int rank, training::Trainer& trainer) {
    try {
      trainer.step();
      FAIL("the step succeeded");
    } catch (const AgreedError& error) {
      CHECK(error.code() == ExitCode::kConfiguration);
      spoke[rank] = error.speaks() ? 1 : 0;
      if (error.speaks()) CHECK(contains(std::string(error.what()), "--evidence-dir: rank 1, iteration 1"));
    }
  });
  CHECK(spoke[0] == 0);
  CHECK(spoke[1] == 1);
  CHECK_FALSE(std::filesystem::exists(folder / "e/iter_0000001/rank_00001.json"));
}

TEST_CASE("a full disk stops the program with exit code 2 on all ranks and leaves no partial file", "[cpu][dist]") {
  const TemporaryFolder folder;
  // A limit on the size of files stands in for a full disk: write() fails in the middle of the file in both cases.
  std::vector<std::string> words =
      program(kSeedFlags + kGtp2 + "--distributed-backend gloo --evidence-dir " + folder / "e");
  words.insert(words.begin(),
               {"/bin/bash", "-c", "trap '' XFSZ; [ $RANK = 1 ] && ulimit -f 64; exec \"$@\"", "limited"});
  const std::vector<Ended> ended = pgpt::test::run_ranks(2, words, {}, std::chrono::seconds(60));
  INFO(describe(ended));
  for (const Ended& rank : ended) {
    CHECK_FALSE(rank.timed_out);
    CHECK(rank.exit_code == 2);
  }
  CHECK(contains(ended[1].output, "--evidence-dir: rank 1"));
  CHECK(contains(ended[1].output, "File too large"));
  std::size_t left = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder / "e")) {
    if (entry.path().string().find("rank_00001") != std::string::npos) ++left;
    CHECK_FALSE(contains(entry.path().string(), ".tmp."));
  }
  CHECK(left == 0);
}

TEST_CASE("the same deterministic command gives the same bits, with prefetch, recompute and loader threads on or off",
          "[cpu][dist]") {
  const std::string flags =
      kSmallFlags + "--bf16 --global-batch-size 4 --deterministic-mode --attention-dropout 0.1 --hidden-dropout 0.1 ";
  for (const std::string& layout : {kGtp2, std::string()}) {
    const Bits first = train(flags + layout, 2);
    CHECK(train(flags + layout, 2) == first);
    for (const std::string change : {"--no-gtp-prefetch", "--no-gtp-async-reduce-scatter",
                                     "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
                                     "--recompute-granularity selective --recompute-modules core_attn",
                                     "--num-workers 2", "--overlap-grad-reduce"}) {
      if (layout.empty() && change.find("gtp") != std::string::npos) continue;
      INFO(layout << change);
      CHECK(train(flags + layout + change, 2) == first);
    }
  }
}

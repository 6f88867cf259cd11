// The program on one GPU: the published comparison with two ranks sharing it, one rank through NCCL, and the
// reference's fused-attention runs.

#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "pgpt/data/indexed_dataset.h"
#include "support/catch.h"
#include "support/processes.h"
#include "support/seed_run.h"

using namespace pgpt;
using namespace std::chrono_literals;
using nlohmann::json;

namespace {

bool gpus_visible(int wanted) {
  int found = 0;
  while (std::filesystem::exists("/dev/nvidia" + std::to_string(found))) ++found;
  if (found < wanted) WARN("needs " << wanted << " GPU(s), found " << found << ": skipped");
  return found >= wanted;
}

using test::contains;

/// The named values of every step have the same bits.
void check_same_steps(const std::vector<json>& a, const std::vector<json>& b, const std::vector<std::string>& values) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    INFO("step " << i + 1 << ": " << a[i].dump() << " and " << b[i].dump());
    for (const std::string& value : values) CHECK(a[i].at(value) == b[i].at(value));
  }
}

}  // namespace

TEST_CASE("two ranks sharing one GPU reproduce the published comparison", "[gpu][dist]") {
  if (!gpus_visible(1)) return;
  const auto folder = test::scratch_folder("gpu_seed");
  struct Case {
    const char* kernels;
    test::SeedTolerance tolerance;  // measured spread of correct GPU implementations (docs/seed-comparison.md)
  };
  for (const Case& c : {Case{"reference", {2e-6, 6e-4}}, Case{"fast", {5e-5, 6e-4}}}) {
    INFO("--kernels " << c.kernels);
    const auto metrics = folder / c.kernels;
    const auto ranks =
        test::run_ranks(2,
                        test::program(std::string(test::kSeedFlags) + " --distributed-backend gloo --kernels " +
                                      c.kernels + " --metrics-file " + metrics.string()),
                        {}, 120s);
    INFO(test::describe(ranks));
    for (const test::Ended& rank : ranks) CHECK(rank.exit_code == 0);
    test::check_published(test::read_steps(metrics), c.tolerance);
    CHECK(contains(ranks[0].output, "cudnn"));
  }
}

TEST_CASE("one rank through NCCL with two micro-batches starts from the other initial weights", "[gpu][dist]") {
  if (!gpus_visible(1)) return;
  const auto metrics = test::scratch_folder("gpu_one") / "metrics";
  const auto ranks =
      test::run_ranks(1,
                      test::program(std::string(test::kSeedFlags) +
                                    " --tensor-parallel-num-weight-shards 1 --metrics-file " + metrics.string()),
                      {}, 120s);
  INFO(test::describe(ranks));
  CHECK(ranks[0].exit_code == 0);
  CHECK(contains(ranks[0].output, "backend nccl"));
  const std::vector<json> steps = test::read_steps(metrics);
  REQUIRE(steps.size() == 3);
  const double losses[] = {4.905784, 4.902406, 4.789462};
  for (std::size_t i = 0; i < 3; ++i) CHECK(std::abs(steps[i]["lm_loss"].get<double>() - losses[i]) <= 3e-4);
}

TEST_CASE("the reference's fused-attention runs are reproduced on a GPU", "[gpu][dist][conformance]") {
  if (!gpus_visible(1)) return;
  const auto folder = test::scratch_folder("gpu_fused");
  for (const char* file : {"dense.json", "gtp.json"}) {
    std::ifstream in(std::string(PGPT_TEST_DATA) + "/reference/" + file);
    const json cases = json::parse(in);
    for (const auto& [name, entry] : cases.items()) {
      if (!contains(name, "-fused")) continue;
      INFO(name);
      std::string flags;
      if (entry["flags"].is_string()) {
        flags = entry["flags"].get<std::string>();
      } else {
        for (const auto& word : entry["flags"]) flags += word.get<std::string>() + " ";
      }
      const auto ranks = test::run_ranks(
          entry["ranks"].get<int>(),
          test::program(flags + " --distributed-backend gloo --metrics-file " + (folder / name).string()), {}, 120s);
      INFO(test::describe(ranks));
      const std::vector<json> steps = test::read_steps(folder / name);
      REQUIRE(steps.size() == entry["steps"].size());
      for (std::size_t i = 0; i < steps.size(); ++i) {
        INFO("step " << i + 1);
        const json& expected = entry["steps"][i];
        // Bounds of the reference's README for bf16.
        const double loss = expected["losses"]["lm loss"].get<double>();
        CHECK(std::abs(steps[i]["lm_loss"].get<double>() - loss) <= (i == 0 ? 5e-4 : 5e-3));
        const double norm = expected["grad_norm"].get<double>();
        CHECK(std::abs(steps[i]["grad_norm"].get<double>() - norm) <= 1e-2 * norm);
      }
    }
  }
}

TEST_CASE("two GPUs through NCCL reproduce the published comparison under every launcher", "[gpu][nccl]") {
  if (!gpus_visible(2)) return;
  const auto folder = test::scratch_folder("nccl_seed");
  const auto flags = [&](const std::string& name, const std::string& more) {
    return test::program(std::string(test::kSeedFlags) + " --metrics-file " + (folder / name).string() + " " + more);
  };
  const auto reference = test::run_ranks(2, flags("reference", "--kernels reference"), {}, 120s);
  INFO(test::describe(reference));
  CHECK(contains(reference[0].output, "backend nccl"));
  test::check_published(test::read_steps(folder / "reference"), {2e-6, 6e-4});
  const auto torchrun = test::run_torchrun(2, flags("torchrun", ""), {}, 120s);
  INFO(test::describe(torchrun));
  CHECK(torchrun.exit_code == 0);
  test::check_published(test::read_steps(folder / "torchrun"), {5e-5, 6e-4});
  if (test::has_mpirun()) {
    const auto mpirun = test::run_mpirun(2, flags("mpirun", ""), {}, 120s);
    INFO(test::describe(mpirun));
    CHECK(mpirun.exit_code == 0);
    test::check_published(test::read_steps(folder / "mpirun"), {5e-5, 6e-4});
  }
}

TEST_CASE("on two GPUs prefetch, overlap and recompute change no bit, and fp32 GTP equals data parallelism",
          "[gpu][nccl]") {
  if (!gpus_visible(2)) return;
  const auto folder = test::scratch_folder("nccl_equal");
  // Biases, tied embeddings, three micro-batches, and rows that need padding (104 and 200 are no multiples of 32).
  const std::string base =
      "--mock-data --tokenizer-type NullTokenizer --vocab-size 512 --num-layers 4 --hidden-size 104 --ffn-hidden-size "
      "200 --num-attention-heads 4 "
      "--kv-channels 32 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 12 "
      "--train-iters 200 --eval-iters 0 "
      "--lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 10 --lr-decay-style cosine --weight-decay 0.1 --attention-dropout 0 "
      "--hidden-dropout 0 "
      "--log-interval 100 --num-workers 0 --deterministic-mode --weight-init layout-invariant --log-params-norm ";
  const auto run = [&](const std::string& name, const std::string& more) {
    const auto metrics = folder / name;
    const auto ranks = test::run_ranks(2, test::program(base + more + " --metrics-file " + metrics.string()), {}, 180s);
    INFO(test::describe(ranks));
    for (const test::Ended& rank : ranks) REQUIRE(rank.exit_code == 0);
    const std::vector<json> steps = test::read_steps(metrics);
    REQUIRE(steps.size() == 200);
    return steps;
  };
  const auto equal = [](const std::vector<json>& a, const std::vector<json>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (a[i]["lm_loss"] != b[i]["lm_loss"] || a[i]["grad_norm"] != b[i]["grad_norm"] ||
          a[i]["params_norm"] != b[i]["params_norm"])
        return false;
    }
    return true;
  };
  const std::string shards = "--tensor-parallel-num-weight-shards 2 ";
  const auto plain = run("plain", "--bf16 " + shards);
  CHECK(equal(plain, run("on-demand", "--bf16 --no-gtp-prefetch " + shards)));
  CHECK(equal(plain, run("synchronous", "--bf16 --no-gtp-async-reduce-scatter " + shards)));
  CHECK(equal(plain, run("overlap", "--bf16 --overlap-grad-reduce " + shards)));
  CHECK(equal(
      plain, run("recompute",
                 "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 " + shards)));
  // fp32: equal up to summation order; the first steps show it before Adam amplifies anything.
  const auto sharded = run("fp32-gtp", shards);
  const auto replicated = run("fp32-dp", "--overlap-grad-reduce");
  for (std::size_t i = 0; i < 5; ++i) {
    INFO("step " << i + 1);
    CHECK(std::abs(sharded[i]["lm_loss"].get<double>() - replicated[i]["lm_loss"].get<double>()) <= 1e-5);
    CHECK(std::abs(sharded[i]["grad_norm"].get<double>() - replicated[i]["grad_norm"].get<double>()) <=
          2e-5 * replicated[i]["grad_norm"].get<double>());
  }
  CHECK(std::abs(sharded[199]["lm_loss"].get<double>() - replicated[199]["lm_loss"].get<double>()) <= 5e-2);
}

TEST_CASE("a training step as one CUDA graph gives the same bits", "[gpu][dist]") {
  if (!gpus_visible(1)) return;
  const auto folder = test::scratch_folder("graphs");
  // Dropout draws, several micro-batches whose number grows, evaluation and a save between replays, every result that
  // the host reads. The capture happens in step 3 and again when the number of micro-batches changes.
  const std::string base =
      "--mock-data --tokenizer-type NullTokenizer --vocab-size 512 --num-layers 3 --hidden-size 128 --ffn-hidden-size "
      "256 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu --position-embedding-type "
      "rope "
      "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 2 --train-samples 96 --eval-iters 2 "
      "--eval-interval 5 --lr 1e-3 --min-lr 1e-4 --lr-decay-samples 96 --lr-warmup-samples 8 --weight-decay 0.1 --bf16 "
      "--num-workers 0 --log-interval 1 --log-params-norm --log-num-zeros-in-grad --deterministic-mode "
      "--cuda-graph-warmup-steps 2 ";
  struct Case {
    std::string name, flags;
    int gpus;
  };
  const std::vector<Case> cases{
      {"one", "--attention-dropout 0 --hidden-dropout 0.1 --rampup-batch-size 4 4 40 --global-batch-size 12", 1},
      {"all-dropouts", "--attention-dropout 0.1 --hidden-dropout 0.1 --global-batch-size 4", 1},
      {"per-token",
       "--attention-dropout 0 --hidden-dropout 0 --calculate-per-token-loss --recompute-granularity full "
       "--recompute-method uniform --recompute-num-layers 1 --global-batch-size 8",
       1},
      {"gtp", "--attention-dropout 0 --hidden-dropout 0.1 --global-batch-size 12 --tensor-parallel-num-weight-shards 2",
       2},
      {"gtp-kept",
       "--attention-dropout 0 --hidden-dropout 0.1 --global-batch-size 12 --tensor-parallel-num-weight-shards 2 "
       "--gtp-keep-gathered-layers 2",
       2},
      {"dp", "--attention-dropout 0 --hidden-dropout 0 --overlap-grad-reduce --global-batch-size 12", 2},
  };
  for (const Case& c : cases) {
    if (!gpus_visible(c.gpus)) continue;
    INFO(c.name << ": " << c.flags);
    std::vector<std::vector<json>> runs;
    std::vector<std::string> lines;
    for (const std::string graph : {"none", "full_iteration"}) {
      const auto name = c.name + "-" + graph;
      const auto ranks = test::run_ranks(
          c.gpus,
          test::program(base + c.flags + " --save " + (folder / name).string() + " --save-interval 6" +
                        " --cuda-graph-impl " + graph + " --metrics-file " + (folder / (name + ".jsonl")).string()),
          {}, 120s);
      INFO(test::describe(ranks));
      for (const test::Ended& rank : ranks) REQUIRE(rank.exit_code == 0);
      runs.push_back(test::read_steps(folder / (name + ".jsonl")));
    }
    REQUIRE(runs[0].size() >= 8);
    check_same_steps(runs[0], runs[1],
                     {"lm_loss", "grad_norm", "params_norm", "num_zeros", "learning_rate_applied",
                      "learning_rate_printed", "consumed_samples"});
  }
}

TEST_CASE("documents kept apart inside samples train on the GPU as on the CPU, and repeat their bits", "[gpu][dist]") {
  if (!gpus_visible(1)) return;
  const auto folder = test::scratch_folder("gpu_documents");
  {
    data::IndexedDatasetWriter writer((folder / "corpus").string(), data::TokenType::kUint16);
    std::int64_t token = 1;
    for (std::int64_t length = 1; length < 40; ++length) {
      std::vector<std::int64_t> document;
      for (std::int64_t i = 0; i + 1 < length * 7 % 40; ++i) document.push_back(token = token * 5 % 127);
      document.push_back(127);
      writer.add_sequence(document);
      writer.end_document();
    }
    writer.finish();
  }
  std::string base =
      std::string(test::kSeedFlags) + " --tensor-parallel-num-weight-shards 1 --null-tokenizer-eod-id 127";
  base.replace(base.find("--mock-data"), 11, "--no-mmap-bin-files --data-path " + (folder / "corpus").string());
  int runs = 0;
  const auto run = [&](const std::string& more, const test::Environment& environment, const std::string& attention) {
    const auto metrics = folder / std::to_string(runs++);
    const auto ranks =
        test::run_ranks(1, test::program(base + " " + more + " --metrics-file " + metrics.string()), environment, 120s);
    INFO(test::describe(ranks));
    REQUIRE(ranks[0].exit_code == 0);
    CHECK(contains(ranks[0].output, attention));
    const std::vector<json> steps = test::read_steps(metrics);
    REQUIRE(steps.size() == 3);
    return steps;
  };
  // The spread of correct implementations of this model (docs/seed-comparison.md).
  const auto check_close = [](const std::vector<json>& a, const std::vector<json>& b) {
    for (std::size_t i = 0; i < 3; ++i) {
      INFO("step " << i + 1 << ": " << a[i].dump() << " and " << b[i].dump());
      CHECK(std::abs(a[i]["lm_loss"].get<double>() - b[i]["lm_loss"].get<double>()) <= (i < 2 ? 1e-4 : 6e-4));
    }
  };
  for (const std::string apart : {"--reset-attention-mask ", "--dataloader-inter-document-masking "}) {
    INFO(apart);
    const auto on_cpu = run(apart, {{"CUDA_VISIBLE_DEVICES", ""}}, "composite (fused form), segments");
    check_close(run(apart, {}, ", segments"), on_cpu);
    check_close(run(apart + "--kernels reference", {}, ", segments"), on_cpu);
    const std::string flash = "flash (libtorch, CUDA), segments";
    const auto first = run(apart + "--deterministic-mode", {}, flash);
    check_close(first, on_cpu);
    check_same_steps(first, run(apart + "--deterministic-mode", {}, flash), {"lm_loss", "grad_norm"});
    const std::string again =
        "--deterministic-mode --recompute-granularity selective --recompute-modules core_attn layernorm mlp";
    check_same_steps(first, run(apart + again, {}, flash), {"lm_loss", "grad_norm"});
  }
}

TEST_CASE("on a GPU that runs ahead a NaN still stops before any weight changes, and names a parameter",
          "[gpu][dist]") {
  if (!gpus_visible(1)) return;
  const std::string flags = std::string(test::kSeedFlags) +
                            " --tensor-parallel-num-weight-shards 1 --lr 1e38 --min-lr 1e38 --lr-warmup-iters 0 "
                            "--train-iters 20 --lr-decay-iters 20 ";
  for (const std::string more : {"", "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 1"}) {
    const auto ranks = test::run_ranks(1, test::program(flags + more), {}, 60s);
    INFO(test::describe(ranks));
    CHECK(ranks[0].exit_code == 5);
    CHECK(contains(ranks[0].output, "no weights were changed"));
  }
}

TEST_CASE("GTP on two GPUs gives the same bits by copy engine as by NCCL, and the same sums in two products",
          "[gpu][nccl][dist]") {
  if (!gpus_visible(2)) return;
  const auto folder = test::scratch_folder("copy_engine");
  // Three micro-batches, so that gradients are replaced once and added to twice, and rows that need padding.
  const std::string base =
      "--mock-data --tokenizer-type NullTokenizer --vocab-size 512 --num-layers 4 --hidden-size 104 --ffn-hidden-size "
      "200 --num-attention-heads 4 --kv-channels 32 --seq-length 128 --max-position-embeddings 128 "
      "--micro-batch-size 2 --global-batch-size 12 --train-iters 10 --eval-iters 0 --lr 1e-3 --lr-warmup-iters 2 "
      "--weight-decay 0.1 --attention-dropout 0 --hidden-dropout 0 --num-workers 0 --deterministic-mode "
      "--log-params-norm --tensor-parallel-num-weight-shards 2 ";
  for (const std::string more : {"--bf16 ", "--bf16 --grad-reduce-in-bf16 ", ""}) {
    INFO(more);
    std::vector<std::vector<json>> runs;
    const std::string nccl = "--gtp-transport nccl ", copies = "--gtp-transport copy-engine ";
    const std::string split = "--gtp-weight-gradients split ";
    for (const std::string& transport :
         {nccl, copies, copies + "--gtp-keep-gathered-layers 3 ", copies + split, nccl + split}) {
      const auto metrics = folder / std::to_string(runs.size() + 5 * more.size());
      const auto ranks =
          test::run_ranks(2, test::program(base + more + transport + "--metrics-file " + metrics.string()), {}, 120s);
      INFO(test::describe(ranks));
      for (const test::Ended& rank : ranks) REQUIRE(rank.exit_code == 0);
      runs.push_back(test::read_steps(metrics));
      REQUIRE(runs.back().size() == 10);
    }
    const std::vector<std::string> values = {"lm_loss", "grad_norm", "params_norm"};
    check_same_steps(runs[0], runs[1], values);
    check_same_steps(runs[0], runs[2], values);
    check_same_steps(runs[3], runs[4], values);
    // Products of fewer rows may add up in another order: no difference before the first update, afterwards at most
    // that of other correct kernels (docs/seed-comparison.md).
    for (std::size_t i = 0; i < 10; ++i) {
      INFO("step " << i + 1);
      const auto away = [&](const std::string& value) {
        return std::abs(runs[3][i].at(value).get<double>() - runs[0][i].at(value).get<double>());
      };
      CHECK(away("lm_loss") <= (i == 0 ? 0.0 : 6e-4));
      CHECK(away("grad_norm") <= 3e-3 * runs[0][i].at("grad_norm").get<double>());
      CHECK(away("params_norm") <= 1e-5 * runs[0][i].at("params_norm").get<double>());
    }
  }
}

TEST_CASE("matrix product algorithms chosen by one run are those of the next, on every rank", "[gpu][dist]") {
  if (!gpus_visible(1)) return;
  const auto folder = test::scratch_folder("gpu_algorithms");
  const std::string file = (folder / "algorithms.json").string();
  const auto read_file = [&] {
    std::ifstream stream(file);
    return std::string(std::istreambuf_iterator<char>(stream), {});
  };
  const auto run = [&](const std::string& name, const std::string& more) {
    const auto ranks = test::run_ranks(
        2,
        test::program(std::string(test::kSeedFlags) + " --distributed-backend gloo --eval-iters 1 --gemm-algorithms " +
                      file + " --metrics-file " + (folder / name).string() + more),
        {}, 120s);
    INFO(test::describe(ranks));
    for (const test::Ended& rank : ranks) REQUIRE(rank.exit_code == 0);
    return ranks[0].output;
  };
  CHECK(contains(run("first", ""), "> matrix products: cuBLASLt, 0 algorithms from " + file));
  const std::string chosen = read_file();
  const json object = json::parse(chosen);
  // Forward, input gradient and weight gradient of four sizes: proj and output have the same.
  CHECK(object["products"].size() >= 12);
  test::check_published(test::read_steps(folder / "first"), {5e-5, 6e-4});
  CHECK(contains(run("second", ""),
                 "cuBLASLt, " + std::to_string(object["products"].size()) + " algorithms from " + file));
  CHECK(read_file() == chosen);
  const auto first = test::read_steps(folder / "first"), second = test::read_steps(folder / "second");
  REQUIRE(first.size() == 3);
  check_same_steps(first, second, {"lm_loss", "grad_norm"});
  // Another library's file stops every rank, and one of them says why.
  const std::string version = "\"cublaslt_version\": ";
  std::ofstream(file) << std::string(chosen).replace(chosen.find(version), version.size(), version + "9");
  const auto refused = test::run_ranks(
      2, test::program(std::string(test::kSeedFlags) + " --distributed-backend gloo --gemm-algorithms " + file), {},
      120s);
  INFO(test::describe(refused));
  for (const test::Ended& rank : refused) CHECK(rank.exit_code == 2);
  CHECK(contains(refused[0].output, "--gemm-algorithms " + file + ": it holds choices for "));
  CHECK(contains(refused[0].output, "delete it, or name another file"));
}

TEST_CASE("a killed or stopped GPU rank ends the other inside the deadline, naming group and operation",
          "[gpu][nccl]") {
  if (!gpus_visible(2)) return;
  const std::string endless =
      std::string(test::kSeedFlags) +
      " --train-iters 1000000 --lr-decay-iters 1000000 --log-interval 50 --distributed-timeout-seconds-after-init 5";
  for (const int signal : {SIGKILL, SIGSTOP}) {
    INFO("signal " << signal);
    test::Job job(2, test::program(endless), {});
    REQUIRE(job.rank(1).wait_for_output("iteration      100/", 90s));
    job.rank(1).signal(signal);
    const test::Ended first = job.rank(0).wait(40s);
    INFO(job.tails());
    CHECK(first.exit_code == 3);
    CHECK_FALSE(first.timed_out);
    CHECK(contains(first.output, "rank 1"));
    if (signal == SIGSTOP) {
      CHECK(contains(first.output, "group"));
      job.rank(1).signal(SIGCONT);
      (void)job.rank(1).wait(40s);
    }
  }
}

TEST_CASE("a GPU run resumes from its checkpoint bit for bit", "[gpu][dist]") {
  if (!gpus_visible(1)) return;
  const auto folder = test::scratch_folder("gpu_resume");
  const std::string base =
      std::string(test::kSeedFlags) + " --tensor-parallel-num-weight-shards 1 --train-iters 8 --lr-decay-iters 8 ";
  const auto run = [&](const std::string& name, const std::string& more) {
    const auto ranks =
        test::run_ranks(1, test::program(base + more + " --metrics-file " + (folder / name).string()), {}, 120s);
    INFO(test::describe(ranks));
    REQUIRE(ranks[0].exit_code == 0);
    return test::read_steps(folder / name);
  };
  const std::string save = " --save " + (folder / "ckpt").string() + " --save-interval 4";
  const auto whole = run("whole", "");
  auto resumed = run("first", save + " --exit-interval 4");
  REQUIRE(resumed.size() == 4);
  const auto second = run("second", " --load " + (folder / "ckpt").string());
  resumed.insert(resumed.end(), second.begin(), second.end());
  REQUIRE(whole.size() == 8);
  check_same_steps(whole, resumed, {"lm_loss", "grad_norm"});
}

TEST_CASE("on two GPUs that run ahead a signal to one rank saves the last step of both", "[gpu][nccl][dist]") {
  if (!gpus_visible(2)) return;
  const std::string base = std::string(test::kSeedFlags) +
                           " --train-iters 1000000 --lr-decay-iters 1000000 --deterministic-mode --save-interval "
                           "100000000 ";
  const std::string graph = "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 2 ";
  const std::string background = "--async-save --use-persistent-ckpt-worker ";
  const auto number_after = [](const std::string& text, const std::string& words) {
    const std::size_t at = text.rfind(words);
    return at == std::string::npos ? -1 : std::stoll(text.substr(at + words.size()));
  };
  for (const std::string& more : {std::string(), background, graph}) {
    INFO(more);
    const auto folder = test::scratch_folder("gpu_signal");
    const std::string save = " --save " + (folder / "s").string();
    test::Job job(2, test::program(base + more + "--exit-signal-handler --exit-duration-in-mins 1000" + save), {});
    REQUIRE(job.rank(1).wait_for_output("iteration       20/", 120s));
    job.rank(1).signal(SIGUSR1);
    REQUIRE(job.rank(0).wait_for_output("successfully saved checkpoint", 60s));
    CHECK(job.rank(0).running());
    job.rank(0).signal(SIGTERM);
    const auto ended = job.wait(60s);
    INFO(test::describe(ended));
    for (const test::Ended& rank : ended) CHECK(rank.exit_code == 0);
    CHECK(contains(ended[0].output, "[exiting program after receiving SIGTERM.] datetime: "));
    const auto last = number_after(ended[1].output, "] iteration ");
    CHECK(number_after(ended[0].output, "successfully saved checkpoint from iteration ") == last);

    // Each run saves where it stops; what the resumed one computes is what the whole one does.
    const std::string stop = " --exit-interval " + std::to_string(last + 3) + " --metrics-file ";
    std::vector<std::vector<json>> runs;
    for (const std::string& run : {stop + (folder / "whole").string(),
                                   stop + (folder / "resumed").string() + " --load " + (folder / "s").string()}) {
      const auto ranks = test::run_ranks(2, test::program(base + more + run), {}, 120s);
      INFO(test::describe(ranks));
      for (const test::Ended& rank : ranks) REQUIRE(rank.exit_code == 0);
      runs.push_back(test::read_steps(folder / (runs.empty() ? "whole" : "resumed")));
    }
    REQUIRE(runs[1].size() == 3);
    runs[0].erase(runs[0].begin(), runs[0].end() - 3);
    check_same_steps(runs[0], runs[1], {"iteration", "lm_loss", "grad_norm", "consumed_samples"});
  }
}

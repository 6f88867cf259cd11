// What a validated command still needs of this program and of the machine it runs on.
#include "support/catch.h"
#include "test_config_support.h"

using namespace pgpt::config;
using namespace test_config;

TEST_CASE("what cannot run yet is refused after validation, and dry runs go on", "[cpu][config]") {
  const std::vector<Rule> rules = {
      {"--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 is not available yet", 2},
      {"--pipeline-model-parallel-size 2 --global-batch-size 4",
       "--pipeline-model-parallel-size 2 is not available yet", 2},
      {"--context-parallel-size 2", "--context-parallel-size 2 is not available yet", 2},
      {"--num-experts 2", "--num-experts 2 is not available yet", 1},
      {"--expert-tensor-parallel-num-weight-shards 2", "expert parallelism", 2},
      {"--mtp-num-layers 1 --position-embedding-type rope", "--mtp-num-layers 1 is not available yet", 1},
      {"--use-distributed-optimizer", "--use-distributed-optimizer with data parallel size 2 is not available yet", 2},
      {"--use-mp-args-from-checkpoint-args", "--use-mp-args-from-checkpoint-args is not available yet", 1},
      {"--logits-chunks 2 --evidence-dir D", "never exist as a whole; remove one of the two", 1},
      {"--fp16 --cuda-graph-impl full_iteration", "decide about overflows on the host: use --bf16", 1},
      {"--bf16 --loss-scale 4 --cuda-graph-impl full_iteration", "decide about overflows on the host: use --bf16", 1},
      {"--cuda-graph-impl local --cuda-graph-scope full_iteration --timing-log-level 1", "--timing-log-level 1", 1},
      {"--cuda-graph-impl full_iteration --reset-attention-mask",
       "--reset-attention-mask gives every micro-batch another number of documents", 1},
      {"--cuda-graph-impl full_iteration --dataloader-inter-document-masking",
       "--dataloader-inter-document-masking gives every micro-batch another number of documents", 1},
      {"--cuda-graph-impl full_iteration --evidence-dir D", "remove --evidence-dir D or the graph", 1},
  };
  for (const Rule& rule : rules) {
    INFO(rule.flags);
    CHECK(contains(error_of(kTiny + rule.flags, rule.world), rule.message));
    CHECK(error_of(kTiny + rule.flags + " --dry-run", rule.world) == "");
  }
  const std::string files =
      "--tokenizer-type NullTokenizer --vocab-size 128 --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
      "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3 --split 1,1,1 ";
  CHECK(contains(error_of(files + "--data-path 1 P 2 Q"), "--data-path with 4 words"));
  CHECK(error_of(files + "--data-path P") == "");
  CHECK(error_of(kTiny + "--use-distributed-optimizer") == "");
  CHECK(error_of(kTiny + "--dataloader-inter-document-masking") == "");
  CHECK(error_of(kTiny + "--save D --save-interval 5 --load D --pretrained-checkpoint E") == "");
  CHECK(error_of(kTiny + "--use-distributed-optimizer --tensor-parallel-num-weight-shards 2", 2) == "");
}

TEST_CASE("the backend is chosen and checked against the machine", "[cpu][config]") {
  const auto with = [](const std::string& flags, bool cuda, int gpus, std::int64_t local) {
    ParseContext context;
    context.world_size = local;
    context.machine = {cuda, gpus, local};
    return parse_command_line(split_words(kTiny + flags), context).config;
  };
  const auto error = [&](const std::string& flags, bool cuda, int gpus, std::int64_t local) -> std::string {
    try {
      (void)with(flags, cuda, gpus, local);
    } catch (const pgpt::ConfigError& e) {
      return e.what();
    }
    return "";
  };
  CHECK(with("", false, 0, 2).parallel.backend == Backend::kGloo);
  CHECK(with("", true, 0, 2).parallel.backend == Backend::kGloo);
  CHECK(with("", true, 2, 2).parallel.backend == Backend::kNccl);
  CHECK(with("--distributed-backend gloo", true, 2, 2).parallel.backend == Backend::kGloo);
  CHECK(contains(error("--distributed-backend nccl", false, 0, 1),
                 "built without CUDA; use --distributed-backend gloo, or build again with -DPGPT_CUDA=ON"));
  CHECK(contains(error("--distributed-backend nccl", true, 0, 1),
                 "--distributed-backend nccl needs a GPU, but none is visible"));
  CHECK(contains(error("", true, 1, 2), "2 local ranks see 1; start fewer ranks, or use --distributed-backend gloo"));
  CHECK(contains(with("--distributed-backend gloo", true, 1, 2).notices.back(), "2 local ranks share 1 GPU(s)"));
  CHECK(
      contains(format_arguments(with("", false, 0, 1)), "  distributed_backend ............................. gloo\n"));
  const std::string copies = "--gtp-transport copy-engine ";
  const std::string shards = "--tensor-parallel-num-weight-shards 2 ";
  CHECK(with(copies + shards, true, 2, 2).parallel.gtp_transport == GtpTransport::kCopyEngine);
  CHECK(with(shards, true, 2, 2).parallel.gtp_transport == GtpTransport::kAutomatic);
  CHECK(with(shards, false, 0, 2).parallel.gtp_transport == GtpTransport::kAutomatic);
  CHECK(with(shards + "--gtp-transport nccl", true, 2, 2).parallel.gtp_transport == GtpTransport::kNccl);
  CHECK(contains(error(copies + shards, false, 0, 2), "--gtp-transport copy-engine needs --distributed-backend nccl"));
  CHECK(contains(error(copies + shards + "--distributed-backend gloo", true, 2, 2), "use --gtp-transport nccl"));
  CHECK(error(copies, false, 0, 2) == "");  // without GTP there is nothing to move
  CHECK(error(copies + shards + "--dry-run", false, 0, 2) == "");
  CHECK(contains(error(copies + shards + "--cuda-graph-impl full_iteration", true, 2, 2),
                 "--gtp-transport copy-engine cannot be part of a CUDA graph"));
  const std::string graph = "--cuda-graph-impl full_iteration ";
  CHECK(with(graph, true, 2, 2).training.cuda_graph);
  CHECK(with("--cuda-graph-impl local --cuda-graph-scope full_iteration", true, 1, 1).training.cuda_graph);
  CHECK(contains(error(graph, true, 0, 1), "--cuda-graph-impl full_iteration needs a GPU"));
  CHECK(contains(error(graph + "--distributed-backend gloo", true, 2, 2), "needs --distributed-backend nccl"));
  CHECK(contains(error(graph + "--cuda-graph-warmup-steps 0", true, 1, 1), "give 1 or more"));
  // A dry run looks at no device, so the backend may be missing here.
  CHECK(error("--distributed-backend nccl --dry-run", false, 0, 1) == "");
}

// Options that are accepted and say that they have no effect; those at their default or in use say nothing.
#include <algorithm>

#include "support/catch.h"
#include "test_config_support.h"

using namespace pgpt::config;
using namespace test_config;

TEST_CASE("options that need another one warn without it, unless they are at their default", "[cpu][config]") {
  struct Case {
    std::string flags, usual, needed;  ///< the option; the same without effect to tell; what it needs
  };
  const Case cases[] = {
      {"--num-query-groups 2", "--num-query-groups 1", "--group-query-attention"},
      {"--num-query-groups 2", "--num-query-groups 4", "--group-query-attention"},
      {"--rotary-base 500000", "--rotary-base 10000", "--position-embedding-type rope"},
      {"--rotary-percent 0.5", "--rotary-percent 1", "--position-embedding-type rope"},
      {"--rotary-interleaved", "", "--position-embedding-type rope"},
      {"--rotary-seq-len-interpolation-factor 2", "", "--position-embedding-type rope"},
      {"--use-rope-scaling", "", "--position-embedding-type rope"},
      {"--lr-wsd-decay-iters 2", "", "--lr-decay-style WSD"},
      {"--sgd-momentum 0.5", "--sgd-momentum 0.9", "--optimizer sgd"},
      {"--apply-wd-to-qk-layernorm", "", "--qk-layernorm"},
      {"--initial-loss-scale 1024.0", "--initial-loss-scale 4294967296", "--fp16"},
      {"--min-loss-scale 2.0", "--min-loss-scale 1", "--fp16"},
      {"--loss-scale-window 8.0", "--loss-scale-window 1000", "--fp16"},
      {"--hysteresis 3", "--hysteresis 2", "--fp16"},
      {"--no-data-sharding", "", "--dataloader-type cyclic"},
      {"--exit-signal SIGUSR1", "--exit-signal SIGTERM", "--exit-signal-handler"},
      {"--ddp-bucket-size 100", "", "--overlap-grad-reduce"},
      {"--ddp-num-buckets 2", "", "--overlap-grad-reduce"},
  };
  for (const Case& c : cases) {
    INFO(c.flags);
    const std::string warning = "WARNING: " + c.flags + " has no effect without " + c.needed;
    const auto warnings = [](const Config& config) {
      std::vector<std::string> found;
      for (const std::string& notice : config.notices) {
        if (contains(notice, "has no effect")) found.push_back(notice);
      }
      return found;
    };
    CHECK(warnings(config_of(kTiny + c.flags)) == std::vector<std::string>{warning});
    CHECK(warnings(config_of(kTiny + c.usual)).empty());
    CHECK(warnings(config_of(kTiny + c.flags + " " + c.needed)).empty());
  }
  const auto tells = [](const std::string& command, const std::string& warning) {
    const Config config = config_of(command);
    return std::count(config.notices.begin(), config.notices.end(), "WARNING: " + warning) == 1;
  };
  for (const std::string option : {"--adam-beta1 0.5", "--adam-beta2 0.5", "--adam-eps 0.5"}) {
    CHECK(tells(kTiny + "--optimizer sgd " + option, option + " has no effect without --optimizer adam"));
    CHECK_FALSE(tells(kTiny + option, option + " has no effect without --optimizer adam"));
  }
  CHECK(tells(kTiny + "--lr-wsd-decay-style cosine",
              "--lr-wsd-decay-style cosine has no effect without --lr-decay-style WSD"));
  CHECK(tells(kTiny + "--fp16 --loss-scale 64 --hysteresis 3",
              "--hysteresis 3 has no effect without dynamic loss scaling (remove --loss-scale)"));
  // The option, what it needs in words, and a command in which it counts.
  const std::string ramp = " --weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2";
  const std::string constant = " --lr-decay-style constant", decay = "a decay (--lr-decay-style linear, for example)";
  const std::string load = " --load D", save = " --save D --save-interval 5";
  const std::string experts = " --num-experts 4", half = "--bf16 or --fp16";
  const std::string xavier = " --init-method-xavier-uniform";
  struct Needs {
    std::string option, idle, needed, counts;  ///< `idle` and `counts` are added to the command
  };
  const Needs needs[] = {
      {"--weight-decay 0.5", ramp, "--weight-decay-incr-style constant", ""},
      {"--min-lr 0.0001", constant, decay, ""},
      {"--lr-decay-iters 5", constant, decay, ""},
      {"--lr-decay-iters 5", constant, decay, constant + " --lr-warmup-fraction 0.5"},
      {"--init-method-std 0.01", xavier, "normal initial weights (remove --init-method-xavier-uniform)", ""},
      {"--init-method-std 0.01", xavier, "normal initial weights (remove --init-method-xavier-uniform)",
       xavier + " --embedding-init-method-std 0.02"},
      {"--grad-reduce-in-bf16", "", half, " --bf16"},
      {"--accumulate-allreduce-grads-in-fp32", " --bf16 --grad-reduce-in-bf16",
       "float32 gradients (remove --grad-reduce-in-bf16)", " --bf16"},
      {"--reset-position-ids", " --position-embedding-type rope", "--position-embedding-type learned_absolute", ""},
      {"--reset-position-ids", " --position-embedding-type none", "--position-embedding-type learned_absolute", ""},
      {"--moe-router-topk 1", "", "--num-experts", experts},
      {"--moe-grouped-gemm", "", "--num-experts", experts},
      {"--moe-router-dtype fp32", "", "--num-experts", experts},
      {"--mtp-loss-scaling-factor 0.2", "", "--mtp-num-layers", " --mtp-num-layers 1 --position-embedding-type rope"},
      {"--non-persistent-global-ckpt-dir D", "", "--non-persistent-ckpt-type global",
       " --non-persistent-ckpt-type global"},
      {"--async-save", " --use-persistent-ckpt-worker", "--save", " --use-persistent-ckpt-worker" + save},
      {"--moe-token-dispatcher-type alltoall", "", "--num-experts", experts},
      {"--ckpt-step 5", "", "--load", load},
      {"--override-ckpt-iteration 5", "", "--load", load},
      {"--exit-on-missing-checkpoint", "", "--load", load},
      {"--finetune", "", "--load", load},
      {"--no-load-rng", "", "--load", load},
      {"--no-load-optim", "", "--load", " --pretrained-checkpoint D"},
      {"--save-interval 5", "", "--save", " --save D"},
      {"--no-save-optim", "", "--save", save},
      {"--no-save-rng", "", "--save",
       " --non-persistent-ckpt-type global --non-persistent-save-interval 5 --non-persistent-global-ckpt-dir D"},
  };
  for (const Needs& c : needs) {
    INFO(c.option << c.idle << " |" << c.counts);
    const std::string warning = c.option + " has no effect without " + c.needed;
    CHECK(tells(kTiny + c.option + c.idle, warning));
    CHECK_FALSE(tells(kTiny + c.option + c.counts, warning));
  }
  // What dense Megatron-LM command lines carry anyway says nothing.
  const Config usual = config_of(
      kTiny +
      "--eval-interval 100 --eval-iters 0 --iterations-to-skip 100 --no-masked-softmax-fusion "
      "--attention-softmax-in-fp32 --no-bias-swiglu-fusion --no-rope-fusion --accumulate-allreduce-grads-in-fp32 "
      "--log-timers-to-tensorboard --data-cache-path D --override-opt-param-scheduler");
  for (const std::string& notice : usual.notices) CHECK_FALSE(notice.starts_with("WARNING"));
  const std::string warmup =
      "--lr-warmup-init 0.0001 has no effect without a warmup (--lr-warmup-iters, -samples or -fraction)";
  CHECK(tells(kTiny + "--lr-warmup-init 0.0001", warmup));
  CHECK_FALSE(tells(kTiny + "--lr-warmup-init 0.0001 --lr-warmup-iters 1", warmup));
  CHECK_FALSE(tells(kTiny + "--lr-warmup-init 0.0001 --lr-warmup-fraction 0.1", warmup));
  const Config samples = config_of(kTinyModel + "--train-samples 8 --lr 1e-3 --lr-wsd-decay-samples 4");
  CHECK(std::count(samples.notices.begin(), samples.notices.end(),
                   "WARNING: --lr-wsd-decay-samples 4 has no effect without --lr-decay-style WSD") == 1);
}

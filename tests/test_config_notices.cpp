// Options that are accepted and say that they have no effect.
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
  const std::string warmup =
      "--lr-warmup-init 0.0001 has no effect without a warmup (--lr-warmup-iters, -samples or -fraction)";
  CHECK(tells(kTiny + "--lr-warmup-init 0.0001", warmup));
  CHECK_FALSE(tells(kTiny + "--lr-warmup-init 0.0001 --lr-warmup-iters 1", warmup));
  CHECK_FALSE(tells(kTiny + "--lr-warmup-init 0.0001 --lr-warmup-fraction 0.1", warmup));
  // Mock data have a split of their own, as in the reference.
  CHECK(tells(kTiny + "--split 98,1,1", "--split 98,1,1 has no effect without --data-path"));
  const Config samples = config_of(kTinyModel + "--train-samples 8 --lr 1e-3 --lr-wsd-decay-samples 4");
  CHECK(std::count(samples.notices.begin(), samples.notices.end(),
                   "WARNING: --lr-wsd-decay-samples 4 has no effect without --lr-decay-style WSD") == 1);
}

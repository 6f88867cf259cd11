// Every rule across options has a case here: the command, and what its one line of explanation must say.

#include "support/catch.h"
#include "test_config_support.h"

using namespace pgpt::config;
using namespace test_config;

namespace {

void check_all(const std::string& base, const std::vector<Rule>& rules) {
  for (const Rule& rule : rules) {
    const std::string text = error_of(base + rule.flags + " --dry-run", rule.world);
    INFO(rule.flags << "\n" << text);
    CHECK(contains(text, rule.message));
    // One line for the reader.
    CHECK_FALSE(contains(text, "\n"));
  }
}

}  // namespace

TEST_CASE("parallel sizes that do not fit name all factors and values", "[cpu][config]") {
  check_all(
      kTiny + "--global-batch-size 64 ",
      {
          {"--tensor-model-parallel-size 4 --tensor-parallel-num-weight-shards 2",
           "--tensor-parallel-num-weight-shards 2 is below --tensor-model-parallel-size 4", 4},
          {"--tensor-model-parallel-size 2 --tensor-parallel-num-weight-shards 3",
           "--tensor-parallel-num-weight-shards 3 is not a multiple of --tensor-model-parallel-size 2", 4},
          {"--expert-tensor-parallel-size 2 --expert-tensor-parallel-num-weight-shards 3 --tensor-model-parallel-size "
           "2",
           "--expert-tensor-parallel-num-weight-shards 3 is not a multiple of --expert-tensor-parallel-size 2", 4},
          {"--expert-tensor-parallel-num-weight-shards 1 --tensor-model-parallel-size 2",
           "--expert-tensor-parallel-num-weight-shards 1 is below --tensor-model-parallel-size 2", 4},
          {"--tensor-parallel-num-weight-shards 2",
           "world size 3 is not divisible by tensor 1 x pipeline 1 x context 1 x GTP 2", 3},
          {"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --tensor-parallel-num-weight-shards 4",
           "world size 12 is not divisible by tensor 2 x pipeline 2 x context 1 x GTP 2", 12},
          {"--num-experts 4 --expert-model-parallel-size 4",
           "world size 2 is not divisible by expert tensor 1 x expert 4", 2},
          {"--tensor-model-parallel-size 0", "--tensor-model-parallel-size is 0; it must be above 0"},
          {"--tensor-parallel-num-weight-shards 0", "--tensor-parallel-num-weight-shards 0 is below"},
          {"--context-parallel-size -2", "--context-parallel-size is -2"},
          {"--context-parallel-size 2 --hierarchical-context-parallel-sizes 2 2",
           "multiply to 4, but --context-parallel-size is 2", 2},
          {"--cp-comm-type a2a+p2p", "needs --hierarchical-context-parallel-sizes"},
          {"--ddp-bucket-size 100 --ddp-num-buckets 2", "--ddp-bucket-size and --ddp-num-buckets exclude each other"},
          {"--ddp-average-in-collective --calculate-per-token-loss",
           "--ddp-average-in-collective cannot be combined with --calculate-per-token-loss"},
          {"--tp-comm-overlap", "--tp-comm-overlap needs --sequence-parallel"},
          {"--distributed-timeout-minutes 0", "--distributed-timeout-minutes is 0"},
          {"--local-rank 1", "--local-rank 1 contradicts LOCAL_RANK 0"},
          {"--world-size 0", "--world-size is 0"},
          {"--sequence-parallel --tensor-model-parallel-size 4 --seq-length 30",
           "--seq-length 30 is not divisible by --tensor-model-parallel-size 4", 4},
      });
  CHECK(contains(error_of(kTiny + "--world-size 2"),
                 "--world-size 2 contradicts the 1 rank(s) of the launch environment"));
}

TEST_CASE("GTP refuses what would give wrong gradients or files", "[cpu][config]") {
  const std::string gtp = "GTP (--tensor-parallel-num-weight-shards 2)";
  check_all(
      kTiny + "--tensor-parallel-num-weight-shards 2 ",
      {
          {"--ddp-average-in-collective", "--ddp-average-in-collective cannot be combined with " + gtp, 2},
          {"--use-decentralized-pg", "--use-decentralized-pg cannot be combined with " + gtp, 2},
          {"--data-parallel-random-init", "--data-parallel-random-init cannot be combined with " + gtp, 2},
          {"--dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient",
           "cannot be combined with " + gtp, 2},
          {"--ckpt-format torch_dcp", "--ckpt-format torch_dcp is not supported", 2},
          {"--ckpt-format fsdp_dtensor", "--ckpt-format fsdp_dtensor is not supported", 2},
          {"--num-distributed-optimizer-instances 2", "--num-distributed-optimizer-instances 2 is not supported", 2},
          {"--gtp-remat-opt-in-modules moe_latent_proj", "--gtp-remat-opt-in-modules", 2},
      });
  check_all(kTiny + "--num-experts 4 --expert-tensor-parallel-num-weight-shards 2 --ddp-average-in-collective ",
            {{"", "expert GTP (--expert-tensor-parallel-num-weight-shards 2)", 2}});
  // Accepted: what the reference cannot do, and everything above without GTP.
  CHECK(error_of(kTiny + "--tensor-parallel-num-weight-shards 2 --use-cpu-initialization", 2) == "");
  CHECK(error_of(kTiny + "--ddp-average-in-collective --data-parallel-random-init", 2) == "");
}

TEST_CASE("batches and lengths are checked", "[cpu][config]") {
  check_all(
      kTiny,
      {
          {"--micro-batch-size 0", "--micro-batch-size is 0"},
          {"--global-batch-size 3", "--global-batch-size 3 is not divisible by --micro-batch-size 2"},
          {"--global-batch-size 0", "--global-batch-size is 0"},
          {"--eval-micro-batch-size 3", "--eval-global-batch-size 2 is not divisible by --eval-micro-batch-size 3"},
          {"--eval-interval 0", "--eval-interval is 0"},
          {"--eval-iters -1", "--eval-iters is -1"},
          {"--train-samples 5", "--train-iters and --train-samples exclude each other"},
          {"--train-iters -1", "--train-iters is -1"},
          {"--lr-decay-samples 5", "--lr-decay-samples cannot be combined with --train-iters"},
          {"--lr-warmup-samples 5", "--lr-warmup-samples cannot be combined with --train-iters"},
          {"--lr-wsd-decay-samples 5", "--lr-wsd-decay-samples cannot be combined with --train-iters"},
          {"--lr-warmup-fraction 0.1 --lr-warmup-iters 2",
           "--lr-warmup-fraction and --lr-warmup-iters exclude each other"},
          {"--lr-warmup-fraction 1", "--lr-warmup-fraction 1 must be in [0, 1)"},
          {"--lr-warmup-iters 10", "is not below the decay length"},
          {"--lr-warmup-iters -1", "--lr-warmup-iters is -1"},
          {"--lr-decay-iters 0", "--lr-decay-iters is 0"},
          {"--lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-iters"},
          {"--lr-decay-style WSD --lr-wsd-decay-iters 11", "is longer than the decay length"},
          {"--min-lr 1", "--min-lr 1 must be between 0 and --lr 0.001"},
          {"--min-lr -1", "--min-lr -1 must be between 0"},
          {"--lr-warmup-init 1", "--lr-warmup-init 1 is above --lr"},
          {"--lr-warmup-init -0.1", "--lr-warmup-init is -0.1; it must not be negative"},
          {"--adam-beta1 1", "--adam-beta1 is 1; it must be at least 0 and below 1"},
          {"--adam-beta2 -0.1", "--adam-beta2 is -0.1; it must be at least 0 and below 1"},
          {"--adam-beta2 nan", "--adam-beta2 is nan"},
          {"--adam-eps 0", "--adam-eps is 0; it must be above 0"},
          {"--sgd-momentum -1", "--sgd-momentum is -1; it must not be negative"},
          {"--iterations-to-skip 3 0", "--iterations-to-skip 0: iterations are counted from 1"},
          {"--decoupled-min-lr 1", "--decoupled-min-lr needs --decoupled-lr"},
          {"--clip-grad -1", "--clip-grad is -1"},
          {"--start-weight-decay 0.1", "need --weight-decay-incr-style linear or cosine"},
          {"--weight-decay-incr-style cosine",
           "--weight-decay-incr-style cosine needs --start-weight-decay and --end-weight-decay"},
          {"--weight-decay-incr-style cosine --start-weight-decay 1 --end-weight-decay 0",
           "weight decay goes from 1 to 0"},
          {"--weight-decay -1", "--weight-decay is -1; it must not be negative"},
          {"--lr -1", "--lr is -1; give 0 or more"},
          {"--lr inf", "--lr is inf; give 0 or more"},
          {"--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler", "exclude each other"},
          {"--bf16 --fp16", "--bf16 and --fp16 exclude each other"},
          {"--loss-scale 0", "--loss-scale is 0"},
          {"--loss-scale inf", "--loss-scale is inf; it must be above 0 and finite"},
          {"--initial-loss-scale inf", "both must be finite"},
          {"--decoupled-lr inf", "--decoupled-lr is inf; it must be finite"},
          {"--weight-decay inf", "--weight-decay is inf; it must not be negative or infinite"},
          {"--init-method-std inf", "must be finite and must not be negative, found inf"},
          {"--mtp-num-layers 1", "--mtp-num-layers 1 needs --position-embedding-type rope or none"},
          {"--loss-scale-window 0", "--loss-scale-window is 0; it must be at least 1"},
          {"--hysteresis 0", "--hysteresis is 0; it must be at least 1"},
          {"--initial-loss-scale 0.5", "must not be below --min-loss-scale"},
          {"--fp32-residual-connection", "--fp32-residual-connection needs --bf16 or --fp16"},
          {"--bf16 --output-logit-dtype fp32", "--output-logit-dtype fp32 differs from the parameter type"},
          {"--output-logit-dtype bf16", "--output-logit-dtype bf16 differs from the parameter type"},
          {"--seed 0", "--seed is 0"},
          {"--exit-interval 0", "--exit-interval is 0"},
          {"--num-workers -1", "--num-workers is -1"},
          {"--num-dataset-builder-threads 0", "--num-dataset-builder-threads is 0"},
          {"--log-interval 0", "--log-interval is 0"},
          {"--log-memory-interval 150", "--log-memory-interval 150 is not a multiple of --log-interval 100"},
          {"--save D", "--save needs --save-interval"},
          {"--save D --save-interval 10 --save-retain-interval 15",
           "--save-retain-interval 15 is not a multiple of --save-interval 10"},
          {"--log-progress", "give --save"},
          {"--evidence-content logits", "need --evidence-dir"},
          {"--wandb-project p", "--wandb-project needs --wandb-exp-name"},
          {"--wandb-project p --wandb-exp-name e", "--wandb-project needs --wandb-save-dir or --save"},
      });
  check_all(
      kTinyModel,
      {
          {"--lr 1", "give --train-iters or --train-samples"},
          {"--train-iters 3", "--lr is required"},
          {"--lr 1 --train-samples 1", "--train-samples 1 is below one global batch of 2"},
          {"--lr 1 --train-samples 0", "--train-samples is 0"},
          {"--lr 1 --train-samples 50 --lr-decay-iters 5", "--lr-decay-iters cannot be combined with --train-samples"},
          {"--lr 1 --train-samples 50 --lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-samples"},
          {"--lr 1 --train-iters 5 --step-batch-size-schedule 0:2", "--step-batch-size-schedule needs --train-samples"},
          {"--lr 1 --train-samples 50 --global-batch-size 2 --step-batch-size-schedule 0:2", "exclude each other"},
          {"--lr 1 --train-samples 50 --decrease-batch-size-if-needed --step-batch-size-schedule 0:2",
           "exclude each other"},
          {"--lr 1 --train-samples 50 --step-batch-size-schedule 0:3",
           "--step-batch-size-schedule: batch 3 is not divisible"},
          {"--lr 1 --train-samples 50 --step-batch-size-schedule 0:4,64:2", "lowers the batch from 4 to 2"},
          {"--lr 1 --train-samples 50 --step-batch-size-schedule 64:4", "its first threshold must be 0"},
      });
  CHECK(error_of(kTinyModel + "--skip-train --eval-interval 5") == "");
  CHECK(error_of(kTinyModel + "--train-iters 0 --lr 1e-3") == "");
}

TEST_CASE("model sizes are checked with their numbers", "[cpu][config]") {
  check_all(kTiny,
            {
                {"--encoder-num-layers 3", "--num-layers and --encoder-num-layers exclude each other"},
                {"--encoder-seq-length 32", "--seq-length and --encoder-seq-length exclude each other"},
                {"--num-layers 0", "--num-layers is 0"},
                {"--num-layers 9223372036854775807", "it must be at most 100000"},
                {"--hidden-size 9223372036854775807", "it must be at most 1048576"},
                {"--num-attention-heads 5", "--hidden-size 64 is not divisible by --num-attention-heads 5"},
                {"--hidden-size 8 --swiglu", "with --swiglu is 0; give --ffn-hidden-size"},
                {"--max-position-embeddings 31", "--max-position-embeddings 31 is below --seq-length 32"},
                {"--context-parallel-size 2 --seq-length 30 --global-batch-size 2",
                 "--seq-length 30 is not divisible by 2 x --context-parallel-size 2", 2},
                {"--context-parallel-size 2 --transformer-impl local --global-batch-size 2",
                 "needs --transformer-impl transformer_engine", 2},
                {"--num-attention-heads 2 --tensor-model-parallel-size 4 --global-batch-size 2",
                 "--num-attention-heads 2 is not divisible by --tensor-model-parallel-size 4", 4},
                {"--group-query-attention --num-query-groups 3",
                 "--num-attention-heads 4 is not divisible by --num-query-groups 3"},
                {"--group-query-attention --num-query-groups 0", "--num-query-groups is 0"},
                {"--hidden-size 96 --num-attention-heads 12 --group-query-attention --num-query-groups 3 "
                 "--tensor-model-parallel-size 2",
                 "--num-query-groups 3 is neither a multiple nor a divisor of --tensor-model-parallel-size 2", 2},
                {"--ffn-hidden-size 33 --tensor-model-parallel-size 2",
                 "--ffn-hidden-size 33 is not divisible by --tensor-model-parallel-size 2", 2},
                {"--swiglu --squared-relu", "exclude each other"},
                {"--swiglu --quick-geglu", "exclude each other"},
                {"--squared-relu", "--squared-relu has no fused form with bias"},
                {"--glu-linear-offset 1", "work with --quick-geglu only"},
                {"--quick-geglu --activation-func-clamp-value -1", "--activation-func-clamp-value is -1"},
                {"--no-position-embedding", "--no-position-embedding needs --position-embedding-type rope"},
                {"--position-embedding-type rope --rotary-percent 1.5", "--rotary-percent 1.5 must be above 0"},
                {"--position-embedding-type rope --rotary-percent 0.06", "rotary positions turn 0 of 16"},
                {"--position-embedding-type rope --kv-channels 15", "rotary positions turn 15 of 15"},
                {"--rotary-base 0", "--rotary-base is 0"},
                {"--hidden-dropout 1", "--hidden-dropout is 1"},
                {"--attention-dropout -0.1", "--attention-dropout is -0.1"},
                {"--norm-epsilon -1", "--norm-epsilon is -1"},
                {"--init-method-std -1", "must not be negative"},
                {"--attention-backend local", "--attention-backend local needs --transformer-impl local"},
                {"--spec local", "--spec can only be 'local', with --transformer-impl local"},
                {"--spec a b --transformer-impl local", "--spec can only be 'local'"},
                {"--cross-entropy-fusion-impl te", "--cross-entropy-fusion-impl te is not supported: use native"},
                {"--vocab-size 0", "--vocab-size is 0"},
                {"--padded-vocab-size 100", "--padded-vocab-size 100 is below the vocabulary size 128"},
                {"--vocab-size 101 --no-pad-vocab-size --tensor-model-parallel-size 2",
                 "the padded vocabulary of 101 entries is not divisible", 2},
                {"--null-tokenizer-eod-id 128", "the end-of-document id 128 is not below the vocabulary size 128"},
                {"--null-tokenizer-eod-id -1", "--null-tokenizer-eod-id is -1"},
                {"--null-tokenizer-pad-id 128", "the pad id 128 is not below"},
                {"--null-tokenizer-pad-id -2", "--null-tokenizer-pad-id is -2"},
                {"--vocab-extra-ids -1", "--vocab-extra-ids is -1"},
            });
  CHECK(error_of(kTiny + "--squared-relu --disable-bias-linear") == "");
  CHECK(error_of(kTiny + "--squared-relu --no-bias-gelu-fusion") == "");
  CHECK(error_of(kTiny + "--attention-backend local --spec local --transformer-impl local") == "");
}

TEST_CASE("recompute options must fit together", "[cpu][config]") {
  check_all(
      kTiny,
      {
          {"--recompute-granularity full",
           "--recompute-granularity full needs --recompute-method and --recompute-num-layers"},
          {"--recompute-granularity full --recompute-method uniform",
           "needs --recompute-method and --recompute-num-layers"},
          {"--recompute-granularity full --recompute-activations", "--recompute-activations means selective"},
          {"--recompute-granularity selective --recompute-method block",
           "need --recompute-granularity full, found selective"},
          {"--recompute-num-layers 1", "need --recompute-granularity full, found none"},
          {"--recompute-modules mlp", "--recompute-modules needs --recompute-granularity selective"},
          {"--recompute-granularity full --recompute-method block --recompute-num-layers 1 --recompute-modules mlp",
           "belongs to"},
          {"--recompute-granularity selective --recompute-modules core_attn moe",
           "--recompute-modules moe needs --num-experts"},
          {"--recompute-activations --recompute-modules mla_up_proj",
           "--recompute-modules mla_up_proj is not supported"},
          {"--distribute-saved-activations",
           "--distribute-saved-activations needs --tensor-model-parallel-size above 1"},
      });
}

TEST_CASE("pipeline options must fit together", "[cpu][config]") {
  check_all(
      kTiny + "--num-layers 12 --global-batch-size 48 ",
      {
          {"--pipeline-model-parallel-size 5", "--num-layers 12 is not divisible by --pipeline-model-parallel-size 5",
           5},
          {"--num-virtual-stages-per-pipeline-rank 2",
           "virtual pipeline stages need --pipeline-model-parallel-size of at least 2, found 1"},
          {"--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
           "of at least 3 with --no-overlap-p2p-communication", 2},
          {"--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4",
           "6 layers, which 4 virtual stages", 2},
          {"--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4",
           "6 layers, which --num-layers-per-virtual-pipeline-stage 4 does not divide", 2},
          {"--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
           "--num-virtual-stages-per-pipeline-rank 2",
           "exclude each other", 2},
          {"--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 3",
           "leaves 9 for 2 other pipeline stages", 3},
          {"--decoder-last-pipeline-num-layers 3", "need --pipeline-model-parallel-size above 1"},
          {"--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 3 --account-for-loss-in-pipeline-split",
           "cannot be combined", 2},
          {"--pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split",
           "(13 with embedding and loss counted)", 2},
          {"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*6|t*5L",
           "places 11 layers (t), but --num-layers is 12", 2},
          {"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*6|t*3|t*3L",
           "has 3 stages, which is not a multiple", 2},
          {"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout t*6|Et*6L",
           "needs one E, first in the first stage", 2},
          {"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*6L|t*6",
           "needs one L, last in the last stage", 2},
          {"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*6|mt*6L",
           "places 1 layers for multi-token prediction", 2},
          {"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*6|x*6L",
           "unexpected 'x' at position 6", 2},
          {"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E(t*6|t*6L", "')' is missing", 2},
          {"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*6)|t*6L", "')' without '('", 2},
          {"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*|t*6L", "a number is missing", 2},
          {"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout (((E*99999)*99999)*99999)", "too long",
           2},
          {"--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
           "--microbatch-group-size-per-virtual-pipeline-stage 1",
           "is below --pipeline-model-parallel-size 2", 2},
          {"--overlap-param-gather", "--overlap-param-gather needs --use-distributed-optimizer"},
          {"--overlap-param-gather --use-distributed-optimizer", "--overlap-param-gather needs --overlap-grad-reduce"},
          {"--overlap-param-gather-with-optimizer-step", "needs --overlap-param-gather and virtual pipeline stages"},
      });
}

TEST_CASE("micro-batches must fill the groups of virtual pipeline stages", "[cpu][config]") {
  // P <= N <= M, and M mod N is 0 or at least P (spec/training.md 8), here with P = 2.
  struct Case {
    std::int64_t group, microbatches;  ///< N, M
    bool fits;
  };
  const Case cases[] = {{2, 1, false}, {2, 2, true}, {2, 3, false}, {2, 4, true}, {3, 3, true},
                        {3, 4, false}, {3, 5, true}, {5, 4, false}, {4, 6, true}, {4, 5, false}};
  const std::string stages = kTiny +
                             "--micro-batch-size 1 --pipeline-model-parallel-size 2 "
                             "--num-virtual-stages-per-pipeline-rank 2 ";
  for (const Case& c : cases) {
    INFO(c.group << " " << c.microbatches);
    const std::string command =
        pgpt::concat(stages, "--global-batch-size ", c.microbatches,
                     " --microbatch-group-size-per-virtual-pipeline-stage ", c.group, " --dry-run");
    CHECK(error_of(command, 2).empty() == c.fits);
    if (!c.fits) CHECK(contains(error_of(command, 2), pgpt::concat("in groups of ", c.group)));
  }
  CHECK(contains(
      error_of(kTinyModel + "--lr 1e-3 --micro-batch-size 1 --train-samples 100 --pipeline-model-parallel-size 2 "
                            "--num-virtual-stages-per-pipeline-rank 2 --step-batch-size-schedule 0:2,64:5 --dry-run",
               2),
      "a global batch of 5"));
}

TEST_CASE("expert options must fit together", "[cpu][config]") {
  check_all(
      kTiny + "--global-batch-size 48 ",
      {
          {"--num-experts -1", "--num-experts is -1"},
          {"--moe-ffn-hidden-size 8", "--moe-ffn-hidden-size needs --num-experts"},
          {"--num-experts 0 --expert-model-parallel-size 2", "--expert-model-parallel-size 2 needs --num-experts", 2},
          {"--num-experts 3 --expert-model-parallel-size 2",
           "--num-experts 3 is not divisible by --expert-model-parallel-size 2", 2},
          {"--num-experts 4 --moe-layer-freq [1,0]", "--moe-layer-freq has 2 entries, but --num-layers is 4"},
          {"--num-experts 4 --moe-layer-freq [1,0,2,0]", "--moe-layer-freq holds 2"},
          {"--num-experts 4 --moe-layer-freq 0", "--moe-layer-freq is 0"},
          {"--num-experts 4 --moe-router-topk 5", "--moe-router-topk 5 is above --num-experts 4"},
          {"--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss",
           "--moe-aux-loss-coeff has 1 values for 2 types"},
          {"--num-experts 4 --moe-pad-expert-input-to-capacity", "needs --moe-expert-capacity-factor"},
          {"--num-experts 4 --moe-shared-expert-overlap",
           "--moe-shared-expert-overlap needs --moe-token-dispatcher-type"},
          {"--num-experts 4 --tensor-model-parallel-size 2 --moe-ffn-hidden-size 33",
           "--moe-ffn-hidden-size 33 is not divisible", 2},
          {"--num-experts 4 --disable-bias-linear --tensor-model-parallel-size 2",
           "--num-experts 4 with --tensor-model-parallel-size 2 needs --sequence-parallel to train", 2},
          {"--num-experts 4 --expert-tensor-parallel-size 2",
           "experts with biases need an expert tensor parallel size of 1, found 2", 2},
      });
  const std::string experts = kTiny + "--num-experts 4 --tensor-model-parallel-size 2 ";
  CHECK(config_of(experts + "--disable-bias-linear --sequence-parallel", 2).moe);
  CHECK(config_of(experts + "--expert-tensor-parallel-size 1 --sequence-parallel", 2).moe);
  CHECK(config_of(experts + "--disable-bias-linear --skip-train", 2).moe);  // only training needs it
}

TEST_CASE("checkpoint options must fit together", "[cpu][config]") {
  check_all(
      kTiny,
      {
          {"--override-ckpt-iteration 5 --finetune", "--override-ckpt-iteration cannot be combined with --finetune"},
          {"--override-ckpt-iteration -5", "--override-ckpt-iteration is -5"},
          {"--load-main-params-from-ckpt", "--load-main-params-from-ckpt needs --no-load-optim"},
          {"--non-persistent-save-interval 5", "needs --non-persistent-ckpt-type global"},
          {"--non-persistent-save-interval 5 --non-persistent-ckpt-type global", "needs --save or"},
          {"--non-persistent-ckpt-type in_memory", "--non-persistent-ckpt-type in_memory is not supported"},
          {"--load-hf A --load B", "--load-hf excludes --load"},
          {"--async-save --use-persistent-ckpt-worker --ckpt-format torch",
           "--async-save does not work with --ckpt-format torch"},
      });
  const Config c = config_of(kTiny + "--async-save --skip-train");
  CHECK_FALSE(c.checkpoint.async_save);
  CHECK_FALSE(c.checkpoint.load_optimizer);
}

TEST_CASE("there is exactly one source of data", "[cpu][config]") {
  const std::string model =
      "--tokenizer-type NullTokenizer --vocab-size 128 --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
      "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3 ";
  check_all(model,
            {
                {"", "no data source; give one of --mock-data, --data-path"},
                {"--mock-data --data-path P", "more than one data source: --mock-data --data-path;"},
                {"--data-path P --train-data-path Q", "source: --data-path --train/valid/test-data-path;"},
                {"--data-path P --data-args-path F", "--data-path and --data-args-path exclude each other"},
                {"--data-args-path F", "--data-args-path needs --split"},
                {"--data-args-path /no/such/file --split 1,1,1", "--data-args-path /no/such/file cannot be read"},
                {"--per-split-data-args-path /no/such/file", "--per-split-data-args-path /no/such/file cannot be read"},
                {"--train-data-path P --per-split-data-args-path F", "exclude each other"},
                {"--train-data-path P --split 1,1,1", "--split cannot be combined with data paths for each split"},
            });
  const Config plain = config_of(model + "--data-path P");
  CHECK(plain.data.split == "969, 30, 1");
  CHECK(plain.notices.at(1) == "WARNING: --data-path without --split; using 969, 30, 1");
}

TEST_CASE("data paths can come from files", "[cpu][config]") {
  const std::string model =
      "--tokenizer-type NullTokenizer --vocab-size 128 --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
      "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3 ";
  const std::string path = "test_config_data_args.txt";
  pgpt::test::write_text(path, "0.3 a\n0.7\tb\n");
  CHECK(config_of(model + "--split 1,1,1 --data-args-path " + path).data.data_path ==
        std::vector<std::string>{"0.3", "a", "0.7", "b"});
  pgpt::test::write_text(path, R"({"train": "0.3 a 0.7 b", "valid": ["c", 2], "test": null})");
  const Config c = config_of(model + "--per-split-data-args-path " + path);
  CHECK(c.data.train_data_path == std::vector<std::string>{"0.3", "a", "0.7", "b"});
  CHECK(c.data.valid_data_path == std::vector<std::string>{"c", "2"});
  CHECK(c.data.test_data_path.empty());
  pgpt::test::write_text(path, R"({"train": "a", "valid": "b"})");
  CHECK(contains(error_of(model + "--per-split-data-args-path " + path), "lacks the key \"test\""));
  pgpt::test::write_text(path, "[]");
  CHECK(contains(error_of(model + "--per-split-data-args-path " + path), "must hold a JSON object"));
  std::remove(path.c_str());
}

TEST_CASE("a vocabulary is asked for in the words of the flags", "[cpu][config]") {
  const std::string model =
      "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
      "--micro-batch-size 2 --train-iters 10 --lr 1e-3 ";
  check_all(model,
            {
                {"--mock-data", "for --mock-data use --tokenizer-type NullTokenizer --vocab-size N"},
                {"--mock-data --tokenizer-type NullTokenizer", "--tokenizer-type NullTokenizer needs --vocab-size"},
                {"--data-path P", "--tokenizer-type GPT2BPETokenizer needs --vocab-file or --vocab-size"},
                {"--data-path P --tokenizer-type Llama2Tokenizer",
                 "--tokenizer-type Llama2Tokenizer needs --tokenizer-model"},
                {"--data-path P --tokenizer-type SFTTokenizer --vocab-size 5",
                 "--tokenizer-type SFTTokenizer is not supported"},
            });
  const Config c = config_of(model + "--data-path P --vocab-size 200 --null-tokenizer-eod-id 0");
  CHECK(c.model.padded_vocab_size == 256);
  CHECK(c.data.eod_id == 0);
  for (const std::string missing : {"--num-layers 4", "--hidden-size 64", "--num-attention-heads 4", "--seq-length 32",
                                    "--max-position-embeddings 32", "--micro-batch-size 2"}) {
    std::string command = kTiny;
    command.erase(command.find(missing), missing.size());
    CHECK(contains(error_of(command), missing.substr(0, missing.find(' ')) + " is required"));
  }
}

TEST_CASE("sequence parallelism is dropped without tensor parallelism, with a warning", "[cpu][config]") {
  const Config c = config_of(kTiny + "--sequence-parallel");
  CHECK_FALSE(c.parallel.sequence_parallel);
  CHECK(contains(format_arguments(c), "  sequence_parallel ............................... False\n"));
  CHECK(std::count(c.notices.begin(), c.notices.end(),
                   "WARNING: --sequence-parallel is switched off because --tensor-model-parallel-size is 1") == 1);
  CHECK(config_of(kTiny + "--sequence-parallel --tensor-model-parallel-size 2", 2).parallel.sequence_parallel);
}

TEST_CASE("kept layers are among the model's, and what GTP alone needs warns without it", "[cpu][config]") {
  const std::string gtp = kTiny + "--tensor-parallel-num-weight-shards 2 ";
  const std::int64_t layers = config_of(kTiny).model.num_layers;
  const std::string keep = "--gtp-keep-gathered-layers ";
  CHECK(contains(error_of(gtp + keep + std::to_string(layers + 1), 2), "give 0 to " + std::to_string(layers)));
  CHECK(contains(error_of(gtp + keep + "-1", 2), keep + "-1: give 0 to"));
  CHECK(config_of(gtp + keep + std::to_string(layers), 2).parallel.gtp_keep_gathered_layers == layers);
  CHECK(config_of(gtp + "--gtp-communicators 1", 2).parallel.gtp_communicators == 1);
  for (const std::string& option : {keep + "1", std::string("--gtp-communicators 1")}) {
    const auto warned = [&](const Config& c) {
      return std::any_of(c.notices.begin(), c.notices.end(), [&](const std::string& notice) {
        return contains(notice, option.substr(0, option.find(' '))) && contains(notice, "has no effect without");
      });
    };
    CHECK(warned(config_of(kTiny + option)));
    CHECK_FALSE(warned(config_of(gtp + option, 2)));
  }
}

TEST_CASE("half precision turns on what belongs to it", "[cpu][config]") {
  const Config half = config_of(kTiny + "--fp16");
  CHECK(half.training.params_dtype == Dtype::kFloat16);
  CHECK_FALSE(half.training.check_for_nan);
  CHECK(config_of(kTiny + "--fp16 --loss-scale 128").training.check_for_nan);
  CHECK(config_of(kTiny + "--bf16 --grad-reduce-in-bf16").training.gradients_in_fp32 == false);
  CHECK(config_of(kTiny + "--bf16 --output-logit-dtype bf16").training.params_dtype == Dtype::kBFloat16);
  CHECK(config_of(kTiny).notices.back().starts_with(" > padded vocab"));
}

TEST_CASE("a file of matrix product algorithms needs 16-bit matrices and this program's kernels", "[cpu][config]") {
  check_all(kTiny, {
                       {"--gemm-algorithms f.json", "--gemm-algorithms f.json is for 16-bit matrices; add --bf16"},
                       {"--gemm-algorithms f.json --bf16 --kernels reference", "--kernels reference asks for them"},
                       {"--gemm-algorithms f.json --bf16 --gemm-tuning-ms 0", "--gemm-tuning-ms 0: give a positive"},
                       {"--bf16 --gemm-tuning-ms 60", "--gemm-tuning-ms 60 is for --gemm-algorithms FILE; add that"},
                   });
  CHECK(parse(kTiny + "--gemm-algorithms f.json --bf16").config.training.gemm_algorithms == "f.json");
  CHECK(parse(kTiny + "--bf16").config.training.gemm_algorithms.empty());
  CHECK(parse(kTiny + "--gemm-algorithms f.json --bf16 --gemm-tuning-ms 60").config.training.gemm_tuning_ms == 60);
}

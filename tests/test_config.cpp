// Parsing of command lines and what follows from them.
#include <cmath>
#include <nlohmann/json.hpp>

#include "pgpt/config/config.h"
#include "pgpt/config/estimate.h"
#include "pgpt/config/option_table.h"
#include "support/catch.h"
#include "support/json.h"
#include "test_config_support.h"

using namespace pgpt::config;
using namespace test_config;

TEST_CASE("the seed command gives the configuration it means", "[cpu][config]") {
  const ParsedCommand command = parse(kSeedCommand, 2);
  const Config& c = command.config;
  CHECK(command.action == ParsedCommand::Action::kRun);
  CHECK(command.warnings.empty());
  CHECK(c.model.num_layers == 2);
  CHECK(c.model.hidden_size == 128);
  CHECK(c.model.ffn_hidden_size == 256);
  CHECK(c.model.num_query_groups == 4);
  CHECK(c.model.kv_channels == 32);
  CHECK(c.model.vocab_size == 128);
  CHECK(c.model.padded_vocab_size == 128);
  CHECK(c.model.position_embedding == PositionEmbedding::kLearnedAbsolute);
  CHECK(c.model.activation == Activation::kGeluErf);  // no bias, so no fused tanh form
  CHECK_FALSE(c.model.add_bias_linear);
  CHECK_FALSE(c.model.add_qkv_bias);
  CHECK(c.model.untie_embeddings);
  CHECK(c.model.transformer_impl == TransformerImpl::kTransformerEngine);
  CHECK(c.parallel.gtp == 2);
  CHECK(c.parallel.weight_shards == 2);
  CHECK(c.parallel.replicate_data == 1);
  CHECK(c.parallel.data_ranks() == 2);
  CHECK(c.parallel.expert_gtp == 1);
  CHECK(c.parallel.backend == Backend::kGloo);
  CHECK(c.training.global_batch_size == 2);
  CHECK(c.training.params_dtype == Dtype::kBFloat16);
  CHECK(c.training.gradients_in_fp32);
  CHECK_FALSE(c.training.gradient_accumulation_fusion);
  CHECK(c.optimizer.lr == 3e-4);
  CHECK(c.optimizer.min_lr == 3e-5);
  CHECK(c.optimizer.lr_warmup_samples == 2);
  CHECK(c.optimizer.lr_decay_samples == 6);
  CHECK(c.optimizer.weight_decay_samples == 6);
  CHECK(c.optimizer.lr_decay_style == LrDecayStyle::kCosine);
  CHECK(c.data.mock);
  CHECK(c.data.eod_id == 127);
  CHECK(c.data.pad_id == -1);
  CHECK(
      c.notices ==
      std::vector<std::string>{
          "using world size: 2, data-parallel size: 1, context-parallel size: 1, hierarchical context-parallel sizes: "
          "None, tensor-model-parallel size: 1, pipeline-model-parallel size: 1",
          "Number of virtual stages per pipeline stage: None",
          "accumulate and all-reduce gradients in fp32 for bfloat16 data type.",
          "using torch.bfloat16 for parameters ...",
          " > padded vocab (size: 128) with 0 dummy tokens (new size: 128)"});
}

TEST_CASE("every command of the reference's conformance cases gives the parameter counts it printed", "[cpu][config]") {
  const nlohmann::json cases = pgpt::test::read_json(std::string(PGPT_TEST_DATA) + "/config_cases.json");
  REQUIRE(cases.size() >= 70);
  for (const auto& [name, entry] : cases.items()) {
    INFO(name);
    const Config c = config_of(entry["flags"], entry["ranks"]);
    const Estimate sizes = estimate(c);
    std::vector<std::int64_t> found;
    for (const RankEstimate& stage : sizes.stages) found.push_back(stage.parameters);
    CHECK(found == entry["parameters"].get<std::vector<std::int64_t>>());
    CHECK(c.parallel.world_size == entry["ranks"]);
  }
}

TEST_CASE("the seed model has the published sizes and operations", "[cpu][config]") {
  const Estimate two = estimate(config_of(kSeedCommand, 2));
  CHECK(two.total_parameters == 304384);
  REQUIRE(two.stages.size() == 1);
  CHECK(two.stages[0].parameters == 156928);
  CHECK(two.stages[0].state_bytes() == 18 * 156928);  // 2 weight, 4 gradient, 4 master, 8 moments
  CHECK(two.step_flops == 226492416.0);               // example of spec/training.md 11
  const Estimate one = estimate(config_of(kSeedCommand + " --tensor-parallel-num-weight-shards 1", 1));
  CHECK(one.stages[0].parameters == 304384);
}

TEST_CASE("operations of experts and prediction layers follow the formula", "[cpu][config]") {
  // 2 samples of 32 tokens; h 64, q = kv = 64, V 128, 4 layers of which 2 hold experts (ffn 256, experts 128, top 2,
  // shared 96).
  const Config c = config_of(kTiny +
                             "--global-batch-size 2 --num-experts 4 --moe-layer-freq ([1]+[0])*2 "
                             "--moe-ffn-hidden-size 128 --moe-shared-expert-intermediate-size 96");
  const double per_token =
      6.0 * 64 * (256 * 2 * 2 + 128 * 2 * 2 * 2 + 96 * 2 * 2) + 6.0 * 4 * (64 * 192 + 64 * 64) + 6.0 * 64 * 128;
  CHECK(estimate(c).step_flops == 64 * per_token + 2.0 * 32 * 32 * 4 * 6 * 64);
  // One prediction layer more: 5 layers, the extra projections, twice the logits.
  const Config mtp = config_of(kTiny + "--global-batch-size 2 --mtp-num-layers 1 --position-embedding-type rope");
  const double mtp_token =
      6.0 * 64 * 256 * 2 * 5 + 6.0 * 5 * (64 * 192 + 64 * 64) + 6.0 * (3 * 64 + 2 * 64 * 64) + 6.0 * 64 * 128 * 2;
  CHECK(estimate(mtp).step_flops == 64 * mtp_token + 2.0 * 32 * 32 * 5 * 6 * 64);
}

TEST_CASE("a dry run prints mesh, parameters and bytes for the asked world size", "[cpu][config]") {
  const ParsedCommand command =
      parse(kSeedCommand +
            " --global-batch-size 32 --tensor-model-parallel-size 2 --tensor-parallel-num-weight-shards 4 "
            "--pipeline-model-parallel-size 2 --dry-run --world-size 16");
  CHECK(command.action == ParsedCommand::Action::kDryRun);
  CHECK(command.config.dry_run);
  CHECK(command.config.parallel.replicate_data == 2);
  CHECK(contains(command.text, "using world size: 16, data-parallel size: 2,"));
  CHECK(contains(command.text, "mesh of 16 rank(s)"));
  CHECK(contains(command.text, "global 32 = micro 1 x data ranks 4 (data parallel 2 x GTP 2) x microbatches 8"));
  CHECK(contains(command.text, "pipeline rank 1: parameters per rank "));
  CHECK(contains(command.text, "floating-point operations per step: "));
}

TEST_CASE("values follow their option after a blank or an equals sign, and the last one wins", "[cpu][config]") {
  CHECK(config_of(kTiny + "--num-layers=6").model.num_layers == 6);
  CHECK(config_of(kTiny + "--num-layers 6 --num-layers=8 --num-layers 3").model.num_layers == 3);
  CHECK(config_of(kTiny + "--log-progress-line --no-log-progress-line").logging.progress_line == false);
  CHECK(config_of(kTiny + "--no-log-progress-line --log-progress-line").logging.progress_line == true);
  CHECK_FALSE(config_of(kTiny).logging.progress_line.has_value());
  CHECK(config_of(kTiny + "--lr=3e-4").optimizer.lr == 3e-4);
  CHECK(config_of(kTiny + "--persistent-save-interval 7 --save D").checkpoint.save_interval == 7);
}

TEST_CASE("numbers are read as Python reads them", "[cpu][config]") {
  CHECK(config_of(kTiny + "--null-tokenizer-pad-id -1").data.pad_id == -1);
  CHECK(config_of(kTiny + "--null-tokenizer-pad-id=5").data.pad_id == 5);
  CHECK(config_of(kTiny + "--rotary-base 1_000_000").model.rotary_base == 1000000);
  CHECK(config_of(kTiny + "--seed +7").training.seed == 7);
  CHECK(config_of(kTiny + "--adam-eps .5").optimizer.adam_eps == 0.5);
  CHECK(std::isinf(config_of(kTiny + "--loss-scale-window inf").training.loss_scale_window));
  CHECK(contains(error_of(kTiny + "--loss-scale-window nan"), "--loss-scale-window is nan"));
  for (const char* bad : {"1e3", "1.0", "0x10", "", "--", "1__0", "_1", "1_", "99999999999999999999", "+-1"}) {
    INFO(bad);
    std::vector<std::string> arguments = split_words(kTiny);
    arguments.push_back(std::string("--seed=") + bad);
    CHECK_THROWS_AS(parse_words(arguments), pgpt::ConfigError);
  }
  for (const char* bad : {"1,5", "abc", "1e", "0x1p3", "1.0f", "", "infinit"}) {
    INFO(bad);
    CHECK(contains(error_of(kTiny + "--min-lr=" + bad), "--min-lr takes a number"));
  }
}

TEST_CASE("lists take the words up to the next option, blanks and empty words included", "[cpu][config]") {
  CHECK(config_of(kTiny + "--iterations-to-skip 3 5 8 --seed 1").training.iterations_to_skip ==
        std::vector<std::int64_t>{3, 5, 8});
  CHECK(config_of(kTiny + "--iterations-to-skip=3").training.iterations_to_skip == std::vector<std::int64_t>{3});
  CHECK(contains(error_of(kTiny + "--iterations-to-skip --seed 1"), "at least one value"));
  CHECK(config_of(kTiny + "--rampup-batch-size 16 8 100 --seed 3").training.seed == 3);
  CHECK(contains(error_of(kTiny + "--rampup-batch-size 16 8"), "takes 3 values, found 2"));
  std::vector<std::string> arguments = split_words(
      "--tokenizer-type NullTokenizer --vocab-size 128 --num-layers 4 --hidden-size 64 "
      "--num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --train-iters 1 --lr "
      "1 --dry-run");
  for (const char* word : {"--data-path", "0.5", "/a,b c", "0.5", "x=y"}) arguments.emplace_back(word);
  CHECK(parse_words(arguments).config.data.data_path == std::vector<std::string>{"0.5", "/a,b c", "0.5", "x=y"});
  arguments = split_words(kTiny + "--dry-run --data-path --evidence-dir");
  arguments.emplace_back("a b");
  for (const char* word : {"--evidence-content", "", "x", ""}) arguments.emplace_back(word);
  const Config c = parse_words(arguments).config;
  CHECK(c.data.data_path.empty());
  CHECK(c.logging.evidence_dir == "a b");
  CHECK(c.logging.evidence_content == std::vector<std::string>{"", "x", ""});
}

TEST_CASE("patterns are integers or list expressions", "[cpu][config]") {
  const auto evaluate = [](const char* text) {
    bool is_list = false;
    std::vector<std::int64_t> items = evaluate_pattern("--moe-layer-freq", text, is_list);
    items.insert(items.begin(), is_list);
    return items;
  };
  CHECK(evaluate("3") == std::vector<std::int64_t>{0, 3});
  CHECK(evaluate("2*3+1") == std::vector<std::int64_t>{0, 7});
  CHECK(evaluate("([1]*3+[0]*1)*2") == std::vector<std::int64_t>{1, 1, 1, 1, 0, 1, 1, 1, 0});
  CHECK(evaluate("[0]+2*[1]") == std::vector<std::int64_t>{1, 0, 1, 1});
  CHECK(evaluate("[1, 0,1,]") == std::vector<std::int64_t>{1, 1, 0, 1});
  CHECK(evaluate("[]") == std::vector<std::int64_t>{1});
  for (const char* bad : {"", "[1", "1]", "[1]*[2]", "[1]+1", "[[1]]", "a", "__import__('os')", "1-1", "(1",
                          "[1]*9999999999", "[1]*1000000*1000000", "1000000*1000000", "[1 2]", "1+", "*2"}) {
    INFO(bad);
    CHECK_THROWS_AS(evaluate(bad), pgpt::ConfigError);
  }
  CHECK(config_of(kTiny + "--num-experts 2 --moe-layer-freq ([0]+[1])*2").experts.expert_layer ==
        std::vector<bool>{false, true, false, true});
  CHECK(config_of(kTiny + "--num-experts 2 --moe-layer-freq 3").experts.expert_layer ==
        std::vector<bool>{true, false, false, true});
}

TEST_CASE("unknown words name the nearest option", "[cpu][config]") {
  CHECK(contains(error_of(kTiny + "--num-layer 2"), "unknown option --num-layer; did you mean --num-layers?"));
  CHECK(contains(error_of(kTiny + "--tensor-parallel-num-weight-shard 2"),
                 "did you mean --tensor-parallel-num-weight-shards?"));
  CHECK(contains(error_of(kTiny + "--globalbatch-size=2"), "did you mean --global-batch-size?"));
  CHECK(contains(error_of(kTiny + "--qqqqqqqqqqqqqqqq 1"), "unknown option --qqqqqqqqqqqqqqqq"));
  CHECK_FALSE(contains(error_of(kTiny + "--qqqqqqqqqqqqqqqq 1"), "did you mean"));
  CHECK(contains(error_of(kTiny + "--tensor-model 2"), "unknown option --tensor-model"));  // names cannot be shortened
  CHECK(error_of(kTiny + "--no-such-thing") == "unknown option --no-such-thing; pretrain_gpt --help lists all");
  CHECK(error_of(kTiny + "--lr-deacy-style cosine") ==
        "unknown option --lr-deacy-style; did you mean --lr-decay-style?");
  CHECK(error_of(kTiny + "--num_layers=2") == "unknown option --num_layers; did you mean --num-layers?");
  CHECK(error_of(kTiny + "-lr 1") == "unknown option -lr; did you mean --lr?");
  CHECK(
      contains(error_of(kTiny + "--data-path -n 3"), "unknown option -n; options begin with two dashes, and a value"));
}

TEST_CASE("words that follow no option say where they stand", "[cpu][config]") {
  CHECK(contains(error_of("stray " + kTiny), "unexpected word 'stray' at the beginning; a command is made of options"));
  CHECK(error_of(kTiny + "--bf16 true") ==
        "unexpected word 'true' after --bf16, which takes no value; remove it, or put the option that it belongs to "
        "before it");
  CHECK(
      contains(error_of(kTiny + "--seed 1 2"), "unexpected word '2' after --seed 1, which takes one value; remove it"));
  CHECK(contains(error_of(kTiny + "--seed=1 2"), "unexpected word '2' after --seed 1,"));
  CHECK(contains(error_of(kTiny + "--seed 1 -- --bf16"), "unexpected word '--' after --seed 1,"));
  CHECK(contains(error_of(kTiny + "--rampup-batch-size 1 2 3 4"),
                 "unexpected word '4' after --rampup-batch-size 1 2 3;"));
}

TEST_CASE("wrong values say what the option takes, what was found and what to write", "[cpu][config]") {
  const auto error = [](const std::vector<std::string>& words) {
    std::vector<std::string> command = split_words(kTiny);
    command.insert(command.end(), words.begin(), words.end());
    return pgpt::test::error_of<pgpt::ConfigError>([&] { (void)parse_words(command); });
  };
  CHECK(error({"--num-layers"}) == "--num-layers takes one value, found none; write --num-layers INT");
  CHECK(error({"--lr", "--bf16"}) == "--lr takes one value, found none; write --lr FLOAT");
  CHECK(error({"--rampup-batch-size", "1"}) ==
        "--rampup-batch-size takes 3 values, found 1; write --rampup-batch-size STR STR STR");
  CHECK(error({"--bf16=1"}) == "--bf16 takes no value, found '1'; write --bf16 alone, or leave it out");
  CHECK(error({"--num-layers", "two"}) == "--num-layers takes an integer, not 'two'; write digits, e.g. 12");
  CHECK(error({"--train-iters", "1e3"}) == "--train-iters takes an integer, not '1e3'; write 1000");
  CHECK(error({"--num-layers=2.0"}) == "--num-layers takes an integer, not '2.0'; write 2");
  CHECK(error({"--num-layers", "2.5"}) == "--num-layers takes an integer, not '2.5'; give a whole number");
  CHECK(error({"--seed", "99999999999999999999"}) ==
        "--seed takes an integer, not '99999999999999999999'; it must fit into 64 bits");
  CHECK(error({"--lr", "fast"}) == "--lr takes a number, not 'fast'; write e.g. 0.1 or 3e-4");
  CHECK(error({"--lr", "0,001"}) == "--lr takes a number, not '0,001'; write 0.001");
  CHECK(error({"--lr", ""}) ==
        "--lr takes a number, not ''; the value is empty, perhaps a variable of the script is not set");
  CHECK(error({"--seed="}) ==
        "--seed takes an integer, not ''; the value is empty, perhaps a variable of the script is not set");
  CHECK(error({"--optimizer", "adamw"}) == "--optimizer takes one of adam, sgd, not 'adamw'; did you mean adam?");
  CHECK(error({"--lr-decay-style", "Cosine"}) ==
        "--lr-decay-style takes one of constant, linear, cosine, inverse-square-root, WSD, not 'Cosine'; did you mean "
        "cosine?");
  CHECK(contains(error({"--lr-decay-style", ""}), "WSD, not ''; the value is empty"));
  CHECK(error({"--timing-log-level", "5"}) == "--timing-log-level takes one of 0, 1, 2, not '5'");
  CHECK(error({"--save", "a\nb"}) == "--save has a value with a line end or the control character 0x1f; remove it");
  // Earlier occurrences are checked too, although the last one wins.
  CHECK(error({"--seed", "x", "--seed", "1"}) == "--seed takes an integer, not 'x'; write digits, e.g. 12");
}

TEST_CASE("help, version and the option page need nothing else", "[cpu][config]") {
  CHECK(parse("--help").action == ParsedCommand::Action::kHelp);
  CHECK(parse("-h").text == parse("--help --num-layers 3").text);
  CHECK(contains(parse("--help").text, "--tensor-parallel-num-weight-shards INT"));
  CHECK_FALSE(contains(parse("--help").text, "--help-markdown"));
  CHECK(parse("--version").text == "pretrain_gpt " + version() + "\n");
  CHECK(contains(parse("--help-markdown").text, "## Distributed and GTP"));
}

TEST_CASE("left-out values are derived as documented", "[cpu][config]") {
  const Config c = config_of(kTiny + "--swiglu");
  CHECK(c.model.ffn_hidden_size == 128);  // int(64*4*2/3/64)*64 = int(2.66)*64
  CHECK(c.model.activation == Activation::kSwiglu);
  CHECK(config_of(kTiny).model.ffn_hidden_size == 256);
  CHECK(config_of(kTiny).model.activation == Activation::kGeluTanh);
  CHECK(config_of(kTiny + "--no-bias-gelu-fusion").model.activation == Activation::kGeluErf);
  CHECK(config_of(kTiny).model.kv_channels == 16);
  CHECK(config_of(kTiny).model.vocab_size == 128);
  CHECK(config_of(kTiny + "--num-query-groups 2").model.num_query_groups == 4);
  CHECK(config_of(kTiny + "--num-query-groups 2 --group-query-attention").model.num_query_groups == 2);
  CHECK(config_of(kTiny + "--use-rotary-position-embeddings --no-position-embedding").model.has_rope());
  CHECK_FALSE(config_of(kTiny).model.rope_fusion);
  CHECK(config_of(kTiny + "--position-embedding-type rope").model.rope_fusion);
  CHECK(config_of(kTiny + "--disable-bias-linear --add-qkv-bias").model.add_qkv_bias);
  CHECK(config_of(kTiny + "--apply-query-key-layer-scaling").model.attention_softmax_in_fp32);
  CHECK(config_of(kTiny + "--embedding-init-method-std 0.5").model.embedding_init_method_std == 0.5);
  CHECK(config_of(kTiny + "--init-method-std 0.3").model.embedding_init_method_std == 0.3);
  CHECK(config_of(kTiny + "--recompute-activations").training.recompute == RecomputeGranularity::kSelective);
  CHECK(config_of(kTiny + "--recompute-activations").training.recompute_modules ==
        std::vector<std::string>{"core_attn"});
  CHECK(config_of(kTiny).data.num_workers == 2);
}

TEST_CASE("a global batch left out counts GTP ranks too, and is printed", "[cpu][config]") {
  const Config c = config_of(kTiny + "--tensor-parallel-num-weight-shards 2", 4);
  CHECK(c.training.global_batch_size == 2 * 2 * 2);
  CHECK(c.training.eval_global_batch_size == 8);
  CHECK(std::count(c.notices.begin(), c.notices.end(), "setting global batch size to 8") == 1);
}

TEST_CASE("batch rules name every factor", "[cpu][config]") {
  const std::string text = error_of(kTiny + "--tensor-parallel-num-weight-shards 2 --global-batch-size 12", 4);
  CHECK(contains(text,
                 "--global-batch-size 12 is not divisible by --micro-batch-size 2 x data parallel size 2 x GTP 2 = 8"));
  CHECK(contains(
      error_of(kTiny + "--tensor-parallel-num-weight-shards 2 --global-batch-size 8 --eval-global-batch-size 12", 4),
      "--eval-global-batch-size 12 is not divisible by --eval-micro-batch-size 2 x data parallel size 2 x GTP 2 = 8"));
  const Config lower = config_of(kTiny + "--global-batch-size 7 --decrease-batch-size-if-needed");
  CHECK(lower.training.global_batch_size == 7);
  CHECK(lower.training.eval_global_batch_size == 6);
  CHECK(contains(error_of(kTiny + "--global-batch-size 1 --decrease-batch-size-if-needed"), "below one microbatch"));
}

TEST_CASE("schedules are resolved to samples", "[cpu][config]") {
  const Config iterations = config_of(
      kTiny +
      "--global-batch-size 4 --lr-warmup-fraction 0.33 --lr-decay-iters 7 --lr-decay-style WSD "
      "--lr-wsd-decay-iters 2 --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.2");
  CHECK(iterations.optimizer.lr_decay_samples == 28);
  CHECK(iterations.optimizer.lr_warmup_samples == 0.33 * 28);
  CHECK(iterations.optimizer.wsd_decay_samples == 8);
  CHECK(iterations.optimizer.weight_decay_samples == 40);
  CHECK(iterations.optimizer.end_weight_decay == 0.2);
  CHECK(iterations.optimizer.weight_decay_style == WeightDecayStyle::kLinear);
  const Config samples =
      config_of(kTinyModel + "--lr 1e-3 --train-samples 103 --global-batch-size 4 --lr-warmup-samples 9");
  CHECK(samples.training.train_samples == 103);
  CHECK(samples.training.train_iters == 25);
  CHECK(samples.optimizer.lr_decay_samples == 103);
  CHECK(samples.optimizer.lr_warmup_samples == 9);
  CHECK(std::count(samples.notices.begin(), samples.notices.end(), "setting training iterations to 25") == 1);
  std::vector<std::string> arguments = split_words(kTinyModel + "--lr 1 --train-samples 40 --dry-run");
  arguments.insert(arguments.end(), {"--step-batch-size-schedule", "0:2 320:4"});
  const Config steps = parse_words(arguments).config;
  CHECK(steps.training.batch_size_schedule == std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 2}, {10, 4}});
  CHECK(steps.training.global_batch_size == 2);
  CHECK(steps.training.train_iters == 5 + 7);  // 10 samples in steps of 2, then 28 of 30 in steps of 4
}

TEST_CASE("pipeline layers are placed in virtual stage order", "[cpu][config]") {
  const std::string twelve = kTiny + "--num-layers 12 --global-batch-size 16 ";
  const auto stages = [&](const std::string& flags, std::int64_t world) {
    return config_of(twelve + flags, world).parallel.stage_layers;
  };
  using Layers = std::vector<std::int64_t>;
  CHECK(stages("", 1) == Layers{12});
  CHECK(stages("--pipeline-model-parallel-size 2", 2) == Layers{6, 6});
  CHECK(stages("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", 2) == Layers{3, 3, 3, 3});
  CHECK(stages("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3", 2) ==
        Layers{2, 2, 2, 2, 2, 2});
  CHECK(stages("--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 2", 3) == Layers{2, 5, 5});
  CHECK(stages("--num-layers 14 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split "
               "--account-for-loss-in-pipeline-split",
               4) == Layers{3, 4, 4, 3});
  CHECK(stages("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|(t*3|)*2,tttL", 2) ==
        Layers{3, 3, 3, 3});
  CHECK(config_of(twelve + "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*5|t*7L", 2)
            .parallel.virtual_pipeline == 0);
  const Config interleaved =
      config_of(twelve + "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", 2);
  CHECK(interleaved.parallel.virtual_pipeline == 2);
  CHECK(interleaved.parallel.microbatch_group_size == 2);
  CHECK(std::count(interleaved.notices.begin(), interleaved.notices.end(),
                   "Number of virtual stages per pipeline stage: 2") == 1);
}

TEST_CASE("tokenizers other than NullTokenizer are resolved in a second step", "[cpu][config]") {
  Config c = config_of(
      "--data-path P --split 1,0,0 --vocab-file V --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
      "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3");
  CHECK(c.data.tokenizer_type == "GPT2BPETokenizer");
  CHECK(c.model.vocab_size == 0);
  CHECK(c.model.padded_vocab_size == 0);
  apply_tokenizer(c, 50257, 50256, -1);
  CHECK(c.model.padded_vocab_size == 50304);
  CHECK(c.data.eod_id == 50256);
  CHECK(c.notices.back() == " > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)");
  CHECK(contains(format_arguments(c), "  padded_vocab_size ............................... 50304\n"));
  CHECK_THROWS_AS(apply_tokenizer(c, 100, 100, -1), pgpt::ConfigError);
  CHECK(padded_vocab_size(128, 128, 2) == 256);
  CHECK(padded_vocab_size(128, 128, 4) == 512);
  CHECK(padded_vocab_size(1021, 1, 2) == 1022);
  CHECK(config_of(kTiny + "--vocab-size 100 --no-pad-vocab-size").model.padded_vocab_size == 100);
  CHECK(config_of(kTiny + "--vocab-size 100 --padded-vocab-size 104").model.padded_vocab_size == 104);
}

TEST_CASE("the argument dump has the reference's form", "[cpu][config]") {
  const std::string dump = format_arguments(config_of(kSeedCommand, 2));
  CHECK(
      dump.starts_with("------------------------ arguments ------------------------\n  "
                       "account_for_embedding_in_pipeline_split ......... False\n"));
  CHECK(dump.ends_with("\n-------------------- end of arguments ---------------------"));
  CHECK(contains(dump, "\n  lr .............................................. 0.0003\n"));
  CHECK(contains(dump, "\n  adam_eps ........................................ 1e-08\n"));
  CHECK(contains(dump, "\n  data_parallel_size .............................. 1\n"));
  CHECK(contains(dump, "\n  kv_channels ..................................... 32\n"));
  CHECK(contains(dump, "\n  initial_loss_scale .............................. 4294967296.0\n"));
  // No dots are left for a name of 50 letters.
  CHECK(contains(dump, "\n  ddp_param_name_patterns_for_fp32_local_accumulation  None\n"));
  const Config c = config_of(kSeedCommand, 2);
  for (std::size_t i = 1; i < c.arguments.size(); ++i) {
    std::string before = c.arguments[i - 1].first, here = c.arguments[i].first;
    for (std::string* name : {&before, &here}) std::transform(name->begin(), name->end(), name->begin(), ::tolower);
    CHECK(before <= here);
  }
}

TEST_CASE("values print as Python prints them", "[cpu][config]") {
  CHECK(print_value(std::monostate{}) == "None");
  CHECK(print_value(true) == "True");
  CHECK(print_value(1e16) == "1e+16");
  CHECK(print_value(123456789012345.0) == "123456789012345.0");
  CHECK(print_value(1e-4) == "0.0001");
  CHECK(print_value(1e-5) == "1e-05");
  CHECK(print_value(-0.1) == "-0.1");
  CHECK(print_value(std::vector<std::string>{"a", "b"}) == "['a', 'b']");
  CHECK(print_value(std::vector<double>{0.5, 1}) == "[0.5, 1.0]");
}

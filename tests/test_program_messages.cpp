// Wrong input as users type it: one line that says what to try, and the exit code of docs/errors.md.

#include <map>

#include "support/catch.h"
#include "support/processes.h"
#include "support/temporary_folder.h"
#include "support/text.h"

using namespace pgpt;
using namespace std::chrono_literals;
using test::contains;

namespace {

constexpr const char* kTiny =
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 128 --num-layers 2 --hidden-size 64 --num-attention-heads "
    "4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --train-iters 2 --lr 1e-3 ";

/// gpt_tool says one line that begins with its name and holds the text.
void check_tool(const std::string& words, const std::string& text) {
  const test::Ended ended = test::tool(test::split_words(words));
  INFO(words << "\n" << test::describe(ended));
  CHECK(ended.exit_code == 2);
  CHECK(contains(ended.output, text));
  CHECK(test::count(ended.output, "\n") == 1);
  CHECK(ended.output.starts_with("gpt_tool: "));
}

}  // namespace

TEST_CASE("pretrain_gpt answers wrong input with one line and its exit code", "[cpu]") {
  const std::map<std::string, std::string> cases = {
      {"--hiden-size 64", "error: unknown option --hiden-size; did you mean --hidden-size?\n"},
      {"--bf16 true", "error: unexpected word 'true' after --bf16, which takes no value; "},
      {"--lr \"\"", "error: --lr takes a number, not ''; the value is empty"},
      {"--metrics-file .", "error: --metrics-file: cannot open .: Is a directory; give a file"},
      {"--save /proc/none --save-interval 1",
       "error: --save: cannot create the folder /proc/none: No such file or directory; give one"},
  };
  for (const auto& [flags, text] : cases) {
    INFO(flags);
    test::Process process(test::program(kTiny + flags), {{"CUDA_VISIBLE_DEVICES", ""}});
    const test::Ended ended = process.wait(60s);
    INFO(test::describe(ended));
    CHECK(ended.exit_code == 2);
    CHECK(contains(ended.output, text));
    CHECK(test::count(ended.output, "error: ") == 1);
    CHECK_FALSE(contains(ended.output, "usage:"));
  }
}

TEST_CASE("an option without effect is told of once, under one word of warning", "[cpu]") {
  test::Process process(test::program(std::string(kTiny) + "--ckpt-format torch --print-config"), {});
  const test::Ended ended = process.wait(60s);
  INFO(test::describe(ended));
  CHECK(ended.exit_code == 0);
  CHECK(test::count(ended.output, "warning: --ckpt-format has no effect: ") == 1);
  CHECK_FALSE(contains(ended.output, "WARNING"));
}

TEST_CASE("gpt_tool answers wrong words with what they may mean", "[cpu]") {
  check_tool("inspct x", "unknown command 'inspct'; did you mean inspect?");
  check_tool("frobnicate", "unknown command 'frobnicate'; gpt_tool --help lists them");
  check_tool("inspect . --stpe 3", "inspect: unknown option --stpe; did you mean --step?");
  check_tool("inspect . -v", "inspect: unknown option -v; gpt_tool inspect --help shows its words");
  check_tool("inspect . --bogus", "inspect: unknown option --bogus; gpt_tool inspect --help");
  check_tool("inspect", "inspect: takes 1 path, found none");
  check_tool("inspect a b", "inspect: unexpected word 'b' after a");
  check_tool("inspect a --step", "inspect: --step needs a value, found none");
  check_tool("inspect a --step -1", "inspect: --step takes a whole number, not '-1'; write digits");
  check_tool("inspect a --verify=1", "inspect: --verify takes no value, found '1'; write --verify alone");
  check_tool("inspect missing", "missing does not exist; give the folder that --save named");
  check_tool("diff a", "diff: takes 2 paths, found only a");
  check_tool("compare --preset=bf61 a b", "--preset bf61: choose bf16, fp32 or exact");
  check_tool("compare --exact --preset bf16 a b", "compare: --exact is --preset exact, and --preset bf16 is given too");
  check_tool("compare --tolerance=gradients=x a b", "compare: --tolerance: 'x' is no bound");
  check_tool("compare --iterations 1 2 a b", "found none; write paths before --iterations, which takes all words");
  check_tool("compare a b --iterations 1.5", "compare: --iterations takes a whole number, not '1.5'");
  check_tool("compare a b", "compare: a does not exist; give evidence folders");
  check_tool("export --format hf", "export: not given, but needed: --load, --output");
  check_tool("export --format hf --load missing --output o --dtype fp32",
             "export: --dtype fp32 is unknown; use float32");
  for (const char* size : {"5gb", "GB", "0", "999999999999GB"})
    check_tool(std::string("export --format hf --load missing --output o --max-shard-size ") + size,
               "export: --max-shard-size takes bytes, or a number with KB, MB or GB such as 5GB, not '");
  check_tool("export --format hf --load missing --output o --max-shard-size 500", "missing does not exist; give");
  check_tool("import --format llmc --input missing --output o", "--input missing does not exist; give the .bin file");
  check_tool("preprocess --tokenizer-type NullTokenizer --input x", "needed: --output-prefix, --vocab-size");
  check_tool("preprocess --append-eod true", "preprocess: unexpected word 'true' after --append-eod");
}

TEST_CASE("gpt_tool estimate knows its own options and those of pretrain_gpt", "[cpu]") {
  const std::string estimate = std::string("estimate ") + kTiny;
  check_tool(estimate + "--hiden-size 64", "unknown option --hiden-size; did you mean --hidden-size?");
  check_tool(estimate + "--jsn", "estimate: unknown option --jsn; did you mean --json?");
  check_tool(estimate + "--json=1", "estimate: --json takes no value, found '1'");
  check_tool(estimate + "--version", "estimate: --version and --help-markdown belong to pretrain_gpt");
  check_tool(estimate + "--use-checkpoint-args --load missing",
             "estimate: --use-checkpoint-args: --load missing holds no checkpoint; give one");
  const test::Ended help = test::tool(test::split_words(estimate + "--help"));
  CHECK(help.exit_code == 0);
  CHECK(help.output.starts_with("usage: gpt_tool estimate "));
  CHECK(test::tool({"--version"}).output.starts_with("gpt_tool "));
}

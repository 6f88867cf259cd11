// gpt_tool preprocess as users start it: the reference's command lines, a training run on what it writes, wrong input.

#include <csignal>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "pgpt/data/indexed_dataset.h"
#include "support/catch.h"
#include "support/processes.h"
#include "support/seed_run.h"
#include "support/temporary_folder.h"
#include "support/text.h"

using namespace pgpt;
using test::contains;
using test::read_text;
using test::write_text;
using namespace std::chrono_literals;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

/// Runs `before; gpt_tool preprocess ARGUMENTS` by a shell in a folder.
test::Ended preprocess(const std::string& folder, const std::string& arguments, const std::string& before = "true") {
  test::Process process(
      {"sh", "-c", "cd '" + folder + "' && " + before + "; exec '" + PGPT_TOOL + "' preprocess " + arguments}, {});
  return process.wait(60s);
}

std::map<std::string, std::string> files_of(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) files[entry.path().filename()] = read_text(entry.path());
  return files;
}

std::string hex(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    text += "0123456789abcdef"[static_cast<unsigned char>(c) >> 4];
    text += "0123456789abcdef"[static_cast<unsigned char>(c) & 15];
  }
  return text;
}

constexpr const char* kNull = " --tokenizer-type NullTokenizer --vocab-size 128 ";

}  // namespace

TEST_CASE("gpt_tool preprocess takes the reference's command lines and writes its bytes", "[cpu]") {
  const json golden = json::parse(read_text(std::string(PGPT_TEST_DATA) + "/golden_data/preprocess.json"));
  std::string input;
  for (const auto& line : golden["input_jsonl_lines"]) input += line.get<std::string>() + "\n";
  REQUIRE(golden["runs"].size() == 4);
  for (const auto& run : golden["runs"]) {
    const test::TemporaryFolder folder;
    write_text(folder / "in.jsonl", input);
    const test::Ended ended = preprocess(folder.path(), run["arguments"]);
    INFO(run["arguments"] << "\n" << test::describe(ended));
    CHECK(ended.exit_code == 0);
    CHECK(contains(ended.output, "3 documents, "));
    const auto files = files_of(folder.path());
    CHECK(files.size() == 1 + run["files"].size());
    for (const auto& [name, expected] : run["files"].items()) {
      REQUIRE(files.count(name) == 1);
      CHECK(hex(files.at(name)) == expected.get<std::string>());
    }
  }
}

TEST_CASE("input comes from a pattern of files or a pipe, and keys go to files of their own", "[cpu]") {
  const test::TemporaryFolder folder;
  write_text(folder / "part-2.jsonl", "{\"a\": \"3\", \"b\": [\"4 5\", \"6\"]}\n");
  write_text(folder / "part-1.jsonl", "{\"a\": \"1 2\", \"b\": []}\n");
  const std::string rest = std::string(kNull) +
                           "--json-keys a b --append-eod --null-tokenizer-eod-id 9 --workers 2 "
                           "--log-interval=1";
  const test::Ended pattern = preprocess(folder.path(), "--input 'part-*.jsonl' --output-prefix x" + rest);
  INFO(test::describe(pattern));
  REQUIRE(pattern.exit_code == 0);
  CHECK(contains(pattern.output, "1 documents, 3 tokens, "));  // after the first file
  CHECK(contains(pattern.output, "wrote x_a_document.bin and .idx: 2 sequences, 5 tokens of type uint16\n"));
  CHECK(contains(pattern.output, "wrote x_b_document.bin and .idx: 2 sequences, 4 tokens of type uint16\n"));
  CHECK(contains(pattern.output, "\n2 documents, 9 tokens, "));
  CHECK(contains(pattern.output,
                 "--data-path x_a_document --tokenizer-type NullTokenizer --vocab-size 128 "
                 "--null-tokenizer-eod-id 9\n"));
  CHECK(hex(read_text(folder / "x_a_document.bin")) == "01000200090003000900");
  CHECK(hex(read_text(folder / "x_b_document.bin")) == "0400050006000900");
  const data::IndexedDataset b(folder / "x_b_document");
  CHECK(b.boundaries() == 3);
  CHECK(b.boundary(1) == 0);

  const test::Ended pipe = preprocess(folder.path(), "--input /dev/stdin --output-prefix y" + rest,
                                      "exec < /dev/null; cat part-1.jsonl part-2.jsonl > both; exec < both");
  INFO(test::describe(pipe));
  CHECK(pipe.exit_code == 0);
  const test::Ended twice =
      preprocess(folder.path(), "--input fifo --output-prefix z --partitions 2" + rest, "mkfifo fifo");
  CHECK(twice.exit_code == 2);
  CHECK(contains(twice.output, "--input fifo can be read only once"));
  for (const char* name : {"_a_document.bin", "_a_document.idx", "_b_document.bin", "_b_document.idx"}) {
    CHECK(read_text(folder / (std::string("x") + name)) == read_text(folder / (std::string("y") + name)));
  }
}

TEST_CASE("a corpus that gpt_tool preprocess wrote trains with the options that it prints", "[cpu][dist]") {
  const test::TemporaryFolder folder;
  std::string input;
  for (int i = 0; i < 200; ++i) {
    std::string text;
    for (int j = 0; j < 40; ++j) text += (j == 0 ? "" : " ") + std::to_string((i + j) % 10);
    input += "{\"text\": \"" + text + "\"}\n";
  }
  write_text(folder / "in.jsonl", input);
  const test::Ended made =
      preprocess(folder.path(), "--input in.jsonl --output-prefix '" + folder.path() + "/o'" + kNull + "--append-eod");
  INFO(test::describe(made));
  REQUIRE(made.exit_code == 0);
  CHECK(contains(made.output, "200 documents, 8200 tokens, "));
  const std::string heading = "train on it with: ";
  const std::size_t at = made.output.find(heading);
  REQUIRE(at != std::string::npos);
  std::string flags = test::kSeedFlags;
  flags.erase(flags.find("--mock-data "), std::string("--mock-data ").size());
  flags += " --bf16 --split 1,0,0 --train-iters 20 --lr-decay-iters 20 --lr 3e-3 --metrics-file " + folder.path() +
           "/metrics " + made.output.substr(at + heading.size());
  const auto ranks = test::run_ranks(2, test::program(flags), {{"CUDA_VISIBLE_DEVICES", ""}}, 60s);
  INFO(test::describe(ranks));
  for (const test::Ended& rank : ranks) CHECK(rank.exit_code == 0);
  const std::vector<json> steps = test::read_steps(folder / "metrics");
  REQUIRE(steps.size() == 20);
  // A model that knows nothing loses log(128) = 4.85 nats a token; one that knows which ten ids occur, log(10) = 2.3.
  CHECK(steps.front()["lm_loss"].get<double>() > 4.5);
  CHECK(steps.back()["lm_loss"].get<double>() < 3.5);
}

TEST_CASE("gpt_tool preprocess says in one line what is wrong and changes no file", "[cpu]") {
  const test::TemporaryFolder folder;
  write_text(folder / "in.jsonl", "{\"text\": \"1 2\"}\n{\"text\": \"1  2\"}\n");
  write_text(folder / "good.jsonl", "{\"text\": \"1 2\", \"long\": \"3\"}\n");
  write_text(folder / "in.jsonl.gz", "");
  REQUIRE(preprocess(folder.path(), "--input good.jsonl --output-prefix o --json-keys text long" + std::string(kNull))
              .exit_code == 0);
  const auto before = files_of(folder.path());
  REQUIRE(before.size() == 3 + 4);
  struct Case {
    std::string arguments, text;
  };
  const std::string io = "--input in.jsonl --output-prefix o ";
  const std::string good = "--input good.jsonl --output-prefix o ";
  const Case cases[] = {
      {io + kNull, "in.jsonl line 2: '' is not an integer"},
      {good + "--tokenizer-type NullTokenizer --vocab-size 2", "good.jsonl line 1: token id 2 does not lie in [0, 2)"},
      {good + kNull + "--json-keys texts",
       "good.jsonl line 1: there is no key 'texts'; name the right one with --json"},
      {good + kNull + "--json-keys", "--json-keys needs a value"},
      {good, "--tokenizer-type GPT2BPETokenizer (the default): only texts of token ids are read here"},
      {good + "--tokenizer-type HuggingFaceTokenizer --tokenizer-model gpt2", "scripts/text_to_ids.py"},
      {good + "--tokenizer-type NullTokenizer", "not given, but needed: --vocab-size"},
      {good + kNull + "--null-tokenizer-eod-id 128", "128 must be below the vocabulary size 128"},
      {good + kNull + "--partitions 0", "--partitions 0 must be at least 1"},
      {good + kNull + "--workers 0", "--workers 0 must lie between 1 and 1024"},
      {good + kNull + "--workers two", "--workers takes a whole number, not 'two'"},
      {good + kNull + "--log-interval 0", "--log-interval is 0; it must be above 0"},
      {good + kNull + "--split-sentences", "--split-sentences is not supported"},
      {good + kNull + "--append-eos", "unknown option --append-eos; did you mean --append-eod?"},
      {"--output-prefix o" + std::string(kNull), "not given, but needed: --input;"},
      {"--input good.jsonl" + std::string(kNull), "not given, but needed: --output-prefix;"},
      {"--input none.jsonl --output-prefix o" + std::string(kNull), "cannot open none.jsonl: No such file"},
      {"--input 'none*' --output-prefix o" + std::string(kNull), "no file matches --input none*"},
      {"--input in.jsonl.gz --output-prefix o" + std::string(kNull), "unpack it into a pipe"},
      {"--input good.jsonl --output-prefix none/o" + std::string(kNull), "cannot create none/o_text_document.bin"},
  };
  for (const Case& c : cases) {
    const test::Ended ended = preprocess(folder.path(), c.arguments);
    INFO(c.arguments << "\n" << test::describe(ended));
    CHECK(ended.exit_code == 2);
    CHECK(contains(ended.output, c.text));
    CHECK(std::count(ended.output.begin(), ended.output.end(), '\n') == 1);
    CHECK(files_of(folder.path()) == before);
  }
  // Options that mean nothing for ids are named, the last of several counts.
  const test::Ended warned = preprocess(
      folder.path(), good + "--json-keys text long" + kNull + "--vocab-size 5 --lang german --vocab-size 128");
  INFO(test::describe(warned));
  CHECK(warned.exit_code == 0);
  CHECK(contains(warned.output, "WARNING: --lang has no effect"));
  CHECK(files_of(folder.path()) == before);
}

TEST_CASE("a full disk or Ctrl-C ends preprocessing without a trace", "[cpu]") {
  const test::TemporaryFolder folder;
  write_text(folder / "good.jsonl", "{\"text\": \"1 2\", \"long\": \"3\"}\n");
  const std::string keys = " --output-prefix o --json-keys text long" + std::string(kNull);
  REQUIRE(preprocess(folder.path(), "--input good.jsonl" + keys).exit_code == 0);
  std::string ids = "1";
  for (int i = 0; i < 5000; ++i) ids += " 1";
  write_text(folder / "big.jsonl", "{\"text\": \"7\", \"long\": \"" + ids + "\"}\n");
  const auto before = files_of(folder.path());
  // A limit of one block stands for the full disk: the files of the first key fit, those of the second do not.
  const test::Ended full = preprocess(folder.path(), "--input big.jsonl" + keys, "trap '' XFSZ; ulimit -f 1");
  INFO(test::describe(full));
  CHECK(full.exit_code == 2);
  CHECK(contains(full.output, "gpt_tool: cannot write o_long_document.bin.tmp"));
  CHECK(files_of(folder.path()) == before);

  fs::remove(folder / "big.jsonl");
  const auto rest = files_of(folder.path());
  const test::TemporaryFolder elsewhere;
  const std::string fifo = elsewhere / "fifo";
  // The pipe stays open and full of lines until its reader goes.
  const std::string endless = "mkfifo " + fifo + "; while echo '{\"text\": \"1 2\", \"long\": \"3\"}'; do :; done > " +
                              fifo + " 2> /dev/null & cd '" + folder.path() + "' && exec '" + PGPT_TOOL +
                              "' preprocess --input " + fifo + " --log-interval 1" + keys;
  test::Process process({"sh", "-c", endless}, {});
  REQUIRE(process.wait_for_output(" documents, ", 40s));
  process.signal(SIGINT);
  const test::Ended stopped = process.wait(20s);
  INFO(test::describe(stopped));
  CHECK(stopped.exit_code == 130);
  CHECK(contains(stopped.output, "stopped by signal 2; nothing was written"));
  CHECK(files_of(folder.path()) == rest);
}

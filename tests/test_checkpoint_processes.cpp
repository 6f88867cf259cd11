// Real processes: signals, killed ranks at any point of a save, and the tool.

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <thread>

#include "pgpt/checkpoint/directory.h"
#include "support/catch.h"
#include "support/processes.h"
#include "support/text.h"
#include "support/thread_ranks.h"
#include "test_checkpoint_support.h"

using namespace pgpt;
using test::contains;
using test::count;
using test::tool;
using namespace std::chrono_literals;
namespace fs = std::filesystem;

namespace {

const test::Environment kCpu = {{"CUDA_VISIBLE_DEVICES", ""}};

/// pretrain_gpt with the options of these tests' small runs, and `flags` after them.
std::vector<std::string> program(const std::string& flags) { return test::program(test::base_flags() + flags); }

/// A run far too long to end by itself.
const std::string kLong = "--bf16 --train-iters 1000000 --lr-decay-iters 1000000 --log-interval 100000 ";

}  // namespace

TEST_CASE("the exit signal to one rank makes all save once and end with 0", "[cpu][dist][checkpoint]") {
  struct Case {
    std::string flags;
    int number, rank;
    const char* name;
  };
  const Case cases[] = {{"", SIGTERM, 1, "SIGTERM"}, {"--exit-signal SIGUSR2 ", SIGUSR2, 0, "SIGUSR2"}};
  for (const Case& c : cases) {
    INFO(c.name);
    const test::ScratchFolder folder;
    const std::string flags = kLong + test::gtp(2);
    const std::string save = folder.path("s");
    test::Job job(2,
                  program(flags + "--exit-signal-handler " + c.flags + "--save " + save +
                          " --save-interval 100000000 --log-interval 1"),
                  kCpu);
    REQUIRE(job.rank(1).wait_for_output("iteration        1/", 60s));
    job.rank(c.rank).signal(c.number);
    const auto ended = job.wait(30s);
    INFO(test::describe(ended));
    for (const test::Ended& rank : ended) CHECK(rank.exit_code == 0);
    CHECK(count(ended[0].output, "successfully saved checkpoint") == 1);
    CHECK(contains(ended[0].output, std::string("[exiting program after receiving ") + c.name + ".] datetime: "));
    const auto tracker = checkpoint::read_tracker(save);
    REQUIRE(tracker);
    checkpoint::Checkpoint(checkpoint::checkpoint_path(save, *tracker)).verify({});
    // Rank 0 has saved the last iteration of rank 1, which prints them.
    std::string last = std::to_string(tracker->iteration);
    last.insert(0, 9 - std::min<std::size_t>(9, last.size()), ' ');
    CHECK(contains(ended[1].output, "iteration" + last + "/"));
    CHECK(count(ended[1].output, "] iteration ") == static_cast<std::size_t>(tracker->iteration));
    // Nobody has to know that the run was cut short.
    const std::int64_t later = tracker->iteration + 2;
    const std::string until = " --exit-interval " + std::to_string(later) + " --save ";
    for (const std::string& rest : {until + folder.path("whole"), until + save + " --load " + save}) {
      const auto ranks = test::run_ranks(2, program(flags + rest), kCpu, 60s);
      INFO(test::describe(ranks));
      for (const test::Ended& rank : ranks) REQUIRE(rank.exit_code == 0);
    }
    test::require_same_checkpoints(test::iteration_path(save, later),
                                   test::iteration_path(folder.path("whole"), later));
  }
}

TEST_CASE("a run that only evaluates gives the losses of the run that saved, and leaves its files alone",
          "[cpu][dist][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = folder.path("s");
  // Evaluations on the way consume validation samples, of which the second run has those of one evaluation only.
  const std::string flags = "--bf16 --eval-iters 2 --eval-interval 2 ";
  const auto result_lines = [](const std::string& text, const std::string& set) {
    std::vector<std::string> lines;
    for (const std::string& line : test::split_lines(text)) {
      const std::size_t at = line.find("loss at iteration 8 on " + set + " set |");
      if (at != std::string::npos) lines.push_back(line.substr(at));
    }
    return lines;
  };
  std::string saved_lines;
  for (const std::string& line : test::train(flags + "--save " + save, 1).evaluations) saved_lines += line + "\n";
  const auto contents = [&] {
    std::map<std::string, std::pair<fs::file_time_type, std::uintmax_t>> files;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(save)) {
      files[entry.path().string()] = {entry.last_write_time(), entry.is_regular_file() ? entry.file_size() : 0};
    }
    return files;
  };
  const auto before = contents();
  const std::string load = "--skip-train --load " + save + " --save " + save;
  const auto alone = test::run_ranks(1, program(flags + load), kCpu, 60s);
  INFO(test::describe(alone));
  REQUIRE(alone[0].exit_code == 0);
  CHECK(contains(alone[0].output, "skipping training (--skip-train is on)"));
  CHECK(result_lines(alone[0].output, "validation").size() == 1);
  REQUIRE(result_lines(saved_lines, "test").size() == 1);
  CHECK(result_lines(alone[0].output, "test") == result_lines(saved_lines, "test"));
  // On two shards, which sum in another order, and without what only training needs.
  std::vector<std::string> words = program(flags + load + " " + test::gtp(2));
  for (const std::string option : {"--train-iters", "--lr", "--lr-warmup-iters", "--min-lr"}) {
    const auto at = std::find(words.begin(), words.end(), option);
    REQUIRE(at != words.end());
    words.erase(at, at + 2);
  }
  const auto sharded = test::run_ranks(2, words, kCpu, 60s);
  INFO(test::describe(sharded));
  for (const test::Ended& rank : sharded) CHECK(rank.exit_code == 0);
  CHECK(result_lines(sharded[1].output, "test").size() == 1);
  const bool untouched = contents() == before;  // times cannot be printed by every Catch2
  CHECK(untouched);
}

TEST_CASE("SIGUSR1 saves and the run goes on", "[cpu][dist][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = folder.path("s");
  test::Job job(
      2, program(kLong + test::gtp(2) + "--exit-signal-handler --save " + save + " --save-interval 100000000"), kCpu);
  REQUIRE(job.rank(1).wait_for_output("iteration        1/", 60s));
  job.rank(1).signal(SIGUSR1);
  REQUIRE(job.rank(0).wait_for_output("successfully saved checkpoint", 30s));
  const std::int64_t first = checkpoint::read_tracker(save)->iteration;
  CHECK(job.rank(0).running());
  job.rank(0).signal(SIGTERM);
  const auto ended = job.wait(30s);
  INFO(test::describe(ended));
  for (const test::Ended& rank : ended) CHECK(rank.exit_code == 0);
  CHECK(count(ended[0].output, "successfully saved checkpoint") == 2);
  CHECK(checkpoint::read_tracker(save)->iteration >= first);
}

TEST_CASE("a time limit ends the run with a save", "[cpu][dist][checkpoint]") {
  if (test::trials("PGPT_SLOW_TESTS", 0) == 0) {
    WARN("takes a minute: set PGPT_SLOW_TESTS=1 to run it");
    return;
  }
  const test::ScratchFolder folder;
  const auto ended = test::run_ranks(2,
                                     program(kLong + test::gtp(2) + "--exit-duration-in-mins 1 --save " +
                                             folder.path("s") + " --save-interval 100000000"),
                                     kCpu, 90s);
  INFO(test::describe(ended));
  for (const test::Ended& rank : ended) CHECK(rank.exit_code == 0);
  CHECK(contains(ended[0].output, "[exiting program after 1."));
  CHECK(count(ended[0].output, "successfully saved checkpoint") == 1);
}

TEST_CASE("kill -9 at any point of a save leaves a checkpoint that loads", "[cpu][dist][checkpoint]") {
  // Saves follow each other without a pause, so that a random moment lies inside one; PGPT_KILL_TRIALS sets how often.
  std::mt19937 random(static_cast<unsigned>(test::trials("PGPT_KILL_SEED", 3)));
  const test::ScratchFolder folder;
  const std::string save = folder.path("s");
  const std::string flags = kLong + test::gtp(2) + "--save " + save + " --load " + save +
                            " --save-interval 1 --save-retain-interval 1000000 ";
  std::int64_t reached = 0;
  for (int trial = 0; trial < test::trials("PGPT_KILL_TRIALS", 4); ++trial) {
    const bool asynchronous = trial % 2 == 1;
    INFO("trial " << trial);
    test::Job job(2, program(flags + (asynchronous ? "--async-save --use-persistent-ckpt-worker " : "")), kCpu);
    const bool saved = job.rank(0).wait_for_output("successfully saved checkpoint", 60s);
    INFO(job.tails());
    REQUIRE(saved);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 400'000));
    job.rank(static_cast<int>(random() % 2)).signal(SIGKILL);
    const auto ended = job.wait(30s);
    INFO(test::describe(ended));
    for (const test::Ended& rank : ended) {
      CHECK_FALSE(rank.timed_out);
      CHECK((rank.exit_code == 137 || rank.exit_code == 3));
    }
    const auto tracker = checkpoint::read_tracker(save);
    REQUIRE(tracker);
    CHECK(tracker->iteration > reached);
    reached = tracker->iteration;
    checkpoint::Checkpoint(checkpoint::checkpoint_path(save, *tracker)).verify({});
  }
  const auto after =
      test::train(kLong + test::gtp(2) + "--load " + save + " --exit-interval " + std::to_string(reached + 1), 2);
  CHECK(after.steps.front().iteration == reached + 1);
}

TEST_CASE("when one rank alone cannot write, all stop and the checkpoint stays", "[cpu][dist][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = folder.path("s");
  const std::string flags = "--bf16 " + test::gtp(2) + "--save " + save + " --save-interval 2 ";
  (void)test::train(flags + "--exit-interval 2", 2);
  // Each shard has about 270 KB; the second rank may not write files of more than 100 KiB.
  std::vector<std::string> limited = {"bash", "-c",
                                      "if [ $RANK = 1 ]; then trap '' XFSZ; ulimit -f 100; fi; exec \"$@\"", "limited"};
  for (const std::string more : {"", "--async-save --use-persistent-ckpt-worker "}) {
    std::vector<std::string> command = limited;
    for (const std::string& word : program(flags + more + "--load " + save)) command.push_back(word);
    const auto ended = test::run_ranks(2, command, kCpu, 60s);
    INFO(test::describe(ended));
    for (const test::Ended& rank : ended) CHECK(rank.exit_code == 2);
    CHECK(count(ended[0].output + ended[1].output, "error: ") == 1);
    CHECK(contains(ended[1].output, "shard_00001.safetensors: File too large; raise the limit"));
    CHECK(checkpoint::read_tracker(save)->iteration == 2);
    for (const fs::directory_entry& entry : fs::directory_iterator(save))
      CHECK_FALSE(contains(entry.path().filename().string(), ".partial"));
    checkpoint::Checkpoint(test::iteration_path(save, 2)).verify({});
  }
}

TEST_CASE("the tool shows, checks and compares checkpoints", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string a = folder.path("a");
  const std::string b = folder.path("b");
  const std::string flags = std::string("--bf16 --weight-init layout-invariant ") + test::kPadded;
  (void)test::train(flags + test::gtp(2) + "--save " + a + " --save-interval 2 --exit-interval 4", 2);
  (void)test::train(flags + "--load " + a + " --save " + b + " --iterations-to-skip 5 6 7 8", 1);

  const test::Ended shown = tool({"inspect", a, "--verify", "--arguments"});
  INFO(test::describe(shown));
  CHECK(shown.exit_code == 0);
  CHECK(contains(shown.output, "iteration    4; samples: 16 consumed"));
  CHECK(contains(shown.output, "optimizer    adam after 4 steps"));
  CHECK(contains(shown.output, "  decoder.layers.0.mlp.linear_fc1.weight "));
  const std::size_t heading = shown.output.find("\ntensors of optimizer.state.exp_avg.\n");
  REQUIRE(heading != std::string::npos);
  CHECK(contains(shown.output.substr(heading), "\n  decoder.layers.0.mlp.linear_fc1.weight "));
  // Each tensor has its line under one of the headings, and none is wider than a terminal.
  std::string prefix;
  std::set<std::string> listed;
  for (const std::string& line : test::split_lines(shown.output.substr(0, shown.output.find("\narguments\n")))) {
    INFO(line);
    CHECK((line.size() <= 120 || line.starts_with("checkpoint ")));  // its path may be long
    if (line.starts_with("tensors")) prefix = line == "tensors" ? "" : line.substr(std::string("tensors of ").size());
    if (line.starts_with("  ")) listed.insert(prefix + line.substr(2, line.find(' ', 2) - 2));
  }
  CHECK(contains(shown.output, "every byte was read and every checksum is right"));
  CHECK(contains(shown.output, "train_iters"));
  const test::Ended json = tool({"inspect", test::iteration_path(a, 2), "--json"});
  const nlohmann::json document = nlohmann::json::parse(json.output);
  CHECK(document.at("state").at("iteration") == 2);
  CHECK(document.at("totals").at("parameters").get<std::int64_t>() > 0);
  for (const auto& [name, entry] : document.at("tensors").items()) {
    INFO(name);
    CHECK(listed.count(name) == 1);
  }

  CHECK(tool({"diff", a, a}).exit_code == 0);
  const test::Ended relayout = tool({"diff", a, b});  // the same tensors, cut otherwise, four skipped iterations later
  CHECK(relayout.exit_code == 1);
  CHECK(contains(relayout.output, "state /iteration: 4, 8"));
  CHECK_FALSE(contains(relayout.output, "tensor "));
  const test::Ended steps = tool({"diff", a, a, "--step-a", "2"});
  CHECK(steps.exit_code == 1);
  CHECK(contains(steps.output, "tensor decoder.final_layernorm.weight: "));

  const fs::path shard = fs::path(test::iteration_path(a, 4)) / "shard_00001.safetensors";
  std::fstream file(shard, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-1, std::ios::end);
  file.put('\x55');
  file.close();
  const test::Ended damaged = tool({"inspect", a, "--verify"});
  CHECK(damaged.exit_code == 2);
  CHECK(contains(damaged.output, shard.string() + " is damaged"));
  CHECK(contains(damaged.output, "use another checkpoint (pretrain_gpt --ckpt-step N, gpt_tool --step N)"));
}

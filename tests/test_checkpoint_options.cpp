// What each checkpoint option does, and what a checkpoint that does not fit this run is told.

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>

#include "pgpt/checkpoint/directory.h"
#include "pgpt/checkpoint/safetensors.h"
#include "support/catch.h"
#include "support/text.h"
#include "support/thread_ranks.h"
#include "test_checkpoint_support.h"

using namespace pgpt;
using test::contains;
using test::Outcome;
namespace fs = std::filesystem;

namespace {

const std::string kDropout = "--attention-dropout 0.1 --hidden-dropout 0.1 ";

/// A checkpoint of iteration 3 of a bf16 run on one rank.
std::string saved_run(const test::ScratchFolder& folder, const std::string& flags = "") {
  const std::string save = folder.path("saved");
  (void)test::train("--bf16 " + kDropout + flags + "--save " + save + " --exit-interval 3", 1);
  return save;
}

/// Weights, moments and counters of a trainer that has just loaded.
struct Loaded {
  at::Tensor weights, master, exp_avg, exp_avg_sq;
  std::int64_t iteration = 0, steps = 0;
  std::vector<training::StepReport> next;
};
Loaded load(const std::string& flags, bool step = false) {
  Loaded result;
  (void)test::run_ranks(test::parse(test::base_flags() + flags, 1), 1, [&](int, training::Trainer& trainer) {
    result.weights = trainer.store().weights().clone();
    for (const auto& [kind, flat] : trainer.optimizer().state()) {
      if (kind == "fp32_param") result.master = flat.clone();
      if (kind == "exp_avg") result.exp_avg = flat.clone();
      if (kind == "exp_avg_sq") result.exp_avg_sq = flat.clone();
    }
    result.iteration = trainer.iteration();
    result.steps = trainer.optimizer().step_count();
    if (step) result.next.push_back(trainer.step());
  });
  return result;
}

void rewrite(const std::string& directory, const std::function<void(checkpoint::Manifest&)>& change) {
  checkpoint::Manifest manifest = checkpoint::read_manifest(directory);
  change(manifest);
  checkpoint::write_text_atomically(directory + "/" + checkpoint::kManifestName, checkpoint::manifest_text(manifest));
}

std::vector<std::string> folders(const std::string& root) {
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(root)) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

TEST_CASE("each loading option takes its part of the checkpoint", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = saved_run(folder);
  const std::string flags = "--bf16 " + kDropout + "--load " + save + " ";
  const Loaded plain = load(flags, true);
  CHECK(plain.iteration == 3);
  CHECK(plain.steps == 3);
  CHECK(plain.exp_avg.abs().max().item<double>() > 0);
  CHECK(plain.next[0].consumed_samples == 16);
  CHECK_FALSE(at::equal(plain.master, plain.weights.to(at::kFloat)));  // masters hold more bits than weights

  const Loaded no_optimizer = load(flags + "--no-load-optim ", true);
  CHECK(no_optimizer.iteration == 3);
  CHECK(no_optimizer.steps == 0);
  CHECK(at::equal(no_optimizer.weights, plain.weights));
  CHECK(at::equal(no_optimizer.master, plain.weights.to(at::kFloat)));
  CHECK(no_optimizer.exp_avg.abs().max().item<double>() == 0);
  CHECK(no_optimizer.next[0].consumed_samples == 16);
  CHECK(no_optimizer.next[0].applied_learning_rate == 0);      // the schedule starts anew
  CHECK(no_optimizer.next[0].losses == plain.next[0].losses);  // dropout and data go on

  const Loaded masters = load(flags + "--no-load-optim --load-main-params-from-ckpt ");
  CHECK(at::equal(masters.master, plain.master));
  CHECK(masters.steps == 0);

  const Loaded no_random = load(flags + "--no-load-rng ", true);
  CHECK(at::equal(no_random.exp_avg, plain.exp_avg));
  CHECK(no_random.next[0].losses != plain.next[0].losses);  // other dropout masks

  const Loaded finetune = load(flags + "--finetune ", true);
  CHECK(finetune.iteration == 0);
  CHECK(finetune.steps == 0);
  CHECK(at::equal(finetune.weights, plain.weights));
  CHECK(finetune.exp_avg.abs().max().item<double>() == 0);
  CHECK(finetune.next[0].consumed_samples == 4);

  const Loaded renumbered = load(flags + "--override-ckpt-iteration 5 ", true);
  CHECK(renumbered.iteration == 5);
  CHECK(renumbered.next[0].consumed_samples == 24);
  CHECK(renumbered.next[0].applied_learning_rate ==
        plain.next[0].applied_learning_rate);  // the schedule is the stored one

  // Weights alone may change precision.
  const Loaded wide = load(kDropout + "--finetune --load " + save);
  CHECK(at::equal(wide.weights, plain.weights.to(at::kFloat)));
}

TEST_CASE("another iteration number takes its data and forgets skipped samples", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = saved_run(folder, "--iterations-to-skip 2 ");
  const std::string flags = "--bf16 " + kDropout + "--load " + save + " ";
  CHECK(load(flags, true).next[0].skipped_samples == 4);
  const Loaded renumbered = load(flags + "--override-ckpt-iteration 6 ", true);
  CHECK(renumbered.next[0].skipped_samples == 0);
  CHECK(renumbered.next[0].consumed_samples == 28);
  // The samples are those of iteration 7 of a run that skipped nothing: with equal weights and dropout, its loss.
  const std::string plain = folder.path("plain");
  (void)test::train("--bf16 " + kDropout + "--lr 0 --min-lr 0 --save " + plain + " --exit-interval 3", 1);
  const std::string frozen = "--bf16 --lr 0 --min-lr 0 --attention-dropout 0 --hidden-dropout 0 --load " + plain + " ";
  const std::vector<training::StepReport> all = test::train(frozen, 1).steps;
  CHECK(load(frozen + "--override-ckpt-iteration 6 ", true).next[0].losses == all[3].losses);
}

TEST_CASE("what was left out of a checkpoint is told, or asked for in vain", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = saved_run(folder, "--no-save-optim --no-save-rng ");
  const checkpoint::Manifest manifest = checkpoint::read_manifest(test::iteration_path(save, 3));
  for (const auto& [name, tensor] : manifest.tensors) CHECK(name.rfind("optimizer.", 0) != 0);
  CHECK_FALSE(manifest.state.random);
  const std::string flags = "--bf16 " + kDropout + "--load " + save + " ";
  const test::Failure failure = test::train_fails(flags + test::gtp(2), 2);
  CHECK(failure.code == 2);
  CHECK(contains(failure.message, "holds no optimizer state (it was saved with --no-save-optim)"));
  const Outcome outcome = test::train(flags + "--no-load-optim ", 1);
  CHECK(outcome.steps.size() == 5);
  CHECK(test::has_line(outcome.lines, "WARNING: the checkpoint holds no random states"));
}

TEST_CASE("which checkpoint is loaded", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = folder.path("s");
  const std::string flags = "--bf16 " + kDropout;
  (void)test::train(flags + "--save " + save + " --save-interval 2 --exit-interval 6", 1);
  CHECK(folders(save) == std::vector<std::string>{"iter_0000002", "iter_0000004", "iter_0000006"});
  CHECK(load(flags + "--load " + save).iteration == 6);
  CHECK(load(flags + "--load " + save + " --ckpt-step 2").iteration == 2);
  CHECK(contains(test::train_fails(flags + "--load " + save + " --ckpt-step 3", 1).message,
                 "there is no checkpoint folder " + test::iteration_path(save, 3)));

  const std::string empty = folder.path("empty");
  const Outcome fresh = test::train(flags + "--load " + empty, 1);
  CHECK(fresh.steps.size() == 8);
  CHECK(test::has_line(fresh.lines,
                       "WARNING: could not find the metadata file " + checkpoint::tracker_path(empty).string()));
  CHECK(test::has_line(fresh.lines, "    will not load any checkpoints and will start from random"));
  const test::Failure missing =
      test::train_fails(flags + test::gtp(2) + "--exit-on-missing-checkpoint --load " + empty, 2);
  CHECK(missing.code == 1);
  CHECK(contains(missing.message, "--exit-on-missing-checkpoint"));

  const Loaded pretrained = load(flags + "--load " + empty + " --pretrained-checkpoint " + save);
  CHECK(pretrained.iteration == 0);
  CHECK(at::equal(pretrained.weights, load(flags + "--load " + save).weights));
  CHECK(load(flags + "--load " + save + " --ckpt-step 4 --pretrained-checkpoint " + empty).iteration == 4);
  CHECK(contains(test::train_fails(flags + "--pretrained-checkpoint " + empty, 1).message, "holds no checkpoint"));

  // A tracker that names a folder which is gone.
  fs::remove_all(test::iteration_path(save, 6));
  const test::Failure gone = test::train_fails(flags + test::gtp(2) + "--load " + save, 2);
  CHECK(gone.code == 2);
  CHECK(contains(gone.message, test::iteration_path(save, 6)));
  // A folder under another name.
  fs::rename(test::iteration_path(save, 4), test::iteration_path(save, 6));
  CHECK(contains(test::train_fails(flags + "--load " + save, 1).message,
                 "says that it is of iteration 4, its name says 6"));
}

TEST_CASE("the folder of one checkpoint is not taken for the folder that holds it", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = saved_run(folder);
  const std::string one = test::iteration_path(save, 3);
  for (const std::string& load : {one, one + "/"}) {
    const std::string expected = "--load " + load + " is one checkpoint; give --load " + save + " --ckpt-step 3";
    const test::Failure failure = test::train_fails("--bf16 " + kDropout + test::gtp(2) + "--load " + load, 2);
    CHECK(failure.code == 2);
    CHECK(failure.message == expected);
    CHECK_THROWS_WITH(test::parse(test::base_flags() + "--use-checkpoint-args --load " + load, 1), expected);
  }
  fs::copy(one, save + "/best", fs::copy_options::recursive);
  CHECK(contains(test::train_fails("--bf16 " + kDropout + "--load " + save + "/best", 1).message,
                 "rename it to " + save + "/iter_NNNNNNN with its iteration"));
}

TEST_CASE("a run that will overwrite the tracker of a longer one says so once", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = saved_run(folder);
  const std::string flags = "--bf16 " + kDropout + test::gtp(2) + "--exit-interval 1 --save ";
  const std::string warning = "WARNING: --save " + save +
                              " already holds iteration 3 and this run does not load it; its tracker will go back to "
                              "earlier iterations";
  const auto times = [&](const std::string& more) {
    const std::vector<std::string> lines = test::train(flags + more, 2).lines;
    return std::count(lines.begin(), lines.end(), warning);
  };
  CHECK(times(folder.path("new")) == 0);
  CHECK(times(save + " --load " + save) == 0);  // iteration 4 now
  checkpoint::write_tracker(save, 3);
  CHECK(times(save + " --skip-train") == 0);
  CHECK(times(save) == 1);  // iteration 1 now
  checkpoint::write_tracker(save, 3);
  CHECK(times(save + " --load " + folder.path("new")) == 1);
}

TEST_CASE("old checkpoints go when they should", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = folder.path("s");
  const Outcome outcome = test::train(
      "--bf16 --save " + save + " --save-interval 1 --save-retain-interval 3 --log-progress " + test::gtp(2), 2);
  CHECK(folders(save) == std::vector<std::string>{"iter_0000003", "iter_0000006", "iter_0000008"});
  CHECK(test::has_line(outcome.lines, "  successfully deleted checkpoint from iteration       7 at " + save));
  CHECK(checkpoint::read_tracker(save)->iteration == 8);
  const std::string progress = test::read_text(save + "/progress.txt");
  CHECK(contains(progress, "\t# GPUs: 2\tStarting job\n"));
  CHECK(contains(progress, "\tSaved checkpoint\tIteration: 8\tJob throughput: "));
  CHECK(contains(progress, "\tDeleted checkpoint\tIteration: 7\n"));

  // A link to a checkpoint is not this run's to delete.
  const std::string linked = folder.path("l");
  (void)test::train("--bf16 --save " + folder.path("elsewhere") + " --exit-interval 1", 1);
  fs::create_directories(linked);
  fs::create_directory_symlink(test::iteration_path(folder.path("elsewhere"), 1), test::iteration_path(linked, 1));
  checkpoint::write_tracker(linked, 1);
  (void)test::train(
      "--bf16 --load " + linked + " --save " + linked + " --save-interval 2 --save-retain-interval 4 --exit-interval 2",
      1);
  CHECK(fs::exists(test::iteration_path(linked, 1)));
}

TEST_CASE("temporary checkpoints: one remains, and the newer kind is loaded", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = folder.path("s");
  const std::string temporary = "--non-persistent-save-interval 1 --non-persistent-ckpt-type global ";
  const std::string flags = "--bf16 " + kDropout + "--save " + save + " --save-interval 3 " + temporary;
  const Outcome whole = test::train(flags, 1);
  CHECK(folders(save) == std::vector<std::string>{"iter_0000003", "iter_0000006", "iter_0000008", "non_persistent"});
  CHECK(folders(save + "/non_persistent") ==
        std::vector<std::string>{"iter_0000008"});  // persistent saves won at 3 and 6

  const std::string other = folder.path("o");
  (void)test::train("--bf16 " + kDropout + "--save " + other + " --save-interval 3 --exit-signal-handler " + temporary +
                        "--non-persistent-global-ckpt-dir " + folder.path("np") + " --exit-interval 4",
                    1);
  fs::remove_all(test::iteration_path(other, 4));
  checkpoint::write_tracker(other, 3);
  CHECK(folders(folder.path("np")) == std::vector<std::string>{"iter_0000004"});
  const std::string again = "--bf16 " + kDropout + "--load " + other + " ";
  CHECK(load(again).iteration == 3);
  CHECK(load(again + temporary + "--non-persistent-global-ckpt-dir " + folder.path("np") + " --save " + other)
            .iteration == 4);
  CHECK(load(again + temporary + "--non-persistent-global-ckpt-dir " + folder.path("np") + " --save " + other +
             " --ckpt-step 3")
            .iteration == 3);
  test::require_same_steps(
      test::train(again + temporary + "--non-persistent-global-ckpt-dir " + folder.path("np") + " --save " + other, 1)
          .steps,
      test::tail(whole.steps, 4));
}

TEST_CASE("asynchronous saves write the same bytes", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string flags = "--bf16 " + kDropout + test::kPadded + test::gtp(2) + "--save-interval 1 ";
  const Outcome blocking = test::train(flags + "--save " + folder.path("sync"), 4);
  const Outcome background =
      test::train(flags + "--async-save --use-persistent-ckpt-worker --log-progress --save " + folder.path("async"), 4);
  test::require_same_steps(background.steps, blocking.steps);
  CHECK(test::has_line(background.lines,
                       "scheduled an async checkpoint save at iteration       8 to " + folder.path("async")));
  CHECK(test::has_line(background.lines,
                       "successfully saved checkpoint from iteration       8 to " + folder.path("async")));
  CHECK(checkpoint::read_tracker(folder.path("async"))->iteration == 8);
  for (int iteration = 1; iteration <= 8; ++iteration) {
    INFO("iteration " << iteration);
    for (const char* shard :
         {"shard_00000.safetensors", "shard_00001.safetensors", "shard_00002.safetensors", "shard_00003.safetensors"}) {
      const auto bytes = [&](const std::string& root) {
        return test::read_text(test::iteration_path(root, iteration) + "/" + shard);
      };
      CHECK(!bytes(folder.path("sync")).empty());
      CHECK(bytes(folder.path("async")) == bytes(folder.path("sync")));
    }
    test::require_same_checkpoints(test::iteration_path(folder.path("async"), iteration),
                                   test::iteration_path(folder.path("sync"), iteration));
  }
  const std::string progress = test::read_text(folder.path("async") + "/progress.txt");
  CHECK(contains(progress, "\tSaving async checkpoint\tIteration: 8\t"));
  CHECK(contains(progress, "\tSaved async checkpoint\tIteration: 8\n"));
}

TEST_CASE("saving over a checkpoint warns and replaces it", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = folder.path("s");
  const std::string flags = "--bf16 --save " + save + " --save-interval 2 ";
  (void)test::train(flags, 1);
  const Outcome again = test::train(flags + "--load " + save + " --ckpt-step 4 --seed 99", 1);
  CHECK(test::has_line(again.lines, "WARNING: overwriting the checkpoint of iteration 6 in " + save));
  CHECK(test::has_line(again.lines, "WARNING: --seed is 99, the checkpoint has 1234"));
  CHECK(checkpoint::read_tracker(save)->iteration == 8);
  checkpoint::Checkpoint(test::iteration_path(save, 6)).verify({});
}

TEST_CASE("options of the checkpoint can be taken over", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string model = std::string(test::kPadded) +
                            "--normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear ";
  const std::string save = folder.path("s");
  (void)test::train("--bf16 " + kDropout + model + "--save " + save + " --exit-interval 3", 1);
  const Outcome unbroken = test::train("--bf16 " + kDropout + model, 1);
  std::string bare = test::base_flags();
  for (const std::string option : {"--num-layers 2 ", "--hidden-size 32 ", "--ffn-hidden-size 64 ",
                                   "--num-attention-heads 4 ", "--seq-length 16 ", "--max-position-embeddings 16 "}) {
    bare.replace(bare.find(option), option.size(), "");
  }
  const std::string load_flags = "--bf16 --use-checkpoint-args --load " + save;
  test::require_same_steps(test::train(load_flags, 1, bare).steps, test::tail(unbroken.steps, 3));
  const config::Config config = test::parse(bare + load_flags, 1);
  CHECK(config.model.ffn_hidden_size == 72);
  CHECK(config.model.hidden_dropout == 0.1);  // taken over the command line's 0
  CHECK(test::has_line(config.notices, "Setting num_layers to 2 from checkpoint"));
  const std::string wide = folder.path("w");
  (void)test::train("--bf16 --padded-vocab-size 192 --save " + wide + " --exit-interval 3", 1);
  CHECK(test::train("--bf16 --use-checkpoint-args --load " + wide, 1, bare).steps.front().iteration == 4);
  CHECK(test::has_line(test::parse(test::base_flags() + "--use-checkpoint-args", 1).notices,
                       "No load directory specified, using provided arguments."));
  CHECK(
      test::has_line(test::parse(test::base_flags() + "--use-checkpoint-args --load " + folder.path("none"), 1).notices,
                     "Checkpoint not found to provide arguments, using provided arguments."));
}

TEST_CASE("the schedule is checked, kept or overridden", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = saved_run(folder);
  const std::string flags = "--bf16 " + kDropout + "--load " + save + " ";
  const test::Failure failure = test::train_fails(flags + "--lr 2e-2 " + test::gtp(2), 2);
  CHECK(failure.code == 2);
  CHECK(contains(failure.message, "--lr: the command line gives 0.02"));
  CHECK(contains(failure.message, "the checkpoint has 0.01"));
  // A longer run: its lengths follow --train-iters, and the message says how to go on.
  const std::string longer = test::train_fails(flags + "--train-iters 12", 1).message;
  CHECK(contains(longer, "decay length in samples: the command line gives 48, the checkpoint has 32"));
  CHECK(contains(longer, "it follows --train-iters"));
  CHECK(contains(longer, "--override-opt-param-scheduler to keep the command line's"));
  const std::string weights = test::train_fails(flags + "--train-iters 12 --lr-decay-iters 8", 1).message;
  CHECK(contains(weights,
                 "weight decay length in samples: the command line gives 48, the checkpoint has 32 (it "
                 "follows --train-iters"));
  CHECK(test::train(flags + "--train-iters 12 --override-opt-param-scheduler", 1).steps.back().iteration == 12);
  const double stored = load(flags, true).next[0].applied_learning_rate;
  CHECK(load(flags + "--lr 2e-2 --use-checkpoint-opt-param-scheduler", true).next[0].applied_learning_rate == stored);
  // min + cos factor * (max - min) at the same place with another max: 12 of 8..32 samples.
  const double changed = load(flags + "--lr 2e-2 --override-opt-param-scheduler", true).next[0].applied_learning_rate;
  CHECK(changed - 1e-3 == Approx((stored - 1e-3) * 19.0 / 9.0).epsilon(1e-12));
}

TEST_CASE("other bounds of embedding and output layer are refused, other numbers of the update told",
          "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = saved_run(folder, "--decoupled-lr 2e-2 ");
  const std::string flags = "--bf16 " + kDropout + "--load " + save + " ";
  // The stored schedule has no bounds of groups, so its option cannot bring them back either.
  for (const std::string& winner : {std::string(), std::string("--use-checkpoint-opt-param-scheduler ")}) {
    INFO(winner);
    const test::Failure dropped = test::train_fails(flags + winner + test::gtp(2), 2);
    CHECK(dropped.code == 2);
    CHECK(contains(dropped.message, "--decoupled-lr: the command line gives None, the checkpoint has 0.02"));
    CHECK(contains(test::train_fails(flags + winner + "--decoupled-lr 3e-2", 1).message,
                   "--decoupled-lr: the command line gives 0.03, the checkpoint has 0.02"));
  }
  CHECK(test::train(flags + "--decoupled-lr 2e-2", 1).steps.back().iteration == 8);
  CHECK(test::train(flags + "--override-opt-param-scheduler", 1).steps.back().iteration == 8);

  const std::string same = flags + "--decoupled-lr 2e-2 ";
  const std::string other = "WARNING: --adam-beta2 is 0.95, the checkpoint has 0.999: the command line's is used";
  const std::string longer = "WARNING: this run is of 36 samples, that of the checkpoint of 32";
  const Outcome plain = test::train(same, 1);
  CHECK_FALSE(test::has_line(plain.lines, "WARNING: --adam"));
  CHECK_FALSE(test::has_line(plain.lines, "WARNING: this run is of"));
  CHECK(test::has_line(test::train(same + "--adam-beta2 0.95", 1).lines, other));
  CHECK_FALSE(test::has_line(test::train(same + "--adam-beta2 0.95 --no-load-optim", 1).lines, other));
  CHECK(test::has_line(test::train(same + "--train-iters 9 --override-opt-param-scheduler", 1).lines, longer));
}

TEST_CASE("a checkpoint of another model is refused with both values", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = saved_run(folder);
  const std::string directory = test::iteration_path(save, 3);
  const std::string flags = "--bf16 " + kDropout + "--load " + save + " ";
  const auto message = [&](const std::string& change) {
    const test::Failure failure = test::train_fails(flags + change + " " + test::gtp(2), 2);
    CHECK(failure.code == 2);
    return failure.message;
  };
  CHECK(contains(message("--num-layers 3"), "--num-layers: this run has 3, the checkpoint " + directory + " has 2"));
  CHECK(contains(message("--ffn-hidden-size 65"),
                 "--ffn-hidden-size: this run has 65, the checkpoint " + directory + " has 64"));
  CHECK(contains(message("--swiglu"), "this run has True"));
  CHECK(contains(message("--normalization RMSNorm"), "--normalization: this run has RMSNorm"));
  CHECK(contains(message("--optimizer sgd"), "--optimizer: this run has sgd"));
  CHECK(contains(message("--vocab-size 300"), "--vocab-size: this run has 300"));
  CHECK(contains(message("--finetune --ffn-hidden-size 65"),
                 "tensor decoder.layers.0.mlp.linear_fc1.weight has shape [64, 32] in " + directory +
                     ", this run needs [65, 32]"));
  const test::Failure precision = test::train_fails(kDropout + "--load " + save, 1);
  CHECK(contains(precision.message, "this run trains weights of type F32, the checkpoint " + directory + " has BF16"));
}

TEST_CASE("missing, renamed, misshapen and surplus tensors are refused by name", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = saved_run(folder);
  const std::string directory = test::iteration_path(save, 3);
  const std::string flags = "--bf16 " + kDropout + "--load " + save + " ";
  const checkpoint::Manifest good = checkpoint::read_manifest(directory);
  const std::string victims[] = {"decoder.layers.1.mlp.linear_fc2.weight",
                                 "optimizer.state.exp_avg_sq.embedding.word_embeddings.weight"};
  const auto failure = [&](const std::function<void(checkpoint::Manifest&)>& change, const std::string& more = "") {
    rewrite(directory, change);
    const test::Failure result = test::train_fails(flags + more + test::gtp(2), 2);
    checkpoint::write_text_atomically(directory + "/" + checkpoint::kManifestName, checkpoint::manifest_text(good));
    CHECK(result.code == 2);
    return result.message;
  };
  for (const std::string& victim : victims) {
    INFO(victim);
    CHECK(contains(failure([&](checkpoint::Manifest& m) { m.tensors.erase(victim); }),
                   "holds no tensor " + victim + ", which this run needs with shape ["));
    CHECK(contains(failure([&](checkpoint::Manifest& m) {
                     auto node = m.tensors.extract(victim);
                     node.key() += "_renamed";
                     m.tensors.insert(std::move(node));
                   }),
                   "holds tensor " + victim + "_renamed"));
    CHECK(contains(failure([&](checkpoint::Manifest& m) {
                     ++m.tensors.at(victim).shape[0];
                     m.tensors.at(victim).pieces[0].shape[0]++;
                   }),
                   victim));
    // The name in the shard itself.
    CHECK(contains(failure([&](checkpoint::Manifest& m) { m.tensors.at(victim).pieces[0].key = "other"; }),
                   "holds no tensor other, which the manifest"));
  }
  // A whole and consistent tensor that is one row too long.
  const std::string norm = "decoder.final_layernorm.weight";
  const auto longer = [&](checkpoint::Manifest& m) {
    const at::Tensor values = at::ones({33}, at::kBFloat16);
    m.tensors.erase(norm);
    m.files.erase("longer.safetensors");
    checkpoint::merge(m, checkpoint::write_shards(directory, "longer", {{norm, {33}, {0}, values, 0, 1}}, {}).at(0));
  };
  CHECK(contains(failure(longer), "tensor " + norm + " has shape [33] in " + directory + ", this run needs [32]"));
  // Surplus tensors alone can be ignored when asked for.
  const auto surplus = [&](checkpoint::Manifest& m) {
    m.tensors["decoder.extra.weight"] = m.tensors.at("decoder.final_layernorm.weight");
  };
  CHECK(contains(failure(surplus), "holds tensor decoder.extra.weight [32], which this model does not have"));
  rewrite(directory, surplus);
  CHECK(test::has_line(test::train(flags + "--dist-ckpt-strictness log_unexpected ", 1).lines, "decoder.extra.weight"));
}

TEST_CASE("runs end at --exit-interval with one save", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const Outcome outcome = test::train("--bf16 --save " + folder.path("s") + " --save-interval 4 --exit-interval 4", 1);
  CHECK(outcome.steps.size() == 4);
  CHECK(test::has_line(outcome.lines, "[exiting program at iteration 4] datetime: "));
  CHECK(std::count_if(outcome.lines.begin(), outcome.lines.end(),
                      [](const std::string& line) { return contains(line, "successfully saved"); }) == 1);
  CHECK_FALSE(test::has_line(outcome.lines, "after training is done"));
}

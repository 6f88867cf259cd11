// Loading: which checkpoint, whether it fits this run, and what is taken from it.
#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <set>

#include "pgpt/base/error.h"
#include "pgpt/checkpoint/directory.h"
#include "pgpt/checkpoint/safetensors.h"
#include "pgpt/config/option_table.h"
#include "pgpt/training/agreement.h"
#include "pgpt/training/checkpointing.h"
#include "pgpt/training/device.h"

namespace pgpt::training {

namespace fs = std::filesystem;
using checkpoint::LocalTensor;

namespace {

struct OtherValue {
  std::string mine, stored;
};

/// Both values of an option that this run and the checkpoint know and have differently.
std::optional<OtherValue> other_value(const config::Config& config, const checkpoint::Manifest& manifest,
                                      const std::string& destination) {
  const auto mine = std::find_if(config.arguments.begin(), config.arguments.end(),
                                 [&](const auto& argument) { return argument.first == destination; });
  const auto stored = manifest.arguments.find(destination);
  if (mine == config.arguments.end() || stored == manifest.arguments.end() || mine->second == stored->second)
    return std::nullopt;
  return OtherValue{mine->second, stored->second};
}

const char* optimizer_name(config::OptimizerKind kind) { return kind == config::OptimizerKind::kAdam ? "adam" : "sgd"; }

}  // namespace

std::optional<std::map<std::string, std::string>> stored_arguments(const std::string& load,
                                                                   std::optional<std::int64_t> step) {
  std::optional<checkpoint::Tracker> tracker;
  if (step) {
    tracker = checkpoint::Tracker{*step, false};
  } else {
    tracker = checkpoint::read_tracker(load);
  }
  if (!tracker) {
    checkpoint::refuse_single_checkpoint(load);
    return std::nullopt;
  }
  return checkpoint::read_manifest(checkpoint::checkpoint_path(load, *tracker)).arguments;
}

std::optional<Checkpointer::Source> Checkpointer::choose_source() const {
  const config::CheckpointConfig& c = config_.checkpoint;
  const auto source = [](const std::string& root, const checkpoint::Tracker& tracker, bool pretrained) {
    return Source{root, checkpoint::checkpoint_path(root, tracker).string(), tracker.iteration, tracker.release,
                  pretrained};
  };
  std::optional<Source> persistent;
  std::string looked_for = "because load directory is not defined";
  if (!c.load.empty()) {
    looked_for = checkpoint::tracker_path(c.load).string();
    if (c.step) return source(c.load, {*c.step, false}, false);
    if (const auto tracker = checkpoint::read_tracker(c.load)) persistent = source(c.load, *tracker, false);
    checkpoint::refuse_single_checkpoint(c.load);
  }
  if (c.non_persistent && !c.load.empty()) {
    const std::string root =
        c.non_persistent_dir.empty() ? (fs::path(c.load) / "non_persistent").string() : c.non_persistent_dir;
    const auto tracker = checkpoint::read_tracker(root);
    if (tracker && (!persistent || (!persistent->release && tracker->iteration >= persistent->iteration)))
      return source(root, *tracker, false);
  }
  if (persistent) return persistent;
  if (!c.pretrained.empty()) {
    const auto tracker = checkpoint::read_tracker(c.pretrained);
    PGPT_CHECK(DataError, tracker, "--pretrained-checkpoint ", c.pretrained,
               " holds no checkpoint: ", checkpoint::tracker_path(c.pretrained).string(), " does not exist");
    return source(c.pretrained, *tracker, true);
  }
  if (c.load.empty()) return std::nullopt;
  PGPT_CHECK(MissingCheckpointError, !c.exit_on_missing, "--exit-on-missing-checkpoint: there is nothing to load, ",
             looked_for, " does not exist");
  print_(concat("WARNING: could not find the metadata file ", looked_for));
  print_("    will not load any checkpoints and will start from random");
  return std::nullopt;
}

std::optional<Checkpointer::Source> Checkpointer::find_source() {
  // Rank 0 looks, so that a tracker that changes meanwhile cannot part the ranks.
  std::optional<Source> found;
  run_together([&] {
    if (world_.rank() == 0) found = choose_source();
  });
  nlohmann::json message;
  if (found) message = {found->root, found->directory, found->iteration, found->release, found->pretrained};
  message = nlohmann::json::parse(gather_texts(all_, device_, world_.rank() == 0 ? message.dump() : "")[0]);
  if (message.is_null()) return std::nullopt;
  return Source{message[0].get<std::string>(), message[1].get<std::string>(), message[2].get<std::int64_t>(),
                message[3].get<bool>(), message[4].get<bool>()};
}

void Checkpointer::check_arguments(const checkpoint::Manifest& manifest, const std::string& directory,
                                   bool finetune) const {
  for (const config::Option& option : config::option_table()) {
    if (!option.architecture) continue;
    const std::optional<OtherValue> other = other_value(config_, manifest, option.destination);
    // Finetuning may change what shapes do not show (rotary base, for example); shapes are checked tensor by tensor.
    if (!other || finetune) continue;
    throw ConfigError(concat(option.names.front(), ": this run has ", other->mine, ", the checkpoint ", directory,
                             " has ", other->stored,
                             "; give the same value, or --use-checkpoint-args to take the checkpoint's"));
  }
}

void Checkpointer::check_precision(const checkpoint::Manifest& manifest, const std::string& directory) const {
  const parameter::Parameter& first = state_.store.parameters().front();
  const auto stored = manifest.tensors.find(first.spec.name);
  if (stored == manifest.tensors.end()) return;  // reported with its shape later
  PGPT_CHECK(ConfigError, stored->second.dtype == first.weight.scalar_type(), "this run trains weights of type ",
             checkpoint::dtype_name(first.weight.scalar_type()), ", the checkpoint ", directory, " has ",
             checkpoint::dtype_name(stored->second.dtype),
             "; give the same --bf16 or --fp16, or take the weights alone with --no-load-optim or --finetune");
}

void Checkpointer::load_tensors(const checkpoint::Checkpoint& checkpoint, bool with_optimizer) {
  const config::CheckpointConfig& c = config_.checkpoint;
  const checkpoint::Layout& saved = checkpoint.manifest().layout;
  const config::ParallelConfig& p = config_.parallel;
  // Padding rows belong to one layout: they come back at the same degrees, and are zero otherwise.
  const bool same_padding = saved.gtp_padding && keeps_padding() && saved.gtp == p.gtp && saved.tensor == p.tensor;
  std::vector<LocalTensor> targets;
  for (LocalTensor& tensor : tensors(true, true)) {
    const bool padding =
        tensor.name.size() > 12 && tensor.name.compare(tensor.name.size() - 12, 12, ".gtp_padding") == 0;
    const bool optimizer = tensor.name.rfind("optimizer.state.", 0) == 0;
    const bool master = tensor.name.rfind("optimizer.state.fp32_param.", 0) == 0;
    if (optimizer && !with_optimizer && !(master && c.load_main_params)) continue;
    if (padding) tensor.values.zero_();
    if (padding && !same_padding) continue;
    targets.push_back(std::move(tensor));
  }
  std::set<std::string> known;
  for (const LocalTensor& tensor : targets) known.insert(tensor.name);
  for (const auto& [name, entry] : checkpoint.manifest().tensors) {
    const bool unused = name.rfind("optimizer.state.", 0) == 0 && !with_optimizer;
    const bool padding = name.size() > 12 && name.compare(name.size() - 12, 12, ".gtp_padding") == 0;
    if (known.count(name) != 0 || unused || padding) continue;
    const std::string found = concat("the checkpoint ", checkpoint.directory().string(), " holds tensor ", name, " ",
                                     checkpoint::shape_text(entry.shape), ", which this model does not have");
    PGPT_CHECK(DataError, c.strictness != "assume_ok_unexpected" && c.strictness.rfind("raise", 0) != 0, found,
               "; check the model options, or ignore it with --dist-ckpt-strictness log_unexpected");
    print_first("WARNING: " + found);
  }
  synchronize(device_);  // other threads fill the tensors, on streams of their own
  checkpoint.load(targets, !with_optimizer, io_options());
}

void Checkpointer::check_update_options(const checkpoint::Manifest& manifest) const {
  const config::OptimizerConfig& o = config_.optimizer;
  // Bounds of a parameter group belong to the schedule, but its stored state has only the default ones.
  for (const char* destination : {"decoupled_lr", "decoupled_min_lr"}) {
    const std::optional<OtherValue> other = other_value(config_, manifest, destination);
    PGPT_CHECK(ConfigError, !other || o.override_opt_param_scheduler, config::option_name(destination),
               ": the command line gives ", other->mine, ", the checkpoint has ", other->stored,
               "; give the same value, or --override-opt-param-scheduler to keep the command line's");
  }
  const std::vector<const char*> update = o.kind == config::OptimizerKind::kAdam
                                              ? std::vector<const char*>{"adam_beta1", "adam_beta2", "adam_eps"}
                                              : std::vector<const char*>{"sgd_momentum"};
  for (const char* destination : update) {
    if (const std::optional<OtherValue> other = other_value(config_, manifest, destination)) {
      print_first(concat("WARNING: ", config::option_name(destination), " is ", other->mine, ", the checkpoint has ",
                         other->stored, ": the command line's is used"));
    }
  }
}

void Checkpointer::warn_of_other_length(const checkpoint::Manifest& manifest) const {
  const auto stored = [&](const char* destination) -> std::int64_t {
    const auto found = manifest.arguments.find(destination);
    std::int64_t value = 0;
    if (found == manifest.arguments.end()) return 0;
    const std::string& text = found->second;
    return std::from_chars(text.data(), text.data() + text.size(), value).ec == std::errc() ? value : 0;  // or None
  };
  const config::TrainingConfig& t = config_.training;
  const std::int64_t mine = t.train_samples > 0 ? t.train_samples : t.train_iters * t.global_batch_size;
  const std::int64_t theirs =
      stored("train_samples") > 0 ? stored("train_samples") : stored("train_iters") * stored("global_batch_size");
  if (theirs == 0 || mine == theirs || t.skip_train || config_.data.mock) return;
  print_first(concat("WARNING: this run is of ", mine, " samples, that of the checkpoint of ", theirs,
                     ": if either needs more than one epoch of the data, the order of samples is another one and "
                     "some come again"));
}

void Checkpointer::restore_optimizer(const checkpoint::RunState& state, const std::string& directory) {
  PGPT_CHECK(DataError, !state.optimizer.empty(), "the checkpoint ", directory,
             " holds no optimizer state (it was saved with --no-save-optim); load "
             "it with --no-load-optim or --finetune");
  const std::string mine = optimizer_name(config_.optimizer.kind);
  PGPT_CHECK(ConfigError, state.optimizer == mine, "--optimizer: this run has ", mine, ", the checkpoint ", directory,
             " has ", state.optimizer, "; give the same, or take the weights alone with --no-load-optim or --finetune");
  state_.scheduler.load(state.scheduler);
  state_.optimizer.set_step_count(state.optimizer_steps);
  if (state.scaler && state_.optimizer.loss_scaler().enabled()) {
    state_.optimizer.loss_scaler().set_state({state.scaler->scale, state.scaler->good_steps, state.scaler->hysteresis});
  }
}

void Checkpointer::restore_random(const checkpoint::Manifest& manifest) {
  const checkpoint::Layout& saved = manifest.layout;
  const config::ParallelConfig& p = config_.parallel;
  if (saved.tensor != p.tensor || saved.pipeline != p.pipeline) {
    print_first(concat("(TP, PP) mismatch after resume ((", p.tensor, ", ", p.pipeline, ") vs (", saved.tensor, ", ",
                       saved.pipeline, ") from checkpoint): RNG state will be ignored"));
    return;
  }
  if (!manifest.state.random) {
    print_first(
        "WARNING: the checkpoint holds no random states (it was saved with --no-save-rng); dropout starts anew from "
        "--seed");
    return;
  }
  const checkpoint::RandomState& random = *manifest.state.random;
  if (random.seed != config_.training.seed) {
    print_first(concat("WARNING: --seed is ", config_.training.seed, ", the checkpoint has ", random.seed,
                       ": dropout goes on with the checkpoint's, the order of the data follows --seed"));
  }
  const auto shift = static_cast<std::uint64_t>(random.seed - seed_);
  model::DropoutCursor& dropout = state_.dropout;
  dropout.hidden_seed += shift;
  dropout.attention_seed += shift;
  dropout.hidden_offset = random.hidden_dropout_offset;
  dropout.attention_offset = random.attention_dropout_offset;
  seed_ = random.seed;
}

std::optional<RunPosition> Checkpointer::load() {
  const config::CheckpointConfig& c = config_.checkpoint;
  if (c.load.empty() && c.pretrained.empty()) return std::nullopt;
  world_.set_activity("loading a checkpoint");
  const std::optional<Source> source = find_source();
  if (!source) return std::nullopt;
  const bool finetune = c.finetune || source->pretrained;
  const bool weights_only = finetune || source->release;
  const bool with_optimizer = !weights_only && c.load_optimizer;
  if (source->release) {
    print_first(concat(" loading release distributed checkpoint from ", source->root));
  } else {
    print_first(concat(" loading distributed checkpoint from ", source->root, " at iteration ", source->iteration));
  }
  RunPosition position;
  run_together([&] {
    const checkpoint::Checkpoint checkpoint(source->directory);
    const checkpoint::Manifest& manifest = checkpoint.manifest();
    const checkpoint::RunState& state = manifest.state;
    PGPT_CHECK(DataError, source->release || state.iteration == source->iteration, source->directory,
               " says that it is of iteration ", state.iteration, ", its name says ", source->iteration,
               "; it was renamed");
    check_arguments(manifest, source->directory, finetune);
    if (with_optimizer) check_precision(manifest, source->directory);
    if (with_optimizer) {
      restore_optimizer(state, source->directory);
      check_update_options(manifest);
    }
    if (!weights_only) warn_of_other_length(manifest);
    load_tensors(checkpoint, with_optimizer);
    if (!with_optimizer && !c.load_main_params) state_.optimizer.reset_masters();
    if (!weights_only && c.load_rng) restore_random(manifest);
    if (!finetune) {
      position = {source->release ? 0 : state.iteration, state.consumed_samples, state.skipped_samples,
                  state.consumed_valid_samples, state.floating_point_operations};
    }
    const checkpoint::Layout& saved = manifest.layout;
    const config::ParallelConfig& p = config_.parallel;
    if (saved.gtp != p.gtp || saved.replicate_data != p.replicate_data) {
      print_first(concat("> the checkpoint was saved with GTP ", saved.gtp, " and data parallel size ",
                         saved.replicate_data, "; it is loaded into GTP ", p.gtp, " and ", p.replicate_data));
    }
  });
  if (c.override_iteration && !finetune) {
    position.iteration = *c.override_iteration;
    position.consumed_samples = *c.override_iteration * config_.training.global_batch_size;
    position.skipped_samples = 0;
  }
  print_first(" checkpoint version 3.0");
  print_first(concat("  successfully loaded checkpoint from ", source->root, " ", coordinates_text(config_.parallel),
                     " at iteration ", position.iteration));
  return position;
}

}  // namespace pgpt::training

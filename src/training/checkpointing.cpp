// Saving: what is written, by whom, and how it becomes a checkpoint. Loading is in checkpoint_loading.cpp.
#include "pgpt/training/checkpointing.h"

#include <ATen/ATen.h>
#include <pthread.h>
#include <torch/version.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>

#include "pgpt/base/error.h"
#include "pgpt/checkpoint/directory.h"
#include "pgpt/checkpoint/safetensors.h"
#include "pgpt/config/parse.h"
#include "pgpt/training/agreement.h"
#include "pgpt/training/device.h"
#include "text.h"

namespace pgpt::training {

namespace fs = std::filesystem;
using checkpoint::LocalTensor;

namespace {

/// Other ranks wait this much beyond their deadline while one is still reading or writing.
constexpr std::chrono::hours kSlowDisk{2};
constexpr int kMostThreads = 8;

/// A thread that leaves signals to the training thread. Throws DataError.
std::thread quiet_thread(const std::function<void()>& work) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread(work);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw DataError(concat("checkpoints: cannot start a thread: ", error.what()));
  }
}

const char* optimizer_name(config::OptimizerKind kind) { return kind == config::OptimizerKind::kAdam ? "adam" : "sgd"; }

bool saves(const config::CheckpointConfig& options, Checkpointer::Kind kind) {
  return kind == Checkpointer::Kind::kPersistent ? !options.save.empty() : options.non_persistent_interval > 0;
}

fs::path root_of(const config::CheckpointConfig& options, Checkpointer::Kind kind) {
  if (kind == Checkpointer::Kind::kPersistent) return options.save;
  if (!options.non_persistent_dir.empty()) return options.non_persistent_dir;
  return fs::path(options.save) / "non_persistent";
}

}  // namespace

void check_save_folders(const config::Config& config) {
  if (config.training.skip_train) return;
  for (const Checkpointer::Kind kind : {Checkpointer::Kind::kPersistent, Checkpointer::Kind::kNonPersistent}) {
    if (saves(config.checkpoint, kind)) checkpoint::check_writable(root_of(config.checkpoint, kind));
  }
}

std::string coordinates_text(const config::ParallelConfig& parallel) {
  return concat("[ t 1/", parallel.tensor, ", gtp_remat 1/", parallel.gtp, ", p 1/", parallel.pipeline, " ]");
}

Checkpointer::Checkpointer(const config::Config& config, comm::World& world, Groups& groups, at::Device device,
                           TrainedState state, LineSink print)
    : config_(config),
      world_(world),
      all_(*groups.data),
      groups_(groups),
      device_(device),
      state_(state),
      print_(std::move(print)),
      seed_(config.training.seed) {
  PGPT_ASSERT(all_.size() == world.size(), "checkpoints need a group of all ranks");
}

Checkpointer::~Checkpointer() {
  if (remover_.joinable()) remover_.join();
  if (!pending_ || !pending_->writer.joinable()) return;
  cancel_ = true;
  pending_->writer.join();
}

void Checkpointer::print_first(const std::string& line) const {
  if (world_.rank() == 0) print_(line);
}

void Checkpointer::run_together(const std::function<void()>& work) const {
  world_.set_slow(kSlowDisk);
  together(all_, device_, work);
  world_.set_slow(std::chrono::milliseconds(0));
}

bool Checkpointer::enabled(Kind kind) const { return saves(config_.checkpoint, kind); }

checkpoint::IoOptions Checkpointer::io_options() const {
  checkpoint::IoOptions options;
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  // Ranks of a node share its cores; the world size bounds their number where the launcher is not asked again.
  // More than cores, since they wait for the disk most of the time.
  options.threads = std::clamp(4 * cores / std::max(1, std::min(world_.size(), 8)), 1, kMostThreads);
  options.cancel = &cancel_;
  return options;
}

bool Checkpointer::keeps_padding() const {
  return config_.model.weight_init == config::WeightInit::kMegatron && config_.parallel.gtp > 1;
}

std::vector<LocalTensor> Checkpointer::tensors(bool optimizer, bool padding) const {
  std::vector<LocalTensor> result;
  const auto add = [&](const std::string& prefix, const at::Tensor& flat) {
    for (const parameter::Parameter& parameter : state_.store.parameters()) {
      const parameter::ShardLayout& layout = parameter.layout;
      PGPT_ASSERT(layout.cuts.size() <= 1, parameter.spec.name, ": checkpoints know only GTP cuts");
      const at::Tensor local =
          flat.narrow(0, parameter.offset, parameter.num_elements()).view(parameter.weight.sizes());
      const parameter::ShardLayout::Range rows = layout.local_range(0);
      LocalTensor tensor;
      tensor.name = prefix + parameter.spec.name;
      tensor.shape = layout.logical_shape;
      tensor.offset.assign(tensor.shape.size(), 0);
      tensor.offset[0] = rows.begin;
      tensor.values = local.narrow(0, 0, rows.end - rows.begin);
      // Who else holds the same rows: data replicas, and for parameters without cuts the GTP peers as well.
      const comm::Communicator& holders = parameter.sharded() ? *groups_.replicate_data : *groups_.data;
      tensor.replica = holders.rank();
      tensor.replicas = holders.size();
      const std::int64_t padded = local.size(0) - tensor.values.size(0);
      if (padding && parameter.spec.shard_drawn && parameter.sharded() && layout.cuts[0].padding > 0) {
        LocalTensor rest = tensor;
        rest.name += ".gtp_padding";
        rest.shape[0] = layout.cuts[0].padding;
        rest.offset[0] =
            padded > 0 ? layout.cuts[0].index * local.size(0) + tensor.values.size(0) - layout.logical_shape[0] : 0;
        rest.values = local.narrow(0, tensor.values.size(0), padded);
        result.push_back(std::move(rest));
      }
      result.push_back(std::move(tensor));
    }
  };
  add("", state_.store.weights());
  if (optimizer) {
    for (const auto& [kind, flat] : state_.optimizer.state()) add("optimizer.state." + kind + ".", flat);
  }
  return result;
}

std::vector<LocalTensor> Checkpointer::parts() const {
  return checkpoint::writers_part(tensors(config_.checkpoint.save_optimizer, keeps_padding()),
                                  config_.checkpoint.fully_parallel_save);
}

checkpoint::Manifest Checkpointer::describe(const RunPosition& position) const {
  checkpoint::Manifest manifest;
  manifest.program = "pretrain_gpt " + config::version();
  manifest.libtorch = TORCH_VERSION;
  const config::ParallelConfig& p = config_.parallel;
  manifest.layout = {p.world_size, p.tensor, p.pipeline, p.context, p.gtp, p.replicate_data, keeps_padding()};
  for (const auto& [name, value] : config_.arguments) manifest.arguments[name] = value;
  manifest.block_bytes = io_options().block_bytes;
  checkpoint::RunState& state = manifest.state;
  state.iteration = position.iteration;
  state.consumed_samples = position.consumed_samples;
  state.skipped_samples = position.skipped_samples;
  state.consumed_valid_samples = position.consumed_valid_samples;
  state.floating_point_operations = position.floating_point_operations;
  if (config_.checkpoint.save_optimizer) {
    state.optimizer = optimizer_name(config_.optimizer.kind);
    state.optimizer_steps = state_.optimizer.step_count();
    state.scheduler = state_.scheduler.state();
    const optim::LossScaler& scaler = state_.optimizer.loss_scaler();
    if (scaler.enabled())
      state.scaler =
          checkpoint::ScalerState{scaler.state().scale, scaler.state().good_steps, scaler.state().hysteresis};
  }
  if (config_.checkpoint.save_rng) {
    const model::DropoutCursor& dropout = state_.dropout;
    // The seed in force, which a loaded checkpoint may have set; seeds differ from --seed by a rank's constant only.
    state.random = checkpoint::RandomState{seed_, dropout.hidden_offset, dropout.attention_offset};
  }
  return manifest;
}

void Checkpointer::warn_of_later(const RunPosition& position) const {
  const config::CheckpointConfig& c = config_.checkpoint;
  std::error_code error;
  if (world_.rank() != 0 || (!c.load.empty() && fs::equivalent(c.load, c.save, error))) return;
  const std::optional<checkpoint::Tracker> tracker = checkpoint::read_tracker(c.save);
  if (!tracker || tracker->release || tracker->iteration <= position.iteration) return;
  print_(concat("WARNING: --save ", c.save, " already holds iteration ", tracker->iteration,
                " and this run does not load it; its tracker will go back to earlier iterations"));
}

void Checkpointer::start(const RunPosition& position) {
  if (!config_.training.skip_train && enabled(Kind::kPersistent)) run_together([&] { warn_of_later(position); });
  if (config_.checkpoint.async_save && !config_.training.skip_train &&
      (enabled(Kind::kPersistent) || enabled(Kind::kNonPersistent))) {
    // Taking so much memory lasts longer than the copy: done now, so that the first save does not stall training.
    run_together([&] { (void)checkpoint::host_snapshot(parts(), snapshot_); });
  }
  if (!config_.logging.progress) return;
  run_together([&] {
    if (world_.rank() != 0) return;
    const char* job = std::getenv("SLURM_JOB_ID");
    progress_.emplace(config_.checkpoint.save, world_.size(), job == nullptr ? "" : job);
    progress_->start(position.floating_point_operations);
  });
}

void Checkpointer::save(const RunPosition& position, Kind kind) {
  try {
    start_save(position, kind);
  } catch (const AgreedError&) {
    discard();
    throw;
  }
}

void Checkpointer::discard() const noexcept {
  // Best effort: a full disk gets its space back, and what is left is removed by the next save.
  if (world_.rank() != 0 || !pending_ || pending_->partial.empty()) return;
  std::error_code ignored;
  fs::remove_all(pending_->partial, ignored);
}

void Checkpointer::start_save(const RunPosition& position, Kind kind) {
  const bool asynchronous = config_.checkpoint.async_save;
  if (pending_) {
    print_first(concat("WARNING: the asynchronous save of iteration ", pending_->manifest.state.iteration,
                       " is not finished; waiting for it. Save less often, or to a faster disk"));
    finish();
  }
  world_.set_activity(concat("saving the checkpoint of iteration ", position.iteration));
  pending_ = std::make_unique<Pending>();
  Pending& save = *pending_;
  save.root = root_of(config_.checkpoint, kind);
  save.kind = kind;
  print_first(text("[%s] saving checkpoint at iteration %7lld to %s in pgpt format", timestamp().c_str(),
                   static_cast<long long>(position.iteration), save.root.c_str()));
  save.manifest = describe(position);
  run_together([&] {
    save.partial = save.root / ("." + checkpoint::iteration_name(position.iteration) + ".partial");
    if (world_.rank() != 0) return;
    finish_removal();
    if (fs::exists(save.root / checkpoint::iteration_name(position.iteration))) {
      print_first(
          concat("WARNING: overwriting the checkpoint of iteration ", position.iteration, " in ", save.root.string()));
    }
    PGPT_ASSERT(checkpoint::begin_save(save.root, position.iteration) == save.partial);
    if (progress_ && asynchronous && kind == Kind::kPersistent) {
      progress_->saving_async(position.iteration, position.floating_point_operations,
                              static_cast<double>(position.consumed_samples * config_.model.seq_length));
    }
  });
  synchronize(device_);
  save.parts = parts();
  if (!asynchronous) {
    run_together([&] { save.files = checkpoint::write_shards(save.partial, shard_name(), save.parts, io_options()); });
    publish();
    return;
  }
  run_together([&] {
    save.parts = checkpoint::host_snapshot(save.parts, snapshot_);
    start_writer();
  });
  print_first(text("  [%s] scheduled an async checkpoint save at iteration %7lld to %s", timestamp().c_str(),
                   static_cast<long long>(position.iteration), save.root.c_str()));
}

std::string Checkpointer::shard_name() const { return text("shard_%05d", world_.rank()); }

void Checkpointer::start_writer() {
  pending_->writer = quiet_thread([&save = *pending_, name = shard_name(), options = io_options()] {
    try {
      save.files = checkpoint::write_shards(save.partial, name, save.parts, options);
    } catch (...) {
      save.failure = std::current_exception();
    }
    save.done = true;
  });
}

void Checkpointer::publish_written() {
  if (pending_) complete();
}

void Checkpointer::finish() {
  publish_written();
  finish_removal();
}

void Checkpointer::complete() {
  world_.set_activity(concat("finishing the checkpoint of iteration ", pending_->manifest.state.iteration));
  try {
    run_together([&] {
      pending_->writer.join();
      if (pending_->failure) std::rethrow_exception(pending_->failure);
    });
    publish();
  } catch (const AgreedError&) {
    discard();
    throw;
  }
}

void Checkpointer::publish() {
  Pending& save = *pending_;
  checkpoint::RunState& state = save.manifest.state;
  const std::vector<std::string> summaries = gather_texts(all_, device_, checkpoint::summaries_text(save.files));
  run_together([&] {
    if (world_.rank() != 0) return;
    for (const std::string& of_rank : summaries) {
      for (const checkpoint::ShardSummary& file : checkpoint::parse_summaries(of_rank))
        checkpoint::merge(save.manifest, file);
    }
    checkpoint::check_coverage(save.manifest, save.partial.string());
    checkpoint::write_text_atomically((save.partial / checkpoint::kManifestName).string(),
                                      checkpoint::manifest_text(save.manifest));
    const std::optional<checkpoint::Tracker> previous = checkpoint::read_tracker(save.root);
    checkpoint::publish(save.root, save.partial, state.iteration);
    checkpoint::write_tracker(save.root, state.iteration);
    print_(text("  [%s] successfully saved checkpoint from iteration %7lld to %s %s", timestamp().c_str(),
                static_cast<long long>(state.iteration), save.root.c_str(),
                coordinates_text(config_.parallel).c_str()));
    if (progress_ && save.kind == Kind::kPersistent) {
      progress_->saved(state.iteration, state.floating_point_operations,
                       static_cast<double>(state.consumed_samples * config_.model.seq_length),
                       config_.checkpoint.async_save);
    }
    try {
      remove_outdated(previous ? previous->iteration : 0);
    } catch (const std::exception& error) {  // the new checkpoint is complete; an old one too many is no reason to stop
      print_(concat("WARNING: an older checkpoint could not be removed: ", error.what()));
    }
  });
  pending_.reset();
}

void Checkpointer::remove_outdated(std::int64_t previous) {
  const Pending& save = *pending_;
  const std::int64_t iteration = save.manifest.state.iteration;
  const auto removable = [](const fs::path& directory) {
    std::error_code error;
    return fs::is_directory(directory, error) && !fs::is_symlink(directory, error);
  };
  std::vector<fs::path> older;
  if (save.kind == Kind::kNonPersistent) {
    for (const fs::directory_entry& entry : fs::directory_iterator(save.root)) {
      const std::string name = entry.path().filename().string();
      if (name.rfind("iter_", 0) == 0 && name != checkpoint::iteration_name(iteration)) older.push_back(entry.path());
    }
  } else {
    const std::int64_t retain = config_.checkpoint.save_retain_interval;
    if (retain == 0 || previous == 0 || previous == iteration || previous % retain == 0) return;
    older.push_back(save.root / checkpoint::iteration_name(previous));
  }
  older.erase(std::remove_if(older.begin(), older.end(), [&](const fs::path& path) { return !removable(path); }),
              older.end());
  if (older.empty()) return;
  for (fs::path& directory : older) directory = checkpoint::hide_checkpoint(directory);
  remover_ = quiet_thread([this, older] {
    try {
      for (const fs::path& directory : older) checkpoint::remove_hidden(directory);
    } catch (const std::exception& error) {
      removal_failure_ = error.what();
    }
  });
  if (save.kind == Kind::kNonPersistent) return;
  print_(text("  successfully deleted checkpoint from iteration %7lld at %s", static_cast<long long>(previous),
              save.root.c_str()));
  if (progress_) progress_->deleted(previous);
}

void Checkpointer::finish_removal() {
  if (!remover_.joinable()) return;
  remover_.join();
  if (!removal_failure_.empty()) print_(concat("WARNING: an older checkpoint is not removed: ", removal_failure_));
  removal_failure_.clear();
}

}  // namespace pgpt::training

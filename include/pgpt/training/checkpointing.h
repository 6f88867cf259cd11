#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "pgpt/checkpoint/shard.h"
#include "pgpt/comm/world.h"
#include "pgpt/config/config.h"
#include "pgpt/model/context.h"
#include "pgpt/optim/optimizer.h"
#include "pgpt/optim/schedule.h"
#include "pgpt/parameter/parameter_store.h"
#include "pgpt/training/groups.h"
#include "pgpt/training/progress.h"
#include "pgpt/training/training_log.h"

namespace pgpt::training {

/// How far a run has come.
struct RunPosition {
  std::int64_t iteration = 0;
  std::int64_t consumed_samples = 0, skipped_samples = 0, consumed_valid_samples = 0;
  double floating_point_operations = 0;
};

/// The tensors and counters that a checkpoint saves and restores in place.
struct TrainedState {
  parameter::ParameterStore& store;
  optim::Optimizer& optimizer;
  optim::ParamScheduler& scheduler;
  model::DropoutCursor& dropout;
};

/// Saves and loads checkpoints of one run, on every rank (docs/checkpoints.md). All methods that are not const are
/// collective over the world, and when one rank fails all throw the same AgreedError; the checkpoints that existed
/// before stay what they were.
class Checkpointer {
 public:
  enum class Kind { kPersistent, kNonPersistent };

  /// References are kept. `print` writes rank 0's lines to standard output.
  Checkpointer(const config::Config& config, comm::World& world, Groups& groups, at::Device device, TrainedState state,
               LineSink print);
  /// Stops a writer that is still at work; its checkpoint is not published.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Loads what the options ask for into the state. Returns where the run goes on; nothing when it starts from scratch.
  [[nodiscard]] std::optional<RunPosition> load();
  /// Opens progress.txt and takes the host memory of asynchronous saves, when asked for; warns of later checkpoints in
  /// --save that this run did not load.
  void start(const RunPosition& position);
  /// Whether saves of this kind are asked for.
  [[nodiscard]] bool enabled(Kind kind) const;
  /// Saves. With --async-save it returns when the device has been copied to the host; the rest follows in the
  /// background.
  void save(const RunPosition& position, Kind kind);
  /// Whether this rank's part of a background save is written, or failed to be.
  [[nodiscard]] bool part_written() const { return pending_ && pending_->done; }
  /// Publishes the background save whose part every rank has written; does nothing when there is none.
  void publish_written();
  /// Waits for a background save and publishes it, and for the removal of older checkpoints.
  void finish();

 private:
  /// A checkpoint that was found, before it is opened.
  struct Source {
    std::string root, directory;
    std::int64_t iteration = 0;
    bool release = false;
    bool pretrained = false;
  };
  /// A save between its start and its publication.
  struct Pending {
    std::filesystem::path root, partial;
    Kind kind = Kind::kPersistent;
    checkpoint::Manifest manifest;  ///< all but files and tensors
    std::vector<checkpoint::LocalTensor> parts;
    std::vector<checkpoint::ShardSummary> files;
    std::exception_ptr failure;
    std::atomic<bool> done{false};
    std::thread writer;
  };

  [[nodiscard]] std::optional<Source> find_source();
  [[nodiscard]] std::optional<Source> choose_source() const;
  void check_arguments(const checkpoint::Manifest& manifest, const std::string& directory, bool finetune) const;
  void check_precision(const checkpoint::Manifest& manifest, const std::string& directory) const;
  void load_tensors(const checkpoint::Checkpoint& checkpoint, bool with_optimizer);
  /// Options of the update that no stored state holds: refuses other group bounds, warns of other Adam or SGD numbers.
  void check_update_options(const checkpoint::Manifest& manifest) const;
  /// Warns when the order of the data may differ from that of the run that saved.
  void warn_of_other_length(const checkpoint::Manifest& manifest) const;
  void restore_optimizer(const checkpoint::RunState& state, const std::string& directory);
  void restore_random(const checkpoint::Manifest& manifest);
  /// Model weights, optimizer state, and with `padding` the padding rows as tensors of their own.
  [[nodiscard]] std::vector<checkpoint::LocalTensor> tensors(bool optimizer, bool padding) const;
  [[nodiscard]] bool keeps_padding() const;
  /// What this rank writes.
  [[nodiscard]] std::vector<checkpoint::LocalTensor> parts() const;
  [[nodiscard]] checkpoint::Manifest describe(const RunPosition& position) const;
  [[nodiscard]] checkpoint::IoOptions io_options() const;
  [[nodiscard]] std::string shard_name() const;
  void start_save(const RunPosition& position, Kind kind);
  void discard() const noexcept;
  /// Warns when saves will move the tracker back.
  void warn_of_later(const RunPosition& position) const;
  void start_writer();
  void complete();
  void publish();
  void remove_outdated(std::int64_t previous);
  /// Waits for the removal of older checkpoints.
  void finish_removal();
  void print_first(const std::string& line) const;
  void run_together(const std::function<void()>& work) const;

  const config::Config& config_;
  comm::World& world_;
  comm::Communicator& all_;
  Groups& groups_;
  at::Device device_;
  TrainedState state_;
  LineSink print_;
  std::optional<ProgressFile> progress_;
  std::unique_ptr<Pending> pending_;
  std::atomic<bool> cancel_{false};
  std::int64_t seed_;    // --seed, or that of a checkpoint whose random streams go on
  std::thread remover_;  // deletes files of older checkpoints, on rank 0
  std::string removal_failure_;
  std::vector<at::Tensor> snapshot_;  // reused by asynchronous saves
};

/// Argument dump of the checkpoint in a --load folder, for --use-checkpoint-args; nothing when the folder has none.
/// Throws DataError.
[[nodiscard]] std::optional<std::map<std::string, std::string>> stored_arguments(const std::string& load,
                                                                                 std::optional<std::int64_t> step);

/// Creates the folders that this run saves into and tries to write there; does nothing with --skip-train. Throws
/// DataError.
void check_save_folders(const config::Config& config);

/// "[ t 1/1, gtp_remat 1/2, p 1/1 ]": this rank's coordinates and the degrees, as the reference prints them.
[[nodiscard]] std::string coordinates_text(const config::ParallelConfig& parallel);

}  // namespace pgpt::training

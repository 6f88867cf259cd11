#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

// Names and atomic changes of the folders that hold checkpoints. Functions throw DataError naming path and cause
// unless told otherwise.
namespace pgpt::checkpoint {

/// What to do about a damaged checkpoint, in the words of both programs.
inline constexpr auto kAnotherCheckpoint = "; use another checkpoint (pretrain_gpt --ckpt-step N, gpt_tool --step N)";

/// "iter_0000100".
[[nodiscard]] std::string iteration_name(std::int64_t iteration);
/// ROOT/latest_checkpointed_iteration.txt.
[[nodiscard]] std::filesystem::path tracker_path(const std::filesystem::path& root);

/// What the tracker file names.
struct Tracker {
  std::int64_t iteration = 0;
  bool release = false;  ///< converted weights without training state, in ROOT/release
};
/// Nothing when there is no tracker. Throws DataError when it holds neither an iteration nor "release".
[[nodiscard]] std::optional<Tracker> read_tracker(const std::filesystem::path& root);
/// Replaces the tracker in one step that survives a crash.
void write_tracker(const std::filesystem::path& root, std::int64_t iteration);
/// The folder of one checkpoint: ROOT/iter_NNNNNNN or ROOT/release, also where an interrupted overwrite left it.
[[nodiscard]] std::filesystem::path checkpoint_path(const std::filesystem::path& root, const Tracker& tracker);
/// The checkpoint folder that `path` means: itself when it has a manifest, else the one of `iteration`, else the one
/// its tracker names.
[[nodiscard]] std::filesystem::path find_checkpoint(const std::filesystem::path& path,
                                                    std::optional<std::int64_t> iteration);

/// Throws ConfigError when --load names the folder of one checkpoint, not the one that holds tracker and checkpoints.
void refuse_single_checkpoint(const std::filesystem::path& load);

/// Creates ROOT and tries that a file can be written there.
void check_writable(const std::filesystem::path& root);
/// Creates ROOT and an empty folder for the files of one save, which no reader takes for a checkpoint; removes what
/// interrupted saves left.
[[nodiscard]] std::filesystem::path begin_save(const std::filesystem::path& root, std::int64_t iteration);
/// Makes a finished folder the checkpoint of its iteration, in one rename; an older one of the same iteration is
/// removed after it was replaced. Its files must have been synced.
void publish(const std::filesystem::path& root, const std::filesystem::path& finished, std::int64_t iteration);
/// Takes a checkpoint away in a single rename. Returns its hidden folder, for remove_hidden; the next begin_save
/// removes it too.
[[nodiscard]] std::filesystem::path hide_checkpoint(const std::filesystem::path& directory);
/// Removes a folder with all its files, which can last on large ones.
void remove_hidden(const std::filesystem::path& directory);

/// Writes directory entries to the disk.
void sync_directory(const std::filesystem::path& directory);

}  // namespace pgpt::checkpoint

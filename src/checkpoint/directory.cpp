#include "pgpt/checkpoint/directory.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <vector>

#include "pgpt/base/error.h"
#include "pgpt/checkpoint/manifest.h"
#include "pgpt/checkpoint/safetensors.h"

namespace pgpt::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPartial = ".partial";
constexpr const char* kReplaced = ".replaced";
constexpr const char* kDeleted = ".deleted";

/// ROOT/.iter_0000100.partial and its like: hidden, so that nobody takes them for checkpoints.
fs::path hidden(const fs::path& directory, const char* suffix) {
  return directory.parent_path() / concat(".", directory.filename().string(), suffix);
}

void erase(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  PGPT_CHECK(DataError, !error, "cannot remove ", path.string(), ": ", error.message(), "; check its permissions");
}

void move(const fs::path& from, const fs::path& to) {
  PGPT_CHECK(DataError, std::rename(from.c_str(), to.c_str()) == 0, "cannot rename ", from.string(), " to ",
             to.string(), ": ", std::strerror(errno));
}

/// Swaps two names in one step; false where the file system cannot.
bool exchange(const fs::path& a, const fs::path& b) {
#ifdef SYS_renameat2
  constexpr unsigned kExchange = 2;  // RENAME_EXCHANGE
  return ::syscall(SYS_renameat2, AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), kExchange) == 0;
#else
  (void)a;
  (void)b;
  return false;
#endif
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

void create_root(const fs::path& root) {
  std::error_code error;
  fs::create_directories(root, error);
  PGPT_CHECK(DataError, !error && fs::is_directory(root), "--save: cannot create the folder ", root.string(), ": ",
             error ? error.message() : "a file of this name exists", "; give one that can be written");
}

}  // namespace

std::string iteration_name(std::int64_t iteration) {
  char name[32];
  std::snprintf(name, sizeof name, "iter_%07lld", static_cast<long long>(iteration));
  return name;
}

fs::path tracker_path(const fs::path& root) { return root / "latest_checkpointed_iteration.txt"; }

std::optional<Tracker> read_tracker(const fs::path& root) {
  const fs::path path = tracker_path(root);
  std::error_code error;
  if (!fs::exists(path, error)) {
    PGPT_CHECK(DataError, !error, "cannot look for ", path.string(), ": ", error.message());
    return std::nullopt;
  }
  std::ifstream file(path);
  PGPT_CHECK(DataError, file.good(), "cannot read ", path.string(), ": ", std::strerror(errno));
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const auto first = text.find_first_not_of(" \t\r\n");
  const auto last = text.find_last_not_of(" \t\r\n");
  text = first == std::string::npos ? "" : text.substr(first, last - first + 1);
  Tracker tracker;
  if (text == "release") {
    tracker.release = true;
    return tracker;
  }
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), tracker.iteration);
  PGPT_CHECK(DataError, status == std::errc() && end == text.data() + text.size() && tracker.iteration >= 0,
             path.string(), " holds '", text.substr(0, 40),
             "', which is neither an iteration nor 'release'; write the number of a complete iter_ folder into it",
             kAnotherCheckpoint);
  return tracker;
}

void write_tracker(const fs::path& root, std::int64_t iteration) {
  write_text_atomically(tracker_path(root).string(), std::to_string(iteration));
  sync_directory(root);
}

fs::path checkpoint_path(const fs::path& root, const Tracker& tracker) {
  const fs::path path = root / (tracker.release ? std::string("release") : iteration_name(tracker.iteration));
  std::error_code error;
  if (fs::is_directory(path, error)) return path;
  const fs::path replaced = hidden(path, kReplaced);
  return fs::is_directory(replaced, error) ? replaced : path;
}

fs::path find_checkpoint(const fs::path& path, std::optional<std::int64_t> iteration) {
  std::error_code error;
  const bool exists = fs::exists(path, error);
  PGPT_CHECK(DataError, exists || error, path.string(),
             " does not exist; give the folder that --save named, or one checkpoint in it");
  if (iteration) return checkpoint_path(path, {*iteration, false});
  if (fs::exists(path / kManifestName, error)) return path;
  const std::optional<Tracker> tracker = fs::is_directory(path, error) ? read_tracker(path) : std::nullopt;
  PGPT_CHECK(DataError, tracker, path.string(), " is no checkpoint: it has neither ", kManifestName, " nor ",
             tracker_path("").string(), "; give the folder that --save named, or one checkpoint in it");
  return checkpoint_path(path, *tracker);
}

void refuse_single_checkpoint(const fs::path& load) {
  std::error_code error;
  if (!fs::exists(load / kManifestName, error) || fs::exists(tracker_path(load), error)) return;
  fs::path folder = fs::absolute(load).lexically_normal();
  if (!folder.has_filename()) folder = folder.parent_path();  // it was written with a slash at its end
  const std::string name = folder.filename().string();
  fs::path root = load.has_filename() ? load.parent_path() : load.parent_path().parent_path();
  if (load.lexically_normal() == "." || root.empty()) root = folder.parent_path();
  if (name == "release") {
    throw ConfigError(concat("--load ", load.string(), " is one checkpoint; give --load ", root.string(),
                             ", where a tracker file says release"));
  }
  const std::string begin = "iter_";
  std::int64_t iteration = 0;
  const char* const end = name.data() + name.size();
  const bool numbered = name.rfind(begin, 0) == 0 &&
                        std::from_chars(name.data() + begin.size(), end, iteration).ptr == end &&
                        iteration_name(iteration) == name;
  PGPT_CHECK(ConfigError, numbered, "--load ", load.string(),
             " is one checkpoint, under a name of its own; rename it to ", (root / "iter_NNNNNNN").string(),
             " with its iteration, and give --load ", root.string(), " --ckpt-step with that number");
  throw ConfigError(
      concat("--load ", load.string(), " is one checkpoint; give --load ", root.string(), " --ckpt-step ", iteration));
}

void check_writable(const fs::path& root) {
  create_root(root);
  // Under a name that the next save removes, should the process be killed right here.
  const fs::path probe = hidden(root / concat("iter_test_", ::getpid()), kPartial);
  const int descriptor = ::open(probe.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  int cause = descriptor < 0 ? errno : 0;
  if (descriptor >= 0) {
    if (::write(descriptor, "x", 1) != 1) cause = errno;
    if (::close(descriptor) != 0 && cause == 0) cause = errno;  // network file systems may tell a full disk here
    ::unlink(probe.c_str());
  }
  PGPT_CHECK(DataError, cause == 0, "--save: cannot create ", probe.string(), ": ", std::strerror(cause),
             "; check permissions and free space");
}

fs::path begin_save(const fs::path& root, std::int64_t iteration) {
  create_root(root);
  std::error_code error;
  std::vector<fs::path> leftovers;
  for (fs::directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.rfind(".iter_", 0) != 0) continue;
    if (ends_with(name, kPartial) || ends_with(name, kDeleted)) leftovers.push_back(it->path());
    if (ends_with(name, kReplaced) &&
        fs::is_directory(root / name.substr(1, name.size() - 1 - std::strlen(kReplaced)))) {
      leftovers.push_back(it->path());
    }
  }
  PGPT_CHECK(DataError, !error, "--save: cannot list ", root.string(), ": ", error.message());
  for (const fs::path& path : leftovers) erase(path);
  const fs::path partial = hidden(root / iteration_name(iteration), kPartial);
  fs::create_directory(partial, error);
  PGPT_CHECK(DataError, !error, "--save: cannot create ", partial.string(), ": ", error.message(),
             "; check permissions and free space");
  return partial;
}

void publish(const fs::path& root, const fs::path& finished, std::int64_t iteration) {
  sync_directory(finished);
  const fs::path target = root / iteration_name(iteration);
  std::error_code error;
  if (!fs::exists(target, error)) {
    move(finished, target);
    sync_directory(root);
    return;
  }
  if (exchange(finished, target)) {  // the older one is now under the partial name
    sync_directory(root);
    erase(finished);
    return;
  }
  const fs::path replaced = hidden(target, kReplaced);
  erase(replaced);
  move(target, replaced);  // until the next rename, checkpoint_path finds it there
  move(finished, target);
  sync_directory(root);
  erase(replaced);
}

fs::path hide_checkpoint(const fs::path& directory) {
  const fs::path deleted = hidden(directory, kDeleted);
  erase(deleted);
  move(directory, deleted);
  return deleted;
}

void remove_hidden(const fs::path& directory) { erase(directory); }

void sync_directory(const fs::path& directory) {
  const int descriptor = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  PGPT_CHECK(DataError, descriptor >= 0, "cannot open ", directory.string(), ": ", std::strerror(errno));
  const int result = ::fsync(descriptor);
  const int cause = errno;
  ::close(descriptor);
  // Some network file systems cannot sync folders; their renames are durable by themselves.
  PGPT_CHECK(DataError, result == 0 || cause == EINVAL || cause == EROFS, "cannot write ", directory.string(), ": ",
             std::strerror(cause));
}

}  // namespace pgpt::checkpoint

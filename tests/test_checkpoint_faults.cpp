// Damage to the files of a run: every rank stops with one message, and nothing of the older checkpoints is lost.

#include <sys/mount.h>
#include <unistd.h>

#include <random>

#include "pgpt/checkpoint/directory.h"
#include "support/catch.h"
#include "support/text.h"
#include "test_checkpoint_support.h"

using namespace pgpt;
using test::contains;
using test::read_text;
using test::write_text;
namespace fs = std::filesystem;

namespace {

/// A mounted memory disk; needs root. Unmounts with the object.
class SmallDisk {
 public:
  SmallDisk(std::string path, const std::string& options, unsigned long flags = 0) : path_(std::move(path)) {
    fs::create_directories(path_);
    mounted_ = ::mount("tmpfs", path_.c_str(), "tmpfs", flags, options.c_str()) == 0;
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;
  ~SmallDisk() {
    if (mounted_) ::umount(path_.c_str());
  }
  [[nodiscard]] bool mounted() const { return mounted_; }
  bool read_only() { return ::mount("tmpfs", path_.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "") == 0; }

 private:
  std::string path_;
  bool mounted_ = false;
};

}  // namespace

TEST_CASE("a damaged checkpoint stops all ranks and names the file", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  const std::string save = folder.path("s");
  const std::string flags = "--bf16 " + test::gtp(2);
  (void)test::train(flags + "--save " + save + " --save-interval 2 --exit-interval 4", 2);
  const fs::path damaged = test::iteration_path(save, 4);
  std::mt19937 random(5);
  for (const std::string name : {"shard_00000.safetensors", "shard_00001.safetensors", "manifest.json"}) {
    const std::string bytes = read_text(damaged / name);
    for (const int kind : {0, 1, 2}) {
      INFO(name << ", kind of damage " << kind);
      if (kind == 0) {
        std::string bad = bytes;
        bad[random() % bad.size()] ^= 0x10;
        write_text(damaged / name, bad);
      } else if (kind == 1) {
        write_text(damaged / name, bytes.substr(0, random() % bytes.size()));
      } else {
        fs::remove(damaged / name);
      }
      const test::Failure failure = test::train_fails(flags + "--load " + save, 2);
      INFO(failure.message);
      CHECK(failure.code == 2);
      CHECK(contains(failure.message, (damaged / name).string()));
      // The older one is still there for the asking.
      CHECK(test::train(flags + "--load " + save + " --ckpt-step 2", 2).steps.front().iteration == 3);
      write_text(damaged / name, bytes);
    }
  }
  CHECK(test::train(flags + "--load " + save, 2).steps.front().iteration == 5);
}

TEST_CASE("a folder that cannot be written stops all ranks before the first step", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  write_text(folder.path("file"), "x");
  const std::string below = folder.path("file") + "/below";
  const std::string temporary = "--non-persistent-save-interval 2 --non-persistent-ckpt-type global ";
  // Nobody, root included, may create a file in /proc.
  for (const auto& [flags, named] : {std::pair<std::string, std::string>{"--save " + folder.path("file"), "folder "},
                                     {"--save " + below, "folder " + below},
                                     {"--save /proc", "/proc/.iter_test_"},
                                     {temporary + "--non-persistent-global-ckpt-dir " + below, "folder " + below}}) {
    INFO(flags);
    // The end of a run of no length is no save: what is told is found at the start.
    const test::Failure failure = test::train_fails(
        "--bf16 " + test::gtp(2) + "--save-interval 100 --exit-signal-handler --train-iters 0 " + flags, 2);
    CHECK(failure.code == 2);
    CHECK(contains(failure.message, "--save: cannot create " + (named.front() == '/' ? named : "the " + named)));
  }
  // What was tried leaves nothing.
  (void)test::train("--bf16 --train-iters 0 --save " + folder.path("new"), 1);
  CHECK(fs::is_empty(folder.path("new")));
}

TEST_CASE("a read-only folder stops all ranks and keeps the checkpoint", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  // Permissions do not bind root, who can mount a disk instead.
  SmallDisk disk(folder.path("disk"), "size=64m");
  if (!disk.mounted() && ::geteuid() == 0) {
    WARN("this root may not mount a disk: skipped");
    return;
  }
  const std::string flags = "--bf16 " + test::gtp(2) + "--save-interval 2 --save " + folder.path("disk") + " ";
  (void)test::train(flags + "--exit-interval 2", 2);
  const fs::perms before = fs::status(folder.path("disk")).permissions();
  if (disk.mounted()) {
    REQUIRE(disk.read_only());
  } else {
    fs::permissions(folder.path("disk"), fs::perms::owner_read | fs::perms::owner_exec);
  }
  for (const std::string more : {"", "--async-save --use-persistent-ckpt-worker "}) {
    const test::Failure failure = test::train_fails(flags + more + "--load " + folder.path("disk"), 2);
    CHECK(failure.code == 2);
    CHECK(contains(failure.message, disk.mounted() ? "Read-only file system" : "Permission denied"));
  }
  CHECK(test::train("--bf16 " + test::gtp(2) + "--load " + folder.path("disk"), 2).steps.front().iteration == 3);
  if (!disk.mounted()) fs::permissions(folder.path("disk"), before);
}

TEST_CASE("a full disk stops all ranks and keeps the checkpoint", "[cpu][checkpoint]") {
  const test::ScratchFolder folder;
  // One checkpoint is about 0.55 MB: the second or third does not fit.
  SmallDisk disk(folder.path("disk"), "size=1400k");
  if (!disk.mounted()) {
    WARN("mounting a disk needs root: skipped");
    return;
  }
  for (const std::string more : {"", "--async-save --use-persistent-ckpt-worker "}) {
    const std::string flags = "--bf16 " + test::gtp(2) + more + "--save-interval 1 --save " + folder.path("disk") + " ";
    const test::Failure failure = test::train_fails(flags, 2);
    CHECK(failure.code == 2);
    INFO(failure.message);
    CHECK(contains(failure.message, "No space left on device"));
    const std::int64_t last = checkpoint::read_tracker(folder.path("disk"))->iteration;
    CHECK(last >= 1);
    checkpoint::Checkpoint(test::iteration_path(folder.path("disk"), last)).verify({});
    // The half-written one has given its space back and left no folder that a reader could take.
    for (const fs::directory_entry& entry : fs::directory_iterator(folder.path("disk"))) {
      CHECK(entry.path().filename().string().find(".partial") == std::string::npos);
    }
    CHECK(test::train("--bf16 " + test::gtp(2) + "--load " + folder.path("disk"), 2).steps.front().iteration ==
          last + 1);
    for (const fs::directory_entry& entry : fs::directory_iterator(folder.path("disk"))) fs::remove_all(entry.path());
  }
}

#include "conversion.h"

#include <ATen/ATen.h>
#include <torch/version.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <system_error>
#include <thread>

#include "pgpt/base/error.h"
#include "pgpt/checkpoint/directory.h"
#include "pgpt/checkpoint/safetensors.h"
#include "pgpt/checkpoint/shard.h"
#include "pgpt/config/parse.h"
#include "text.h"

namespace pgpt::training {

namespace fs = std::filesystem;

namespace {

/// Weights held in memory at a time while a checkpoint is made.
constexpr std::uint64_t kShardBytes = std::uint64_t{2} << 30;

fs::path without_slash(const fs::path& path) {
  const fs::path clean = path.lexically_normal();
  return clean.has_filename() ? clean : clean.parent_path();
}

}  // namespace

NewFolder::NewFolder(const std::string& command, const fs::path& target)
    : target_(without_slash(fs::absolute(target))) {
  std::error_code error;
  PGPT_CHECK(DataError,
             !fs::exists(target_, error) || (fs::is_directory(target_, error) && fs::is_empty(target_, error)), command,
             ": ", target.string(), " exists and is no empty folder; give a new one");
  partial_ = target_.parent_path() / concat(".", target_.filename().string(), ".partial");
  fs::remove_all(partial_, error);
  fs::create_directories(partial_, error);
  PGPT_CHECK(DataError, !error, command, ": cannot create ", partial_.string(), ": ", error.message());
}

NewFolder::~NewFolder() {
  std::error_code ignored;
  if (!published_) fs::remove_all(partial_, ignored);
}

void NewFolder::publish() {
  checkpoint::sync_directory(partial_);
  PGPT_CHECK(DataError, std::rename(partial_.c_str(), target_.c_str()) == 0, "cannot rename ", partial_.string(),
             " to ", target_.string(), ": ", std::strerror(errno));
  published_ = true;
  checkpoint::sync_directory(target_.parent_path());
}

at::ScalarType weight_type(const std::string& command, const std::string& name) {
  if (name == "float32") return at::kFloat;
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float16") return at::kHalf;
  throw ConfigError(concat(command, ": --dtype ", name, " is unknown; use float32, bfloat16 or float16"));
}

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  PGPT_CHECK(DataError, file.good() || file.eof(), "cannot read ", path.string(), ": ", std::strerror(errno));
  return text;
}

void write_imported(const fs::path& root, checkpoint::Manifest manifest, const std::vector<ImportedTensor>& tensors,
                    ImportKind kind) {
  PGPT_CHECK(DataError, !fs::exists(checkpoint::tracker_path(root)), "import: ", root.string(),
             " holds a checkpoint already; give another folder");
  std::error_code error;
  fs::create_directories(root, error);
  PGPT_CHECK(DataError, !error, "import: cannot create ", root.string(), ": ", error.message());
  const std::int64_t iteration = manifest.state.iteration;
  NewFolder folder("import", root / (kind == ImportKind::kRelease ? "release" : checkpoint::iteration_name(iteration)));
  manifest.program = "gpt_tool " + config::version();
  manifest.libtorch = TORCH_VERSION;
  checkpoint::IoOptions io;
  io.threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 8U));
  manifest.block_bytes = io.block_bytes;
  std::vector<checkpoint::LocalTensor> parts;
  int shard = 0;
  const auto flush = [&] {
    const std::string name = text("shard_%05d", shard++);
    for (const checkpoint::ShardSummary& file : checkpoint::write_shards(folder.path(), name, parts, io))
      checkpoint::merge(manifest, file);
    parts.clear();
  };
  for (const ImportedTensor& tensor : tensors) {
    checkpoint::LocalTensor part;
    part.name = tensor.name;
    part.shape = tensor.shape;
    part.offset.assign(tensor.shape.size(), 0);
    part.values = tensor.read().contiguous();
    PGPT_ASSERT(part.values.sizes().vec() == tensor.shape, tensor.name);
    parts.push_back(std::move(part));
    if (checkpoint::tensor_bytes(parts) >= kShardBytes) flush();
  }
  if (!parts.empty()) flush();
  checkpoint::check_coverage(manifest, folder.path().string());
  checkpoint::write_text_atomically((folder.path() / checkpoint::kManifestName).string(),
                                    checkpoint::manifest_text(manifest));
  folder.publish();
  if (kind == ImportKind::kIteration) {
    checkpoint::write_tracker(root, iteration);
  } else {
    checkpoint::write_text_atomically(checkpoint::tracker_path(root).string(), "release");
    checkpoint::sync_directory(root);
  }
}

}  // namespace pgpt::training

#include "pgpt/training/gemm_tuning.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

#include "pgpt/base/error.h"
#include "pgpt/training/agreement.h"

namespace pgpt::training {
namespace {

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  PGPT_CHECK(DataError, file && !file.bad(), "--gemm-algorithms: cannot read ", path);
  return text.str();
}

/// Readers see the old text or the new one, never a part.
void replace_text(const std::string& path, const std::string& text) {
  const std::string temporary = concat(path, ".", ::getpid(), ".partial");
  {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    file << text;
    file.close();
    PGPT_CHECK(DataError, !file.fail(), "--gemm-algorithms: cannot write ", temporary,
               "; name a file in a folder that exists, can be written and is not full");
  }
  PGPT_CHECK(DataError, std::rename(temporary.c_str(), path.c_str()) == 0, "--gemm-algorithms: cannot rename ",
             temporary, " to ", path);
}

}  // namespace

GemmTuning::GemmTuning(const config::Config& config, comm::Communicator& all, at::Device device,
                       const std::function<void(const std::string&)>& print)
    : all_(all), device_(device), path_(config.training.gemm_algorithms) {
  if (path_.empty()) return;
  const std::optional<kernels::GemmLibrary> library = device.is_cuda() ? kernels::gemm_library() : std::nullopt;
  if (!library) {
    if (all.rank() == 0) print("WARNING: --gemm-algorithms has no effect on a CPU");
    return;
  }
  library_ = *library;
  std::string text;
  bool found = false;
  together(all, device, [&] {
    if (all.rank() != 0) return;
    found = std::filesystem::exists(path_);
    if (found) text = read_text(path_);
    if (!found) replace_text(path_, kernels::GemmAlgorithms().to_json(library_));  // shows now that it can be written
  });
  const std::vector<std::string> libraries = gather_texts(all, device, concat(library_.device, ", ", library_.version));
  text = gather_texts(all, device, text).front();
  found = agree_max(all, device, {found ? 1 : 0}).front() != 0;
  algorithms_.emplace();
  together(all, device, [&] {
    for (std::size_t rank = 0; rank < libraries.size(); ++rank) {
      PGPT_CHECK(ConfigError, libraries[rank] == libraries[0], "--gemm-algorithms: rank ", rank, " has ",
                 libraries[rank], " (cuBLASLt), rank 0 has ", libraries[0], "; remove the option or use equal GPUs");
    }
    if (!found) return;
    algorithms_->read(text, path_, library_);
    kernels::check_gemm_algorithms(*algorithms_, path_);
  });
  kernels::GemmAlgorithms::Agree agree;
  if (all.size() > 1) agree = [this](const std::string& mine) { return gather_texts(all_, device_, mine).front(); };
  algorithms_->tune(all.rank() == 0, std::move(agree), config.training.gemm_tuning_ms);
  if (all.rank() == 0) {
    print(concat("> matrix products: cuBLASLt, ", algorithms_->size(), " algorithms from ", path_,
                 "; others are chosen by timing when they are first used"));
  }
}

void GemmTuning::save() {
  if (!algorithms_ || !algorithms_->grown()) return;
  together(all_, device_, [this] {
    if (all_.rank() == 0) replace_text(path_, algorithms_->to_json(library_));
  });
  algorithms_->clear_grown();
}

}  // namespace pgpt::training

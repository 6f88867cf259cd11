#include "pgpt/training/library_errors.h"

#include <c10/util/Exception.h>

#include <string>

namespace pgpt::training {
namespace {

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

bool mentions_device(const std::string& text) {
  for (const char* word : {"CUDA", "NCCL", "cuDNN", "CUDNN", "cuBLAS", "CUBLAS", "cublas"}) {
    if (text.find(word) != std::string::npos) return true;
  }
  return false;
}

}  // namespace

Error translate(const std::exception& error) {
  if (const auto* own = dynamic_cast<const Error*>(&error)) return *own;
  const auto* library = dynamic_cast<const c10::Error*>(&error);
  const std::string text = library != nullptr ? library->what_without_backtrace() : error.what();
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr) {
    return {ExitCode::kDevice,
            concat(first_line(text),
                   " What needs less: a smaller --micro-batch-size, more --tensor-parallel-num-weight-shards, "
                   "--recompute-granularity full, --logits-chunks; the same command with --dry-run shows where memory "
                   "goes")};
  }
  return {mentions_device(text) ? ExitCode::kDevice : ExitCode::kConfiguration, first_line(text)};
}

}  // namespace pgpt::training

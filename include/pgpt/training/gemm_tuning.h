#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>

#include "pgpt/comm/communicator.h"
#include "pgpt/config/config.h"
#include "pgpt/kernels/gemm_algorithms.h"

namespace pgpt::training {

/// --gemm-algorithms: loads the file on rank 0 for all ranks, has rank 0 choose for new shapes, writes the file.
class GemmTuning {
 public:
  /// Collective over `all`, which holds every rank and must outlive this. `print` receives rank 0's start-up line.
  /// Every rank throws the same AgreedError when the file is damaged or not for these devices.
  GemmTuning(const config::Config& config, comm::Communicator& all, at::Device device,
             const std::function<void(const std::string&)>& print);
  GemmTuning(const GemmTuning&) = delete;
  GemmTuning& operator=(const GemmTuning&) = delete;

  /// For kernels::Policy: null without the option and on a CPU.
  [[nodiscard]] kernels::GemmAlgorithms* algorithms() noexcept { return algorithms_ ? &*algorithms_ : nullptr; }
  /// Rank 0 replaces the file when there are new choices. Collective; when it fails every rank throws AgreedError.
  void save();

 private:
  comm::Communicator& all_;
  at::Device device_;
  std::string path_;
  kernels::GemmLibrary library_;
  std::optional<kernels::GemmAlgorithms> algorithms_;
};

}  // namespace pgpt::training

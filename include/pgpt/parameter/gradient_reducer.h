#pragma once

#include <functional>
#include <string>
#include <vector>

#include "pgpt/comm/communicator.h"
#include "pgpt/parameter/parameter_store.h"

namespace pgpt::parameter {

struct ReducerOptions {
  bool overlap = false;           ///< reduce a bucket as soon as its last gradient of the last microbatch is ready
  bool per_token_loss = false;    ///< sums instead of means: no 1/(D*C) factor, SUM over GTP
  bool check_non_finite = false;  ///< note_backward does something
};

/// Makes main gradients whole: buckets over the replicate-data group, then replicated parameters over GTP (spec/gtp.md
/// 12-13).
///
/// One step: begin_step, backward of all microbatches (every parameter reports once per microbatch), finish.
class GradientReducer {
 public:
  /// The groups may have one rank each; nothing is communicated over those.
  GradientReducer(ParameterStore& store, comm::Communicator& replicate_data, comm::Communicator& gtp,
                  const ReducerOptions& options);

  /// Forgets the last step: each parameter's first contribution replaces its main gradient.
  void begin_step();
  /// From now on gradients belong to the step's last microbatch, after which a bucket may leave.
  void begin_last_microbatch();
  /// All gradient contributions of this microbatch to `parameter` have been added to its main gradient.
  void parameter_ready(Parameter& parameter);
  /// Reduces what has not left yet, waits for everything, and completes parameters replicated over GTP.
  void finish();
  /// Notes on the device, with `check_non_finite`, whether the gradient that arrived at the model's input is finite:
  /// NaN and Inf of any layer reach it, and it has not been mixed with other ranks' yet.
  void note_backward(const at::Tensor& input_gradient);
  /// Not 0 once a noted gradient was not finite: fp32 scalar on the device, undefined without `check_non_finite`.
  [[nodiscard]] const at::Tensor& non_finite() const { return non_finite_; }

 private:
  void launch(std::size_t bucket);

  ParameterStore& store_;
  comm::Communicator& replicate_data_;
  comm::Communicator& gtp_;
  ReducerOptions options_;
  bool last_microbatch_ = false;
  std::vector<std::size_t> missing_;      // per bucket: parameters still to report in the last microbatch
  std::vector<comm::Pending> in_flight_;  // per bucket
  std::vector<bool> launched_;            // per bucket
  at::Tensor non_finite_;                 // fp32 flag on the device
};

}  // namespace pgpt::parameter

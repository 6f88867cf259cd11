#include "pgpt/training/startup_lines.h"

#include <algorithm>
#include <cinttypes>

#include "pgpt/base/error.h"
#include "text.h"

namespace pgpt::training {

std::vector<std::string> version_lines(const std::string& torch, const std::string& core, const std::string& engine) {
  return {"> PyTorch version ................ " + torch, "> Megatron-Core version .......... " + core,
          "> Transformer Engine version ... " + engine};
}

std::string datetime_line(const std::string& label, const std::string& time) {
  return "[" + label + "] datetime: " + time + " ";
}

std::vector<std::string> parallel_size_lines(const config::ParallelConfig& p) {
  return {text("> initialized tensor model parallel with size %" PRId64, p.tensor),
          text("> initialized gtp weight remat with size %" PRId64, p.gtp),
          text("> initialized pipeline model parallel with size %" PRId64, p.pipeline)};
}

std::string parameters_line(std::int64_t tensor_rank, std::int64_t gtp_rank, std::int64_t pipeline_rank,
                            std::int64_t parameters) {
  return text(" > number of parameters on (tensor, gtp_remat, pipeline) model parallel rank (%" PRId64 ", %" PRId64
              ", %" PRId64 "): %" PRId64,
              tensor_rank, gtp_rank, pipeline_rank, parameters);
}

std::string seed_line(std::int64_t seed) { return text("> setting random seeds to %" PRId64 " ...", seed); }

std::string initialization_time_line(double seconds) {
  return text("time to initialize megatron (seconds): %.3f", seconds);
}

std::string decay_style_line(config::LrDecayStyle style) {
  const char* name = "";
  switch (style) {
    case config::LrDecayStyle::kConstant:
      name = "constant";
      break;
    case config::LrDecayStyle::kLinear:
      name = "linear";
      break;
    case config::LrDecayStyle::kCosine:
      name = "cosine";
      break;
    case config::LrDecayStyle::kInverseSquareRoot:
      name = "inverse-square-root";
      break;
    case config::LrDecayStyle::kWsd:
      name = "WSD";
      break;
  }
  return std::string("> learning rate decay style: ") + name;
}

std::string training_iterations_line(std::int64_t iterations) {
  return text("setting training iterations to %" PRId64, iterations);
}

std::vector<std::string> dataset_lines(std::int64_t train, std::optional<std::int64_t> validation, std::int64_t test) {
  return {"> building train, validation, and test datasets ...",
          " > datasets target sizes (minimum size):",
          text("    train:      %" PRId64, train),
          validation ? text("    validation: %" PRId64, *validation) : std::string("    validation: None"),
          text("    test:       %" PRId64, test),
          "> building train, validation, and test datasets for GPT ..."};
}

std::string exit_signal_label(const std::string& signal) { return "exiting program after receiving " + signal + "."; }

std::string exit_duration_label(double minutes) {
  // Shortest form that reads back as the same number, always with a decimal point or an exponent.
  std::string number = text("%.17g", minutes);
  for (int digits = 1; digits < 17; ++digits) {
    const std::string shorter = text("%.*g", digits, minutes);
    if (std::stod(shorter) == minutes) {
      number = shorter;
      break;
    }
  }
  if (number.find_first_of(".en") == std::string::npos) number += ".0";
  return "exiting program after " + number + " minutes";
}

std::string exit_iteration_label(std::int64_t iteration) {
  return text("exiting program at iteration %" PRId64, iteration);
}

}  // namespace pgpt::training

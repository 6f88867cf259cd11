#include "pgpt/training/training_log.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <ctime>

#include "pgpt/base/error.h"
#include "pgpt/config/flops.h"
#include "text.h"

namespace pgpt::training {
namespace {

/// A whole number as Python prints a float: "123.0", and with an exponent from 1e16 on.
std::string python_float(double value) {
  if (std::isnan(value) || std::isinf(value)) return text("%f", unsigned_nan(value));
  if (value == std::floor(value) && std::abs(value) < 1e16) return text("%.1f", value);
  char buffer[64];
  const auto result = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific);
  return {buffer, result.ptr};
}

}  // namespace

std::string timestamp() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(now.time_since_epoch()).count() % 1'000'000;
  std::tm local{};
  localtime_r(&seconds, &local);
  char buffer[32];
  std::strftime(buffer, sizeof buffer, "%Y-%m-%d %H:%M:%S", &local);
  return text("%s.%06d", buffer, static_cast<int>(micros));
}

bool StepReport::is_nan_iteration() const {
  return skipped && std::any_of(losses.begin(), losses.end(), [](const auto& l) { return !std::isfinite(l.second); });
}

TrainingLog::Options TrainingLog::options(const config::Config& config) {
  return {.log_interval = config.logging.log_interval,
          .train_iters = config.training.train_iters,
          .world_size = config.parallel.world_size,
          .loss_window = config.logging.loss_window,
          .throughput = config.logging.throughput};
}

TrainingLog::TrainingLog(Options options, LineSink sink, std::function<std::string()> now)
    : options_(options), sink_(std::move(sink)), now_(std::move(now)) {
  PGPT_CHECK(ConfigError, options_.log_interval >= 1, "--log-interval is ", options_.log_interval,
             "; it must be at least 1");
}

void TrainingLog::add(const StepReport& step) {
  const auto add_loss = [&](const std::string& key, float value) {
    const auto found =
        std::find_if(loss_sums_.begin(), loss_sums_.end(), [&](const auto& s) { return s.first == key; });
    if (found == loss_sums_.end()) {
      loss_sums_.emplace_back(key, value);
    } else {
      found->second += value;
    }
  };
  if (step.skipped) {
    ++skipped_;
    if (step.is_nan_iteration()) ++nan_;
  } else {
    ++advanced_;
    for (const auto& [key, value] : step.losses) add_loss(key, value);
  }
  for (const auto& [key, value] : step.auxiliary_losses) add_loss(key, value);
  elapsed_ms_ += step.elapsed_ms;
}

void TrainingLog::reset() {
  for (auto& [key, sum] : loss_sums_) sum = 0;  // keys stay: a window of skipped steps prints 0
  advanced_ = skipped_ = nan_ = 0;
  elapsed_ms_ = 0;
}

std::string TrainingLog::format(const StepReport& step, double elapsed_ms, double tflops) const {
  std::string line = " [" + now_() + "]";
  line += text(" iteration %8" PRId64 "/%8" PRId64 " |", step.iteration, options_.train_iters);
  line += text(" consumed samples: %12" PRId64 " |", step.consumed_samples);
  if (step.skipped_samples > 0) line += text(" skipped samples: %12" PRId64 " |", step.skipped_samples);
  line += text(" elapsed time per iteration (ms): %.1f |", elapsed_ms);
  if (options_.throughput) line += text(" throughput per GPU (TFLOP/s/GPU): %.1f |", tflops);
  // The reference's value has been through a float32 reduction over the ranks.
  line += text(" learning rate: %.6E |", static_cast<double>(static_cast<float>(step.learning_rate)));
  line += text(" global batch size: %5" PRId64 " |", step.batch_size);
  for (const auto& [key, sum] : loss_sums_) {
    const double average = static_cast<double>(sum) / static_cast<double>(std::max<std::int64_t>(1, advanced_));
    if (average >= 0) line += text(" %s: %.6E |", key.c_str(), average);  // a negative or NaN mean is left out
  }
  line += text(" loss scale: %.1f |", unsigned_nan(step.loss_scale));
  if (step.grad_norm) line += text(" grad norm: %.3f |", unsigned_nan(*step.grad_norm));
  if (step.num_zeros) {
    line += " num zeros: " + python_float(static_cast<double>(static_cast<float>(*step.num_zeros))) + " |";
  }
  if (step.params_norm) line += text(" params norm: %.3f |", unsigned_nan(*step.params_norm));
  line +=
      text(" number of skipped iterations: %3" PRId64 " | number of nan iterations: %3" PRId64 " |", skipped_, nan_);
  return line;
}

std::optional<PrintedLine> TrainingLog::report(const StepReport& step) {
  add(step);
  const bool first = std::exchange(first_, false);
  if (!first && step.iteration % options_.log_interval != 0) return std::nullopt;
  PrintedLine printed;
  printed.iteration = step.iteration;
  printed.first = first;
  printed.iterations = advanced_ + skipped_;
  printed.elapsed_ms_per_iteration = elapsed_ms_ / static_cast<double>(printed.iterations);
  printed.tflops_per_gpu =
      config::tflops_per_gpu(step.flops, printed.elapsed_ms_per_iteration / 1000.0, options_.world_size);
  printed.line = format(step, printed.elapsed_ms_per_iteration, printed.tflops_per_gpu);
  sink_(printed.line);
  for (const auto& [key, sum] : loss_sums_) {
    if (!std::isnan(sum)) continue;
    sink_(concat("WARNING: the mean ", key, " of the last ", advanced_, " steps is NaN, so the line has none; weights ",
                 "were changed by such steps (--no-check-for-nan-in-loss-and-grad)"));
  }
  if (!first || options_.loss_window == config::LossWindow::kStep) reset();
  return printed;
}

double perplexity(double loss) { return std::isnan(loss) ? loss : std::exp(std::min(20.0, loss)); }

std::vector<std::string> evaluation_lines(const EvaluationReport& report) {
  std::string line = " validation" + report.suffix + text(" loss at iteration %" PRId64, report.iteration);
  if (report.final) line += " on " + report.set + " set";
  line += " | ";
  for (const auto& [key, loss] : report.losses) {
    line += text("%s value: %.6E | ", key.c_str(), unsigned_nan(loss));
    line += text("%s PPL: %.6E | ", key.c_str(), unsigned_nan(perplexity(loss)));
  }
  const std::string dashes(line.size() + 1, '-');
  return {dashes, line, dashes};
}

std::string evaluating_line(std::int64_t samples) { return text("Evaluating on %" PRId64 " samples", samples); }

std::string evaluating_iteration_line(std::int64_t index, std::int64_t count) {
  return text("Evaluating iter %" PRId64 "/%" PRId64, index, count);
}

std::string memory_line(std::int64_t rank, const std::string& when, const MemoryStats& memory) {
  constexpr double kMegabyte = 1024.0 * 1024.0;
  std::string line =
      text("[Rank %" PRId64
           "] (%s) memory (MB) | allocated: %.2f | max allocated: %.2f | reserved: %.2f | max reserved: %.2f",
           rank, when.c_str(), memory.allocated / kMegabyte, memory.max_allocated / kMegabyte,
           memory.reserved / kMegabyte, memory.max_reserved / kMegabyte);
  if (memory.device_used) line += text(" | total device memory used: %.2f", *memory.device_used / kMegabyte);
  return line;
}

MemoryReportSchedule::Report MemoryReportSchedule::after_line(std::int64_t iteration) {
  if (report_) {
    if (iteration > loaded_iteration_ + 1) report_ = false;
    return Report::kMemoryAndTheory;
  }
  return interval_ > 0 && iteration % interval_ == 0 ? Report::kMemory : Report::kNone;
}

}  // namespace pgpt::training

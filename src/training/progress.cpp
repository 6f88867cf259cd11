#include "pgpt/training/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <utility>
#include <vector>

#include "pgpt/base/error.h"
#include "pgpt/config/flops.h"
#include "text.h"

namespace pgpt::training {
namespace {

/// 1234567 -> "1.2M".
std::string short_number(double value) {
  if (value >= 1e6) return text("%.1fM", value / 1e6);
  if (value >= 1e3) return text("%.1fk", value / 1e3);
  return text("%.1f", value);
}

/// "1 day, 2:03:04"-like duration: days only when there are any.
std::string duration(double seconds) {
  const auto total = static_cast<std::int64_t>(std::llround(seconds));
  std::string days = total >= 86400 ? text("%" PRId64 "d ", total / 86400) : "";
  return days + text("%" PRId64 ":%02d:%02d", total % 86400 / 3600, static_cast<int>(total % 3600 / 60),
                     static_cast<int>(total % 60));
}

std::vector<std::string> split_tabs(const std::string& line) {
  std::vector<std::string> parts(1);
  for (const char c : line) {
    if (c == '\t') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

/// The value of "Name: value"; empty without one.
std::string field_value(const std::string& field) {
  const std::size_t colon = field.find(": ");
  return colon == std::string::npos ? "" : field.substr(colon + 2);
}

constexpr const char* kTimeFormat = "%Y-%m-%d %H:%M:%S";

}  // namespace

bool stdout_is_terminal() { return isatty(STDOUT_FILENO) == 1; }

void ProgressLine::add(const StepReport& step) {
  iteration_ = step.iteration;
  ++steps_;
  elapsed_ms_ += step.elapsed_ms;
  tokens_ += step.tokens;
}

std::string ProgressLine::take() {
  PGPT_ASSERT(steps_ > 0, "no step since the last progress line");
  const double step_ms = elapsed_ms_ / static_cast<double>(steps_);
  const double percent =
      train_iters_ > 0 ? 100.0 * static_cast<double>(iteration_) / static_cast<double>(train_iters_) : 0;
  const double tokens_per_second = elapsed_ms_ > 0 ? tokens_ / elapsed_ms_ * 1000.0 : 0;
  const double remaining = static_cast<double>(std::max<std::int64_t>(0, train_iters_ - iteration_)) * step_ms / 1000.0;
  std::string line =
      text(" progress: %" PRId64 "/%" PRId64 " (%.1f %%) | %.1f ms/step | %s tokens/s | ETA %s", iteration_,
           train_iters_, percent, step_ms, short_number(tokens_per_second).c_str(), duration(remaining).c_str());
  steps_ = 0;
  elapsed_ms_ = tokens_ = 0;
  return line;
}

ProgressFile::ProgressFile(std::filesystem::path save_folder, std::int64_t world_size, std::string job_id,
                           std::function<std::time_t()> now)
    : path_(std::move(save_folder)), world_size_(world_size), job_id_(std::move(job_id)), now_(std::move(now)) {
  std::error_code error;
  std::filesystem::create_directories(path_, error);
  PGPT_CHECK(DataError, !error, "--log-progress: cannot make the save folder ", path_.string(), ": ", error.message(),
             "; check --save");
  path_ /= "progress.txt";
}

void ProgressFile::append(const std::string& message) const {
  const std::time_t time = now_();
  std::tm local{};
  localtime_r(&time, &local);
  char stamp[32];
  std::strftime(stamp, sizeof stamp, kTimeFormat, &local);
  std::ofstream file(path_, std::ios::app);
  file << stamp << "\tJob ID: " << job_id_ << "\t# GPUs: " << world_size_ << '\t' << message << '\n';
  file.flush();
  PGPT_CHECK(DataError, file.good(), "--log-progress: cannot write ", path_.string(),
             "; check free space and permissions, or drop the option");
}

void ProgressFile::start(double flops_so_far) {
  started_ = now_();
  flops_at_start_ = flops_so_far;
  append("Starting job");
}

ProgressFile::FirstJob ProgressFile::first_job() const {
  std::ifstream file(path_);
  bool found = false;
  FirstJob first;
  double saved_flops = 0;
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> fields = split_tabs(line);
    if (fields.size() < 4) continue;
    if (fields[3] == "Saved checkpoint" && fields.size() > 7) {
      saved_flops = std::strtod(field_value(fields[7]).c_str(), nullptr);
    }
    if (field_value(fields[2]) != std::to_string(world_size_)) {
      found = false;  // another world size: its throughput is another story
    } else if (fields[3] == "Starting job" && !found) {
      std::tm local{};
      if (strptime(fields[0].c_str(), kTimeFormat, &local) == nullptr) continue;
      local.tm_isdst = -1;
      first = {std::mktime(&local), saved_flops};
      found = true;
    }
  }
  // A file that was removed or edited meanwhile leaves this process's own start.
  return found ? first : FirstJob{started_, flops_at_start_};
}

std::string ProgressFile::throughput_fields(std::int64_t iteration, double flops, double tokens) const {
  const std::time_t now = now_();
  const FirstJob first = first_job();
  const double job = config::tflops_per_gpu(flops - flops_at_start_, std::difftime(now, started_), world_size_);
  const double cumulative = config::tflops_per_gpu(flops - first.flops, std::difftime(now, first.time), world_size_);
  return text("\tIteration: %" PRId64
              "\tJob throughput: %.1f TFLOP/s/GPU\tCumulative throughput: %.1f TFLOP/s/GPU\tFloating-point operations: "
              "%.2e\tTokens (in billions): %.2f",
              iteration, job, cumulative, flops, tokens / 1e9);
}

void ProgressFile::saved(std::int64_t iteration, double flops_so_far, double tokens_so_far, bool asynchronous) {
  append(asynchronous ? text("Saved async checkpoint\tIteration: %" PRId64, iteration)
                      : "Saved checkpoint" + throughput_fields(iteration, flops_so_far, tokens_so_far));
}

void ProgressFile::saving_async(std::int64_t iteration, double flops_so_far, double tokens_so_far) {
  append("Saving async checkpoint" + throughput_fields(iteration, flops_so_far, tokens_so_far));
}

void ProgressFile::deleted(std::int64_t iteration) {
  append(text("Deleted checkpoint\tIteration: %" PRId64, iteration));
}

}  // namespace pgpt::training

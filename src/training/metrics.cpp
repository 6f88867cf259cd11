#include "pgpt/training/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "pgpt/base/error.h"
#include "pgpt/config/flops.h"

namespace pgpt::training {
namespace {

using Json = nlohmann::ordered_json;

Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json number(const std::optional<double>& value) { return value ? number(*value) : Json(nullptr); }

/// "lm loss" -> "lm_loss".
std::string json_key(const std::string& name) {
  std::string key = name;
  for (char& c : key) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return key;
}

/// Writes `content` beside `path`, makes it durable and lets it take the place of `path`.
void replace_file(const std::filesystem::path& path, const std::string& content) {
  const std::string temporary = concat(path.string(), ".tmp.", getpid());
  {
    std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
    out << content;
    out.flush();
    PGPT_CHECK(DataError, out.good(), "--metrics-file: cannot write ", temporary, "; check free space and permissions");
  }
  const int file = ::open(temporary.c_str(), O_RDONLY | O_CLOEXEC);
  const bool durable = file >= 0 && ::fsync(file) == 0;
  if (file >= 0) ::close(file);
  PGPT_CHECK(DataError, durable && std::rename(temporary.c_str(), path.c_str()) == 0, "--metrics-file: cannot replace ",
             path.string(), "; check free space and permissions");
}

/// Leaves in the file only whole lines of iterations up to the loaded one.
void drop_stale_lines(const std::filesystem::path& path, std::int64_t loaded_iteration) {
  std::ifstream in(path, std::ios::binary);
  PGPT_CHECK(DataError, in.is_open(), "--metrics-file: cannot read ", path.string(), "; check its permissions");
  const std::string content((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  std::string kept;
  std::size_t line_number = 0;
  for (std::size_t begin = 0; begin < content.size();) {
    const std::size_t end = content.find('\n', begin);
    if (end == std::string::npos) break;  // cut off by a crash
    const std::string line = content.substr(begin, end - begin);
    begin = end + 1;
    ++line_number;
    const Json object = Json::parse(line, nullptr, false);
    PGPT_CHECK(DataError, object.is_object() && object.contains("iteration") && object["iteration"].is_number_integer(),
               "--metrics-file ", path.string(), ": line ", line_number,
               " is not a metrics object; choose another file, or move this one away");
    if (object["iteration"].get<std::int64_t>() <= loaded_iteration) kept += line + '\n';
  }
  if (kept != content) replace_file(path, kept);
}

}  // namespace

void SinkList::step(const StepReport& report) {
  for (const auto& sink : sinks_) sink->step(report);
}

void SinkList::line(const PrintedLine& line) {
  for (const auto& sink : sinks_) sink->line(line);
}

void SinkList::timers(std::int64_t iteration, const std::vector<std::pair<std::string, double>>& seconds) {
  for (const auto& sink : sinks_) sink->timers(iteration, seconds);
}

void SinkList::evaluation(const EvaluationReport& report) {
  for (const auto& sink : sinks_) sink->evaluation(report);
}

JsonLinesSink::JsonLinesSink(std::filesystem::path path, std::int64_t loaded_iteration, std::int64_t world_size)
    : path_(std::move(path)), world_size_(world_size) {
  std::error_code error;
  if (path_.has_parent_path()) std::filesystem::create_directories(path_.parent_path(), error);
  PGPT_CHECK(DataError, !error, "--metrics-file: cannot make the folder of ", path_.string(), ": ", error.message());
  // Devices and pipes have nothing to keep or to move.
  const bool has_old_lines = std::filesystem::is_regular_file(path_, error);
  if (has_old_lines && loaded_iteration > 0) {
    drop_stale_lines(path_, loaded_iteration);
  } else if (has_old_lines) {
    std::filesystem::rename(path_, path_.string() + ".previous", error);
    PGPT_CHECK(DataError, !error, "--metrics-file: cannot move ", path_.string(), " aside: ", error.message());
  }
  file_.open(path_, std::ios::binary | std::ios::app);
  PGPT_CHECK(DataError, file_.is_open(), "--metrics-file: cannot open ", path_.string(), ": ", std::strerror(errno),
             "; give a file that can be written");
}

void JsonLinesSink::write(const std::string& object) {
  file_ << object << '\n';
  file_.flush();
  PGPT_CHECK(DataError, file_.good(), "--metrics-file: cannot write ", path_.string(), "; check free space");
}

void JsonLinesSink::step(const StepReport& r) {
  Json o;
  o["kind"] = "step";
  o["iteration"] = r.iteration;
  o["consumed_samples"] = r.consumed_samples;
  o["skipped_samples"] = r.skipped_samples;
  o["lm_loss"] = nullptr;  // stands first and is there even when a step reports no loss
  for (const auto& [key, value] : r.losses) o[json_key(key)] = number(value);
  for (const auto& [key, value] : r.auxiliary_losses) o[json_key(key)] = number(value);
  o["grad_norm"] = number(r.grad_norm);
  o["params_norm"] = number(r.params_norm);
  o["num_zeros"] = number(r.num_zeros);
  o["learning_rate_applied"] = number(r.applied_learning_rate);
  o["learning_rate_printed"] = number(r.learning_rate);
  o["batch_size"] = r.batch_size;
  o["loss_scale"] = number(r.applied_loss_scale);
  o["skipped"] = r.skipped;
  o["nan"] = r.is_nan_iteration();
  o["step_time_ms"] = number(r.elapsed_ms);
  o["tokens"] = number(r.tokens);
  o["documents"] = number(r.documents);
  o["tokens_per_second"] = number(r.elapsed_ms > 0 ? r.tokens / r.elapsed_ms * 1000.0 : 0.0);
  o["tflops_per_gpu"] = number(config::tflops_per_gpu(r.flops, r.elapsed_ms / 1000.0, world_size_));
  o["memory_allocated_bytes"] = r.memory_allocated_bytes;
  o["memory_reserved_bytes"] = r.memory_reserved_bytes;
  o["memory_max_allocated_bytes"] = r.memory_max_allocated_bytes;
  write(o.dump());
}

void JsonLinesSink::evaluation(const EvaluationReport& r) {
  Json o;
  o["kind"] = "evaluation";
  o["set"] = r.set + r.suffix;
  o["iteration"] = r.iteration;
  o["consumed_samples"] = r.consumed_samples;
  // The set's name is part of the key, so that a reader of lm_loss sees training steps only.
  const std::string prefix = json_key(r.set + r.suffix) + "_";
  for (const auto& [key, value] : r.losses) {
    o[prefix + json_key(key)] = number(value);
    o[prefix + json_key(key) + "_ppl"] = number(perplexity(value));
  }
  write(o.dump());
}

TensorBoardSink::TensorBoardSink(const config::Config& config, std::int64_t loaded_iteration,
                                 std::function<double()> wall_time)
    : options_(config.logging),
      world_size_(config.parallel.world_size),
      skip_train_(config.training.skip_train),
      wall_time_(std::move(wall_time)),
      file_(config.logging.tensorboard_dir) {
  PGPT_CHECK(ConfigError, options_.tensorboard_interval >= 1, "--tensorboard-log-interval is ",
             options_.tensorboard_interval, "; it must be at least 1");
  if (!wall_time_) {
    wall_time_ = [] {
      return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
    };
  }
  for (const auto& [name, value] : config.arguments) file_.text(name, value, loaded_iteration, wall_time_());
  file_.flush();
}

void TensorBoardSink::point(const std::string& tag, double value, std::int64_t step) {
  file_.scalar(tag, static_cast<float>(value), step, wall_time_());
}

void TensorBoardSink::both(const std::string& tag, double value, std::int64_t iteration, std::int64_t samples) {
  point(tag, value, iteration);
  point(tag + " vs samples", value, samples);
}

void TensorBoardSink::step(const StepReport& r) {
  if (r.iteration % options_.tensorboard_interval != 0) return;
  const auto curve = [&](const std::string& tag, double value) { both(tag, value, r.iteration, r.consumed_samples); };
  curve("learning-rate", r.learning_rate);
  if (r.skipped_samples > 0) point("skipped-train-samples", static_cast<double>(r.skipped_samples), r.iteration);
  curve("batch-size", static_cast<double>(r.batch_size));
  for (const auto& [key, value] : r.losses) curve(key, value);
  for (const auto& [key, value] : r.auxiliary_losses) curve(key, value);
  if (options_.loss_scale_to_tensorboard) curve("loss-scale", r.loss_scale);
  if (options_.world_size_to_tensorboard) curve("world-size", static_cast<double>(world_size_));
  if (r.grad_norm) curve("grad-norm", *r.grad_norm);
  if (r.num_zeros) curve("num-zeros", *r.num_zeros);
  if (r.params_norm) curve("params-norm", *r.params_norm);
  if (options_.memory_to_tensorboard) {
    point("mem-reserved-bytes", static_cast<double>(r.memory_reserved_bytes), r.iteration);
    point("mem-allocated-bytes", static_cast<double>(r.memory_allocated_bytes), r.iteration);
    point("mem-max-allocated-bytes", static_cast<double>(r.memory_max_allocated_bytes), r.iteration);
    point("mem-allocated-count", static_cast<double>(r.memory_allocated_count), r.iteration);
  }
  file_.flush();
}

void TensorBoardSink::line(const PrintedLine& line) {
  if (!options_.timers_to_tensorboard) return;
  if (!line.first) point("iteration-time", line.elapsed_ms_per_iteration / 1000.0, line.iteration);
  if (options_.throughput) point("throughput", line.tflops_per_gpu, line.iteration);
  file_.flush();
}

void TensorBoardSink::timers(std::int64_t iteration, const std::vector<std::pair<std::string, double>>& seconds) {
  if (!options_.timers_to_tensorboard) return;
  for (const auto& [name, value] : seconds) point(name + "-time", value, iteration);
  file_.flush();
}

void TensorBoardSink::evaluation(const EvaluationReport& r) {
  if (r.final && skip_train_) return;  // as in the reference: an evaluation-only run draws nothing
  for (const auto& [key, value] : r.losses) {
    const std::string tag = key + " " + r.set + r.suffix;
    both(tag, value, r.iteration, r.consumed_samples);
    if (options_.validation_ppl_to_tensorboard) both(tag + " ppl", perplexity(value), r.iteration, r.consumed_samples);
  }
  file_.flush();
}

std::unique_ptr<Sink> make_sink(const config::Config& config, std::int64_t loaded_iteration) {
  auto list = std::make_unique<SinkList>();
  bool any = false;
  if (!config.logging.metrics_file.empty()) {
    list->add(
        std::make_unique<JsonLinesSink>(config.logging.metrics_file, loaded_iteration, config.parallel.world_size));
    any = true;
  }
  if (!config.logging.tensorboard_dir.empty()) {
    list->add(std::make_unique<TensorBoardSink>(config, loaded_iteration));
    any = true;
  }
  if (any) return list;
  return std::make_unique<NullSink>();
}

}  // namespace pgpt::training

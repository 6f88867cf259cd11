// Metrics files: what is in them, what a resumed run keeps, and event files read back by an independent decoder.
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "pgpt/base/error.h"
#include "pgpt/training/metrics.h"
#include "support/catch.h"
#include "support/json.h"
#include "support/text.h"

namespace {

using namespace pgpt::training;
using pgpt::test::contains;
using pgpt::test::read_json_lines;
using pgpt::test::read_text;
using Json = nlohmann::json;

/// A folder that is removed with the test.
struct Folder {
  explicit Folder(const std::string& name)
      : path(std::filesystem::temp_directory_path() / ("pgpt_metrics_" + name + "_" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(path);
    std::filesystem::create_directories(path);
  }
  ~Folder() {
    std::error_code error;
    std::filesystem::remove_all(path, error);
  }
  std::filesystem::path path;
};

StepReport step_report(std::int64_t iteration) {
  StepReport r;
  r.iteration = iteration;
  r.consumed_samples = 2 * iteration;
  r.losses = {{"lm loss", 4.860444069F}};
  r.applied_learning_rate = 1.0 / 3;
  r.learning_rate = 1.65e-4;
  r.batch_size = 2;
  r.grad_norm = 2.126123456789012;
  r.elapsed_ms = 100;
  r.flops = 4e11;  // 4e11 / (0.1 s * 1e12 * 2 ranks) = 2
  r.tokens = 128;
  r.documents = 3;
  r.memory_allocated_bytes = 1LL << 40;
  return r;
}

std::vector<std::int64_t> iterations(const std::filesystem::path& path) {
  std::vector<std::int64_t> all;
  for (const Json& o : read_json_lines(path)) all.push_back(o.at("iteration"));
  return all;
}

std::string open_error(const std::filesystem::path& path, std::int64_t loaded) {
  return pgpt::test::error_of<pgpt::DataError>([&] { JsonLinesSink sink(path, loaded, 1); });
}

}  // namespace

TEST_CASE("a metrics line has stable keys and numbers that read back to the same bits", "[cpu][metrics]") {
  const Folder folder("keys");
  const auto path = folder.path / "deep" / "run.jsonl";
  JsonLinesSink sink(path, 0, 2);
  sink.step(step_report(1));
  StepReport bad = step_report(2);
  bad.losses[0].second = std::numeric_limits<float>::infinity();
  bad.auxiliary_losses = {{"load_balancing_loss", 0.5F}};
  bad.skipped = true;
  bad.grad_norm.reset();
  sink.step(bad);
  // Each line is in the file as soon as its step is done.
  const std::vector<Json> objects = read_json_lines(path);
  REQUIRE(objects.size() == 2);
  const Json& o = objects[0];
  CHECK(o.at("kind") == "step");
  CHECK(o.at("iteration") == 1);
  CHECK(o.at("consumed_samples") == 2);
  CHECK(o.at("lm_loss").get<double>() == static_cast<double>(4.860444069F));
  CHECK(o.at("grad_norm").get<double>() == 2.126123456789012);
  CHECK(o.at("learning_rate_applied").get<double>() == 1.0 / 3);
  CHECK(o.at("learning_rate_printed").get<double>() == 1.65e-4);
  CHECK(o.at("step_time_ms") == 100.0);
  CHECK(o.at("tokens_per_second") == 1280.0);
  CHECK(o.at("tflops_per_gpu") == 2.0);
  CHECK(o.at("memory_allocated_bytes") == (1LL << 40));
  CHECK(o.at("documents") == 3.0);
  CHECK(o.at("params_norm").is_null());
  CHECK(o.at("skipped") == false);
  CHECK(objects[1].at("lm_loss").is_null());
  CHECK(objects[1].at("grad_norm").is_null());
  CHECK(objects[1].at("skipped") == true);
  CHECK(objects[1].at("nan") == true);
  CHECK(objects[1].at("load_balancing_loss") == 0.5);
  for (const auto& item : o.items()) CHECK(objects[1].contains(item.key()));
  CHECK(objects[1].size() == o.size() + 1);

  EvaluationReport evaluation;
  evaluation.iteration = 2;
  evaluation.consumed_samples = 4;
  evaluation.losses = {{"lm loss", 2.0F}};
  sink.evaluation(evaluation);
  const Json last = read_json_lines(path).back();
  CHECK(last.at("kind") == "evaluation");
  CHECK(last.at("set") == "validation");
  CHECK(last.at("validation_lm_loss") == 2.0);
  CHECK(last.at("validation_lm_loss_ppl") == std::exp(2.0));
  CHECK_FALSE(last.contains("lm_loss"));
}

TEST_CASE("a resumed run drops the lines it will write again", "[cpu][metrics]") {
  const Folder folder("resume");
  const auto path = folder.path / "run.jsonl";
  {
    JsonLinesSink sink(path, 0, 1);
    for (int i = 1; i <= 5; ++i) sink.step(step_report(i));
    EvaluationReport evaluation;
    evaluation.iteration = 5;
    evaluation.losses = {{"lm loss", 2.0F}};
    sink.evaluation(evaluation);
  }
  const std::string whole = read_text(path);
  SECTION("lines beyond the loaded iteration go, the others keep their bytes") {
    JsonLinesSink sink(path, 3, 1);
    CHECK(iterations(path) == std::vector<std::int64_t>{1, 2, 3});
    CHECK(whole.compare(0, read_text(path).size(), read_text(path)) == 0);
    sink.step(step_report(4));
    CHECK(iterations(path) == std::vector<std::int64_t>{1, 2, 3, 4});
    // No temporary file stays behind.
    CHECK(std::distance(std::filesystem::directory_iterator(folder.path), std::filesystem::directory_iterator()) == 1);
  }
  SECTION("nothing changes when nothing is stale") {
    const auto inode_holder = std::filesystem::hard_link_count(path);
    std::filesystem::create_hard_link(path, folder.path / "link");
    JsonLinesSink sink(path, 5, 1);
    CHECK(read_text(path) == whole);
    // The same file, not a copy of it.
    CHECK(std::filesystem::hard_link_count(path) == inode_holder + 1);
  }
  SECTION("a line that a crash cut off goes too") {
    std::ofstream(path, std::ios::app) << R"({"kind":"step","iteration":2,"lm_)";
    JsonLinesSink sink(path, 5, 1);
    CHECK(read_text(path) == whole);
  }
  SECTION("a fresh run moves the old file aside") {
    JsonLinesSink sink(path, 0, 1);
    CHECK(read_text(path).empty());
    CHECK(read_text(path.string() + ".previous") == whole);
  }
  SECTION("a file with foreign lines is refused and stays as it is") {
    for (const char* line : {"not json\n", "[1]\n", "{\"iteration\":\"x\"}\n", "{}\n"}) {
      std::ofstream(path, std::ios::trunc) << line;
      CHECK(contains(open_error(path, 5), "line 1 is not a metrics object"));
      CHECK(read_text(path) == line);
    }
  }
}

TEST_CASE("a metrics file that cannot be written is an error that names it", "[cpu][metrics]") {
  const Folder folder("broken");
  std::ofstream(folder.path / "file") << "x";
  CHECK(contains(open_error(folder.path / "file" / "run.jsonl", 0), "--metrics-file"));
  CHECK(contains(open_error(folder.path, 0), "--metrics-file"));
  if (std::filesystem::exists("/dev/full")) {
    JsonLinesSink sink("/dev/full", 0, 1);
    CHECK_THROWS_AS(sink.step(step_report(1)), pgpt::DataError);
  }
}

// An event file decoder that shares nothing with the writer: checksums bit by bit, fields by their wire types.
namespace {

std::uint32_t slow_crc32c(const std::string& bytes) {
  std::uint32_t crc = ~0U;
  for (const char c : bytes) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ 0x82f63b78U : crc >> 1;
  }
  return ~crc;
}

template <class T>
T load(const std::string& bytes, std::size_t at) {
  REQUIRE(at + sizeof(T) <= bytes.size());
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

/// Field number -> values; numbers as their bits, nested messages and texts as bytes.
struct Message {
  std::multimap<unsigned, std::uint64_t> numbers;
  std::multimap<unsigned, std::string> bytes;
};

Message decode(const std::string& data) {
  std::size_t at = 0;
  const auto varint = [&] {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      REQUIRE(at < data.size());
      const auto byte = static_cast<unsigned char>(data[at++]);
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if ((byte & 0x80) == 0) return value;
    }
  };
  Message message;
  while (at < data.size()) {
    const std::uint64_t key = varint();
    const auto field = static_cast<unsigned>(key >> 3);
    switch (key & 7) {
      case 0:
        message.numbers.emplace(field, varint());
        break;
      case 1:
        message.numbers.emplace(field, load<std::uint64_t>(data, at)), at += 8;
        break;
      case 5:
        message.numbers.emplace(field, load<std::uint32_t>(data, at)), at += 4;
        break;
      case 2: {
        const std::uint64_t length = varint();
        REQUIRE(at + length <= data.size());
        message.bytes.emplace(field, data.substr(at, length));
        at += length;
        break;
      }
      default:
        FAIL("wire type " << (key & 7));
    }
  }
  return message;
}

std::vector<Message> read_events(const std::filesystem::path& path) {
  const std::string data = read_text(path);
  std::vector<Message> events;
  const auto masked = [](const std::string& bytes) {
    const std::uint32_t crc = slow_crc32c(bytes);
    return static_cast<std::uint32_t>((crc >> 15 | crc << 17) + 0xa282ead8U);
  };
  for (std::size_t at = 0; at < data.size();) {
    const auto length = load<std::uint64_t>(data, at);
    REQUIRE(load<std::uint32_t>(data, at + 8) == masked(data.substr(at, 8)));
    const std::string payload = data.substr(at + 12, length);
    REQUIRE(load<std::uint32_t>(data, at + 12 + length) == masked(payload));
    events.push_back(decode(payload));
    at += 16 + length;
  }
  return events;
}

/// (tag, step) -> value.
using Curves = std::map<std::pair<std::string, std::int64_t>, float>;

Curves scalars(const std::vector<Message>& events) {
  Curves curves;
  for (const Message& event : events) {
    for (auto [summary, end] = event.bytes.equal_range(5); summary != end; ++summary) {
      const Message values = decode(summary->second);
      const Message value = decode(values.bytes.find(1)->second);
      if (value.numbers.count(2) == 0) continue;
      const auto bits = static_cast<std::uint32_t>(value.numbers.find(2)->second);
      float number;
      std::memcpy(&number, &bits, sizeof number);
      const auto step = static_cast<std::int64_t>(event.numbers.find(2)->second);
      curves[{value.bytes.find(1)->second, step}] = number;
    }
  }
  return curves;
}

std::filesystem::path only_file(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  REQUIRE(files.size() == 1);
  return files[0];
}

/// All options on; two steps, a printed line, timers, evaluation. tests/python/test_tensorboard.py knows these numbers.
void write_sample(const std::filesystem::path& folder) {
  pgpt::config::Config c;
  c.parallel.world_size = 2;
  c.arguments = {{"bf16", "True"}, {"data_path", "['a b', \"c\"]"}};
  auto& l = c.logging;
  l.tensorboard_dir = folder.string();
  l.timers_to_tensorboard = l.validation_ppl_to_tensorboard = l.memory_to_tensorboard = true;
  l.world_size_to_tensorboard = l.throughput = true;
  TensorBoardSink sink(c, 0, [] { return 1.5e9; });
  StepReport r = step_report(1);
  sink.step(r);
  r = step_report(2);
  r.skipped_samples = 4;
  r.num_zeros = 9;
  r.params_norm = 27.5;
  sink.step(r);
  PrintedLine line;
  line.iteration = 1;
  line.first = true;
  line.tflops_per_gpu = 1;
  sink.line(line);
  line.iteration = 2;
  line.first = false;
  line.elapsed_ms_per_iteration = 250;
  line.tflops_per_gpu = 2;
  sink.line(line);
  sink.timers(2, {{"optimizer", 0.125}});
  EvaluationReport e;
  e.iteration = 2;
  e.consumed_samples = 4;
  e.losses = {{"lm loss", 2.0F}};
  sink.evaluation(e);
  e.set = "test";
  e.losses = {{"lm loss", 3.0F}};
  e.final = true;
  sink.evaluation(e);
}

}  // namespace

TEST_CASE("a TensorBoard folder holds the sample run", "[cpu][metrics]") {
  // The Python test has this case write where TensorBoard's own reader looks.
  const Folder temporary("tensorboard");
  const char* wanted = std::getenv("PGPT_TENSORBOARD_SAMPLE");
  const std::filesystem::path folder = wanted != nullptr ? wanted : temporary.path / "runs";
  write_sample(folder);
  const auto path = only_file(folder);
  CHECK(path.filename().string().find("events.out.tfevents.") == 0);
  const std::vector<Message> events = read_events(path);
  REQUIRE(events.size() > 3);
  CHECK(events[0].bytes.find(3)->second == "brain.Event:2");
  double wall_time = 0;
  const std::uint64_t bits = events[1].numbers.find(1)->second;
  std::memcpy(&wall_time, &bits, sizeof wall_time);
  CHECK(wall_time == 1.5e9);

  // The two texts: tag, string tensor of one element, plugin name.
  const Message text = decode(decode(events[2].bytes.find(5)->second).bytes.find(1)->second);
  CHECK(text.bytes.find(1)->second == "data_path/text_summary");
  const Message tensor = decode(text.bytes.find(8)->second);
  CHECK(tensor.numbers.find(1)->second == 7);
  CHECK(tensor.bytes.find(8)->second == "['a b', \"c\"]");
  CHECK(decode(decode(text.bytes.find(9)->second).bytes.find(1)->second).bytes.find(1)->second == "text");

  const auto f = [](double value) { return static_cast<float>(value); };
  Curves expected;
  const auto both = [&](const std::string& tag, std::int64_t iteration, float value) {
    expected[{tag, iteration}] = value;
    expected[{tag + " vs samples", 2 * iteration}] = value;
  };
  for (const std::int64_t i : {1, 2}) {
    both("learning-rate", i, f(1.65e-4));
    both("batch-size", i, 2);
    both("lm loss", i, 4.860444069F);
    both("loss-scale", i, 1);
    both("world-size", i, 2);
    both("grad-norm", i, f(2.126123456789012));
    expected[{"mem-reserved-bytes", i}] = 0;
    expected[{"mem-allocated-bytes", i}] = f(static_cast<double>(1LL << 40));
    expected[{"mem-max-allocated-bytes", i}] = 0;
    expected[{"mem-allocated-count", i}] = 0;
  }
  expected[{"skipped-train-samples", 2}] = 4;
  both("num-zeros", 2, 9);
  both("params-norm", 2, 27.5);
  expected[{"iteration-time", 2}] = 0.25;
  expected[{"throughput", 1}] = 1;
  expected[{"throughput", 2}] = 2;
  expected[{"optimizer-time", 2}] = 0.125;
  both("lm loss validation", 2, 2);
  both("lm loss validation ppl", 2, f(std::exp(2.0)));
  both("lm loss test", 2, 3);
  both("lm loss test ppl", 2, f(std::exp(3.0)));
  CHECK(scalars(events) == expected);
}

TEST_CASE("TensorBoard options leave curves out", "[cpu][metrics]") {
  const Folder folder("options");
  pgpt::config::Config c;
  c.logging.tensorboard_dir = (folder.path / "runs").string();
  c.logging.tensorboard_interval = 2;
  c.logging.loss_scale_to_tensorboard = false;
  c.training.skip_train = true;
  {
    TensorBoardSink sink(c, 0);
    for (int i = 1; i <= 3; ++i) sink.step(step_report(i));
    PrintedLine line;
    line.iteration = 2;
    sink.line(line);
    sink.timers(2, {{"optimizer", 1}});
    EvaluationReport e;
    e.iteration = 3;
    e.losses = {{"lm loss", 2.0F}};
    e.final = true;
    sink.evaluation(e);
  }
  std::vector<std::string> tags;
  for (const auto& [key, value] : scalars(read_events(only_file(folder.path / "runs")))) {
    tags.push_back(key.first + "@" + std::to_string(key.second));
  }
  CHECK(tags == std::vector<std::string>{"batch-size@2", "batch-size vs samples@4", "grad-norm@2",
                                         "grad-norm vs samples@4", "learning-rate@2", "learning-rate vs samples@4",
                                         "lm loss@2", "lm loss vs samples@4"});
}

TEST_CASE("every process writes its own event file", "[cpu][metrics]") {
  const Folder folder("files");
  const EventFile first(folder.path), second(folder.path);
  CHECK(first.path() != second.path());
  std::ofstream(folder.path / "file") << "x";
  CHECK_THROWS_AS(EventFile(folder.path / "file" / "runs"), pgpt::DataError);
}

TEST_CASE("the sinks of a run are those its options name", "[cpu][metrics]") {
  const Folder folder("sinks");
  pgpt::config::Config c;
  make_sink(c, 0)->step(step_report(1));
  CHECK(std::filesystem::is_empty(folder.path));
  c.logging.metrics_file = (folder.path / "run.jsonl").string();
  c.logging.tensorboard_dir = (folder.path / "runs").string();
  const auto sink = make_sink(c, 0);
  sink->step(step_report(1));
  CHECK(iterations(c.logging.metrics_file) == std::vector<std::int64_t>{1});
  CHECK(scalars(read_events(only_file(c.logging.tensorboard_dir))).count({"lm loss", 1}) == 1);
}

// Lines of a run byte for byte, and what they average.
#include <unistd.h>

#include <cctype>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "pgpt/base/error.h"
#include "pgpt/training/progress.h"
#include "pgpt/training/startup_lines.h"
#include "pgpt/training/timers.h"
#include "pgpt/training/training_log.h"
#include "support/catch.h"
#include "support/text.h"

namespace {

using namespace pgpt::training;
using pgpt::config::LossWindow;
using pgpt::test::contains;
using pgpt::test::read_lines;
using Lines = std::vector<std::string>;

constexpr const char* kTime = "2025-01-01 00:00:00.000000";
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

StepReport step_report(std::int64_t iteration, float loss) {
  StepReport r;
  r.iteration = iteration;
  r.consumed_samples = 2 * iteration;
  r.losses = {{"lm loss", loss}};
  r.learning_rate = 3e-4;
  r.batch_size = 2;
  r.grad_norm = 1.234;
  r.elapsed_ms = 812.4;
  return r;
}

/// A log that collects its lines.
struct Recorder {
  explicit Recorder(TrainingLog::Options options)
      : log(options, [this](const std::string& line) { lines.push_back(line); }, [] { return std::string(kTime); }) {}
  Lines lines;
  TrainingLog log;
};

TrainingLog::Options options(LossWindow window, std::int64_t interval = 1) {
  TrainingLog::Options o;
  o.log_interval = interval;
  o.train_iters = 3;
  o.loss_window = window;
  return o;
}

/// The number behind " NAME: " of a line; empty when the field is missing.
std::string field(const std::string& line, const std::string& name) {
  const std::size_t at = line.find(" " + name + ": ");
  if (at == std::string::npos) return "";
  const std::size_t begin = at + name.size() + 3;
  return line.substr(begin, line.find(" |", begin) - begin);
}

std::filesystem::path fresh_folder(const std::string& name) {
  const auto folder = std::filesystem::temp_directory_path() / ("pgpt_log_" + name + "_" + std::to_string(::getpid()));
  std::filesystem::remove_all(folder);
  return folder;
}

}  // namespace

TEST_CASE("a training line equals the documented example byte for byte", "[cpu][log]") {
  Recorder recorder(options(LossWindow::kStep));
  recorder.log.report(step_report(1, 4.87F));
  REQUIRE(recorder.lines.size() == 1);
  CHECK(recorder.lines[0] ==
        " [2025-01-01 00:00:00.000000] iteration        1/       3 | consumed samples:            2 | elapsed time per "
        "iteration (ms): 812.4 | learning rate: 3.000000E-04 | global batch size:     2 | lm loss: 4.870000E+00 | loss "
        "scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |");
}

TEST_CASE("optional fields stand at their places", "[cpu][log]") {
  TrainingLog::Options o = options(LossWindow::kStep);
  o.throughput = true;
  o.world_size = 2;
  Recorder recorder(o);
  StepReport r = step_report(2, 1.0F);
  r.skipped_samples = 7;
  r.num_zeros = 123;
  r.params_norm = 27.23366;
  r.elapsed_ms = 500;
  r.flops = 3e12;  // 3e12 / (0.5 s * 1e12 * 2 ranks) = 3
  r.auxiliary_losses = {{"load_balancing_loss", 0.25F}};
  const auto printed = recorder.log.report(r);
  REQUIRE(printed);
  CHECK(printed->tflops_per_gpu == 3.0);
  CHECK(printed->line == recorder.lines[0]);
  CHECK(
      printed->line ==
      " [2025-01-01 00:00:00.000000] iteration        2/       3 | consumed samples:            4 | skipped samples:  "
      "          7 | elapsed time per iteration (ms): 500.0 | throughput per GPU (TFLOP/s/GPU): 3.0 | learning rate: "
      "3.000000E-04 | global batch size:     2 | lm loss: 1.000000E+00 | load_balancing_loss: 2.500000E-01 | loss "
      "scale: 1.0 | grad norm: 1.234 | num zeros: 123.0 | params norm: 27.234 | number of skipped iterations:   0 | "
      "number of nan iterations:   0 |");
}

TEST_CASE("zeros print as the reference's float32", "[cpu][log]") {
  const auto zeros = [](double count) {
    Recorder recorder(options(LossWindow::kStep));
    StepReport r = step_report(1, 1.0F);
    r.num_zeros = count;
    recorder.log.report(r);
    return field(recorder.lines[0], "num zeros");
  };
  CHECK(zeros(0) == "0.0");
  CHECK(zeros(16777217) == "16777216.0");  // 2^24 + 1 is no float32
  CHECK(zeros(1e16) == "1.0000000272564224e+16");
}

TEST_CASE("the learning rate passes through float32", "[cpu][log]") {
  Recorder recorder(options(LossWindow::kStep));
  StepReport r = step_report(1, 1.0F);
  r.learning_rate = 1.2345675000000001e-4;  // as a double it would print 1.234568E-04
  recorder.log.report(r);
  const double rounded = static_cast<double>(static_cast<float>(r.learning_rate));
  CHECK(rounded < 1.2345675e-4);
  CHECK(field(recorder.lines[0], "learning rate") == "1.234567E-04");
}

TEST_CASE("the megatron window reproduces the published second line, the step window the true losses", "[cpu][log]") {
  const float losses[] = {4.860444069F, 4.827284813F, 4.781814575F};
  const auto printed = [&](LossWindow window) {
    Recorder recorder(options(window));
    Lines values;
    for (int i = 0; i < 3; ++i) {
      recorder.log.report(step_report(i + 1, losses[i]));
      values.push_back(field(recorder.lines.back(), "lm loss"));
    }
    return values;
  };
  CHECK(printed(LossWindow::kStep) == Lines{"4.860444E+00", "4.827285E+00", "4.781815E+00"});
  CHECK(printed(LossWindow::kMegatron) == Lines{"4.860444E+00", "4.843864E+00", "4.781815E+00"});
}

TEST_CASE("the megatron window averages time and counters of its first line again", "[cpu][log]") {
  for (const LossWindow window : {LossWindow::kMegatron, LossWindow::kStep}) {
    const bool megatron = window == LossWindow::kMegatron;
    Recorder recorder(options(window));
    StepReport first = step_report(1, kNan);
    first.skipped = true;
    first.grad_norm.reset();
    first.elapsed_ms = 900;
    StepReport second = step_report(2, 2.0F);
    second.elapsed_ms = 100;
    recorder.log.report(first);
    CHECK(field(recorder.lines[0], "grad norm").empty());
    CHECK(field(recorder.lines[0], "lm loss").empty());  // nothing was accumulated yet
    CHECK(field(recorder.lines[0], "number of skipped iterations") == "  1");
    CHECK(field(recorder.lines[0], "number of nan iterations") == "  1");
    recorder.log.report(second);
    CHECK(field(recorder.lines[1], "elapsed time per iteration (ms)") == (megatron ? "500.0" : "100.0"));
    CHECK(field(recorder.lines[1], "number of skipped iterations") == (megatron ? "  1" : "  0"));
    CHECK(field(recorder.lines[1], "number of nan iterations") == (megatron ? "  1" : "  0"));
    CHECK(field(recorder.lines[1], "lm loss") == "2.000000E+00");  // one advanced step in both windows
    StepReport third = step_report(3, 7.0F);
    third.skipped = true;
    third.grad_norm.reset();
    recorder.log.report(third);
    CHECK(field(recorder.lines[2], "lm loss") == "0.000000E+00");  // a window of skipped steps
    CHECK(field(recorder.lines[2], "number of nan iterations") == "  0");
  }
}

TEST_CASE("lines come at multiples of the interval and after the first step of a process", "[cpu][log]") {
  const auto run = [](LossWindow window, std::int64_t first, std::int64_t last, std::int64_t interval) {
    Recorder recorder(options(window, interval));
    std::vector<std::pair<std::int64_t, std::string>> printed;
    for (std::int64_t i = first; i <= last; ++i) {
      if (const auto line = recorder.log.report(step_report(i, static_cast<float>(i)))) {
        CHECK(line->first == (i == first));
        printed.emplace_back(line->iteration, field(line->line, "lm loss"));
      }
    }
    CHECK(printed.size() == recorder.lines.size());
    return printed;
  };
  using Printed = std::vector<std::pair<std::int64_t, std::string>>;
  // Fresh: own loss at 1, then the mean over 1..4 (reference) or 2..4 (step window), then over 5..8.
  CHECK(run(LossWindow::kMegatron, 1, 8, 4) == Printed{{1, "1.000000E+00"}, {4, "2.500000E+00"}, {8, "6.500000E+00"}});
  CHECK(run(LossWindow::kStep, 1, 8, 4) == Printed{{1, "1.000000E+00"}, {4, "3.000000E+00"}, {8, "6.500000E+00"}});
  // Resumed at 5: line at 6, then the mean over 6..8.
  CHECK(run(LossWindow::kMegatron, 6, 8, 4) == Printed{{6, "6.000000E+00"}, {8, "7.000000E+00"}});
  CHECK(run(LossWindow::kStep, 6, 8, 4) == Printed{{6, "6.000000E+00"}, {8, "7.500000E+00"}});
  // Resumed at 7, so that the first step is a multiple: the next line averages five steps in the reference.
  CHECK(run(LossWindow::kMegatron, 8, 12, 4) == Printed{{8, "8.000000E+00"}, {12, "1.000000E+01"}});
  CHECK(run(LossWindow::kStep, 8, 12, 4) == Printed{{8, "8.000000E+00"}, {12, "1.050000E+01"}});
}

TEST_CASE("losses are summed in float32 and a negative or NaN mean is left out", "[cpu][log]") {
  Recorder recorder(options(LossWindow::kStep, 3));
  recorder.log.report(step_report(3, 1.0F));
  // 2^24 + 1 rounds to 2^24 in float32, so that the 1 is lost.
  StepReport big = step_report(4, 16777216.0F);
  recorder.log.report(big);
  recorder.log.report(step_report(5, 1.0F));
  recorder.log.report(step_report(6, -16777216.0F));
  CHECK(field(recorder.lines[1], "lm loss") == "0.000000E+00");  // exact arithmetic gives 1/3
  recorder.log.report(step_report(9, -1.0F));
  CHECK(field(recorder.lines[2], "lm loss").empty());
  recorder.log.report(step_report(12, kNan));
  CHECK(field(recorder.lines[3], "lm loss").empty());
  CHECK(field(recorder.lines[3], "grad norm") == "1.234");
  REQUIRE(recorder.lines.size() == 5);
  CHECK(recorder.lines[4].find("WARNING: the mean lm loss of the last 1 steps is NaN") == 0);
}

TEST_CASE("evaluation lines are framed by dashes one longer than the line", "[cpu][log]") {
  EvaluationReport r;
  r.iteration = 10;
  r.losses = {{"lm loss", 2.0F}};
  const Lines lines = evaluation_lines(r);
  REQUIRE(lines.size() == 3);
  CHECK(lines[1] == " validation loss at iteration 10 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | ");
  CHECK(lines[0] == std::string(lines[1].size() + 1, '-'));
  CHECK(lines[2] == lines[0]);
  r.final = true;
  r.set = "test";
  CHECK(evaluation_lines(r)[1].find(" validation loss at iteration 10 on test set | lm loss value:") == 0);
  r.final = false;
  r.suffix = "-0";
  CHECK(evaluation_lines(r)[1].find(" validation-0 loss at iteration 10 | ") == 0);
  CHECK(perplexity(1000) == std::exp(20.0));
  CHECK(std::isnan(perplexity(kNan)));
  CHECK(evaluating_line(80) == "Evaluating on 80 samples");
  CHECK(evaluating_iteration_line(1, 10) == "Evaluating iter 1/10");
}

TEST_CASE("memory is reported at the first two lines and at its interval", "[cpu][log]") {
  using Report = MemoryReportSchedule::Report;
  MemoryReportSchedule fresh(0, 0);
  CHECK(fresh.after_line(1) == Report::kMemoryAndTheory);
  CHECK(fresh.after_line(2) == Report::kMemoryAndTheory);
  CHECK(fresh.after_line(3) == Report::kNone);
  MemoryReportSchedule resumed(100, 20);
  CHECK(resumed.after_line(101) == Report::kMemoryAndTheory);
  CHECK(resumed.after_line(110) == Report::kMemoryAndTheory);
  CHECK(resumed.after_line(120) == Report::kMemory);
  CHECK(resumed.after_line(130) == Report::kNone);
  MemoryStats memory;
  memory.allocated = 1024.0 * 1024, memory.max_allocated = 1.5 * 1024 * 1024;
  memory.reserved = 2.0 * 1024 * 1024, memory.max_reserved = 0;
  CHECK(memory_line(3, "after 1 iterations", memory) ==
        "[Rank 3] (after 1 iterations) memory (MB) | allocated: 1.00 | max allocated: 1.50 | reserved: 2.00 | max "
        "reserved: 0.00");
  memory.device_used = 512.0 * 1024;
  CHECK(memory_line(0, "x", memory).substr(60) ==
        memory_line(0, "x", memory).substr(60, memory_line(0, "x", memory).find(" | total") - 60) +
            " | total device memory used: 0.50");
}

TEST_CASE("the theoretical memory block follows its formulas", "[cpu][log]") {
  pgpt::config::Config c;
  c.model.num_layers = 10, c.model.hidden_size = 1000, c.model.ffn_hidden_size = 4000;
  c.model.num_attention_heads = 10, c.model.num_query_groups = 10, c.model.kv_channels = 100;
  c.model.padded_vocab_size = 50000, c.model.seq_length = 1024, c.model.untie_embeddings = true;
  c.training.micro_batch_size = 1;
  // Layer 4*10^6 + 8*10^6 + 4000, block 120 042 000, embedding 50*10^6 each.
  // Weights 220042000 * 18 / 2^20 = 3777.27; activations per layer 1024*1000*34 bytes = 33.2 MB;
  // (348160000 + 8192 + 1024000 + 2*(51200000 + 1024000)) * 1.05 / 2^20 = 454.26.
  const Lines lines = theoretical_memory_lines(c, 1);
  CHECK(lines ==
        Lines{"Number of parameters in transformer block in billions:  0.12",
              "Number of active parameters in transformer block in billions:  0.12",
              "Number of parameters in embedding layers in billions: 0.10",
              "Total number of parameters in billions: 0.22", "Total number of active parameters in billions: 0.22",
              "Number of parameters in most loaded shard in billions: 0.2200", "compute_activation_memory_without_sp",
              "Activation memory footprint per transformer layer (precise, without SP): 33.2 MB",
              "Theoretical memory footprints: weight and optimizer=3777.27 MB, activation=454.26 MB, "
              "total=4231.53 MB",
              ""});
  c.parallel.use_distributed_optimizer = true, c.parallel.replicate_data = 4;  // 9 bytes a parameter
  CHECK(contains(theoretical_memory_lines(c, 1)[8], "weight and optimizer=1888.64 MB"));
  c.parallel.pipeline = 2, c.parallel.tensor = 2;
  // (120e6/2 + 50e6)/2 + 0.042e6/2 = 55.021e6 and 120e6/4 + 0.021e6 = 30.021e6.
  const Lines staged = theoretical_memory_lines(c, 8);
  CHECK(staged[5] == "Number of parameters in most loaded shard in billions: 0.0550");
  CHECK(staged[6] == "Number of parameters in other shards in billions: 0.0300");
  CHECK(staged[9] == "Number of in-flight microbatches: 2");
  c.parallel.sequence_parallel = true, c.training.recompute = pgpt::config::RecomputeGranularity::kSelective;
  const Lines sp = theoretical_memory_lines(c, 1);
  CHECK(sp[7] == "compute_activation_memory with SP");
  // 1024*1000*(18 + 16) / 2 ranks.
  CHECK(sp[8] == "Activation memory footprint per transformer layer: 16.6 MB");
  CHECK(sp[9] == "Number of in-flight microbatches: 1");
}

TEST_CASE("timers below their level cost nothing and the others add up", "[cpu][log]") {
  double now = 0;
  int synchronized = 0;
  Timers timers(1, [&] { ++synchronized; }, [&] { return now; });
  timers.start("forward-compute", 2);
  timers.stop("forward-compute");
  CHECK(synchronized == 0);
  for (int i = 0; i < 2; ++i) {
    ScopedTimer scope(timers, "optimizer", 1);
    now += 0.25;
  }
  timers.start("running", 0);
  now += 1;
  const std::vector<std::string> names = {"optimizer", "forward-compute", "running"};
  CHECK(timers.elapsed_ms(names) == std::vector<double>{500, 0, 1000});
  timers.reset(names);
  now += 2;
  CHECK(timers.elapsed_ms(names) == std::vector<double>{0, 0, 2000});
  CHECK_THROWS_AS(timers.start("running", 0), std::logic_error);
  timers.stop("running");
  CHECK_THROWS_AS(timers.stop("running"), std::logic_error);
  CHECK(Timers::training_names(0).empty());
  CHECK(Timers::training_names(1).size() == 12);
  CHECK(Timers::training_names(2).size() == 24);
}

TEST_CASE("timer blocks show the ranks that ran", "[cpu][log]") {
  const Lines names = {"evaluate", "never", "save-checkpoint"};
  const std::vector<std::vector<double>> ranks = {{10, 0, 3}, {20, 0, 0}};
  CHECK(timer_lines(TimerOption::kMinMax, names, ranks) ==
        Lines{"(min, max) time across ranks (ms):",
              "    evaluate .......................................: (10.00, 20.00)",
              "    save-checkpoint ................................: (3.00, 3.00)"});
  CHECK(timer_lines(TimerOption::kMax, names, ranks, 2) ==
        Lines{"max time across ranks (ms):", "    evaluate .......................................: 10.00",
              "    save-checkpoint ................................: 1.50"});
  CHECK(timer_lines(TimerOption::kAll, names, ranks) ==
        Lines{"times across ranks (ms):", "  evaluate:", "     rank  0: 10.00", "     rank  1: 20.00",
              "  save-checkpoint:", "     rank  0: 3.00"});
  CHECK(timer_lines(TimerOption::kMinMax, {"never"}, {{0}, {0}}).empty());
  // The name and its dots take 48 characters.
  CHECK(timer_lines(TimerOption::kMax, {"x"}, {{1}})[1].find(": 1.00") == 4 + 48);
  CHECK(parse_timer_option("all") == TimerOption::kAll);
  CHECK_THROWS_AS(parse_timer_option("mean"), pgpt::ConfigError);
}

TEST_CASE("start-up lines have the reference's form", "[cpu][log]") {
  CHECK(version_lines("2.11.0", "none", "none") == Lines{"> PyTorch version ................ 2.11.0",
                                                         "> Megatron-Core version .......... none",
                                                         "> Transformer Engine version ... none"});
  CHECK(datetime_line(label::kBeforeTraining, kTime) ==
        "[before the start of training step] datetime: 2025-01-01 00:00:00.000000 ");
  pgpt::config::ParallelConfig p;
  p.world_size = 2, p.gtp = 2;
  CHECK(parallel_size_lines(p) == Lines{"> initialized tensor model parallel with size 1",
                                        "> initialized gtp weight remat with size 2",
                                        "> initialized pipeline model parallel with size 1"});
  CHECK(parameters_line(0, 1, 0, 156928) ==
        " > number of parameters on (tensor, gtp_remat, pipeline) model parallel rank (0, 1, 0): 156928");
  CHECK(seed_line(1234) == "> setting random seeds to 1234 ...");
  CHECK(initialization_time_line(1.23456) == "time to initialize megatron (seconds): 1.235");
  CHECK(decay_style_line(pgpt::config::LrDecayStyle::kCosine) == "> learning rate decay style: cosine");
  CHECK(training_iterations_line(125) == "setting training iterations to 125");
  CHECK(dataset_lines(6, 0, 0) == Lines{"> building train, validation, and test datasets ...",
                                        " > datasets target sizes (minimum size):", "    train:      6",
                                        "    validation: 0", "    test:       0",
                                        "> building train, validation, and test datasets for GPT ..."});
  CHECK(dataset_lines(6, std::nullopt, 0)[3] == "    validation: None");
  CHECK(exit_signal_label("SIGTERM") == "exiting program after receiving SIGTERM.");
  CHECK(exit_iteration_label(20) == "exiting program at iteration 20");
  CHECK(exit_duration_label(0.1) == "exiting program after 0.1 minutes");
  CHECK(exit_duration_label(2) == "exiting program after 2.0 minutes");
  CHECK(exit_duration_label(1.0 / 3) == "exiting program after 0.3333333333333333 minutes");
  const std::string time = timestamp();
  REQUIRE(time.size() == 26);
  for (std::size_t i = 0; i < time.size(); ++i) {
    const char mask = "dddd-dd-dd dd:dd:dd.dddddd"[i];
    CHECK((mask == 'd' ? std::isdigit(static_cast<unsigned char>(time[i])) != 0 : time[i] == mask));
  }
}

TEST_CASE("the progress line averages since the previous one", "[cpu][log]") {
  ProgressLine progress(1000);
  StepReport r = step_report(119, 1.0F);
  r.elapsed_ms = 1000;
  r.tokens = 2048;
  progress.add(r);
  r.iteration = 120;
  r.elapsed_ms = 600;
  progress.add(r);
  // 800 ms a step, 4096 tokens in 1.6 s, 880 steps left take 704 s.
  CHECK(progress.take() == " progress: 120/1000 (12.0 %) | 800.0 ms/step | 2.6k tokens/s | ETA 0:11:44");
  CHECK_THROWS_AS(progress.take(), std::logic_error);
  r.iteration = 1;
  r.elapsed_ms = 1e6;
  progress.add(r);
  CHECK(progress.take() == " progress: 1/1000 (0.1 %) | 1000000.0 ms/step | 2.0 tokens/s | ETA 11d 13:30:00");
}

TEST_CASE("progress.txt gets the reference's messages and throughputs", "[cpu][log]") {
  const auto folder = fresh_folder("progress");
  std::tm local{};
  strptime("2025-06-01 12:00:00", "%Y-%m-%d %H:%M:%S", &local);
  local.tm_isdst = -1;
  std::time_t now = std::mktime(&local);
  const std::string head = "2025-06-01 12:00:00\tJob ID: 42\t# GPUs: 2\t";
  {
    ProgressFile file(folder, 2, "42", [&] { return now; });
    file.start(0);
    now += 100;
    file.saved(10, 4e14, 2.5e9);  // 4e14 / (100 s * 1e12 * 2) = 2
  }
  now += 100;
  {
    ProgressFile file(folder, 2, "42", [&] { return now; });
    file.start(4e14);
    now += 100;
    file.saved(20, 1.2e15, 5e9);  // job (8e14 in 100 s) 4, cumulative (1.2e15 in 300 s) 2
    file.saving_async(30, 1.2e15, 5e9);
    file.saved(30, 1.2e15, 5e9, true);
    file.deleted(10);
  }
  {
    ProgressFile other(folder, 4, "", [&] { return now; });  // another world size starts its own story
    other.start(1.2e15);
    now += 100;
    other.saved(40, 2e15, 6e9);  // 8e14 / (100 s * 1e12 * 4) = 2 twice
  }
  const Lines lines = read_lines(folder / "progress.txt");
  REQUIRE(lines.size() == 9);
  CHECK(lines[0] == head + "Starting job");
  CHECK(
      lines[1] ==
      "2025-06-01 12:01:40\tJob ID: 42\t# GPUs: 2\tSaved checkpoint\tIteration: 10\tJob throughput: 2.0 "
      "TFLOP/s/GPU\tCumulative throughput: 2.0 TFLOP/s/GPU\tFloating-point operations: 4.00e+14\tTokens (in billions): "
      "2.50");
  CHECK(lines[3].find(
            "\tSaved checkpoint\tIteration: 20\tJob throughput: 4.0 TFLOP/s/GPU\tCumulative throughput: 2.0 ") !=
        std::string::npos);
  CHECK(contains(lines[4], "\tSaving async checkpoint\tIteration: 30\tJob throughput: 4.0 "));
  CHECK(lines[5] == "2025-06-01 12:05:00\tJob ID: 42\t# GPUs: 2\tSaved async checkpoint\tIteration: 30");
  CHECK(lines[6] == "2025-06-01 12:05:00\tJob ID: 42\t# GPUs: 2\tDeleted checkpoint\tIteration: 10");
  CHECK(lines[7] == "2025-06-01 12:05:00\tJob ID: \t# GPUs: 4\tStarting job");
  CHECK(contains(lines[8], "Job throughput: 2.0 TFLOP/s/GPU\tCumulative throughput: 2.0 "));
  std::filesystem::remove_all(folder);
}

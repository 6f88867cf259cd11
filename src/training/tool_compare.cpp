// gpt_tool compare: two evidence directories, safetensors files, metrics files or logs.

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "pgpt/checkpoint/safetensors.h"
#include "pgpt/training/compare.h"
#include "pgpt/training/compare_runs.h"
#include "pgpt/training/tool_commands.h"
#include "tool_arguments.h"

namespace pgpt::training {
namespace {

/// What compare returns when the two sides differ.
constexpr auto kDiffer = static_cast<ExitCode>(1);

struct Arguments {
  std::vector<std::string> paths;
  CompareOptions options;
  bool logs = false, json = false, all = false;
  std::string plot;
};

double bound_of(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  PGPT_CHECK(ConfigError, !text.empty() && *end == '\0' && value >= 0, "compare: --tolerance: '", text,
             "' is no bound; give a number such as 1e-2");
  return value;
}

Arguments parse(const std::vector<std::string>& words) {
  const ToolArguments given("compare", words, {"--log", "--json", "--all", "--exact"},
                            {"--preset", "--tolerance", "--initial", "--iteration", "--plot"}, 2,
                            {"--iterations", "--kinds"});
  Arguments result;
  result.paths = {given.positional(0), given.positional(1)};
  result.logs = given.has("--log");
  result.json = given.has("--json");
  result.all = given.has("--all");
  CompareOptions& options = result.options;
  options.preset = given.text("--preset").value_or("");
  if (given.has("--preset")) (void)Bounds::preset(options.preset);
  if (given.has("--exact")) {
    PGPT_CHECK(ConfigError, options.preset.empty() || options.preset == "exact", "compare: --exact is --preset exact, ",
               "and --preset ", options.preset, " is given too; remove one");
    options.preset = "exact";
  }
  for (const std::string& pair : given.every("--tolerance")) {
    const std::size_t equals = pair.find('=');
    PGPT_CHECK(ConfigError, equals != std::string::npos && equals > 0, "compare: --tolerance ", pair,
               ": write NAME=BOUND, e.g. gradients=3e-2");
    options.tolerances[pair.substr(0, equals)] = bound_of(pair.substr(equals + 1));
  }
  options.iterations = given.every_integer("--iterations");
  options.kinds = given.list("--kinds").value_or(options.kinds);
  options.initial_path = given.text("--initial").value_or("");
  options.final_iteration = given.integer("--iteration");
  result.plot = given.text("--plot").value_or("");
  PGPT_CHECK(ConfigError, !given.has("--plot") || std::filesystem::path(result.plot).extension() == ".svg",
             "compare: --plot ", result.plot, ": pictures are written as SVG; give a name that ends in .svg");
  return result;
}

bool holds_tensors(const std::string& path) {
  return std::filesystem::is_directory(path) || std::filesystem::path(path).extension() == ".safetensors";
}

void print(const std::string& text) { std::fputs(text.c_str(), stdout); }

}  // namespace

ExitCode tool_compare(const std::vector<std::string>& words) {
  const Arguments arguments = parse(words);
  const std::string &a = arguments.paths[0], &b = arguments.paths[1];
  for (const std::string& path : arguments.paths)
    PGPT_CHECK(DataError, std::filesystem::exists(path), "compare: ", path,
               " does not exist; give evidence folders, safetensors files, metrics files or logs");
  if (!arguments.logs && holds_tensors(a) && holds_tensors(b)) {
    const CompareReport report = compare_tensors(a, b, arguments.options);
    print(arguments.json ? format_json(report) : format_table(report, arguments.all));
    if (!arguments.plot.empty()) checkpoint::write_text_atomically(arguments.plot, format_svg(report));
    return report.match() == Match::kDifferent ? kDiffer : ExitCode::kDone;
  }
  PGPT_CHECK(ConfigError, !holds_tensors(a) && !holds_tensors(b), "compare: ", a, " and ", b,
             arguments.logs ? ": --log reads text logs, not tensors"
                            : " are of different kinds; both must hold tensors, or both metrics");
  PGPT_CHECK(ConfigError, arguments.plot.empty(),
             "compare: --plot draws tensors; give two evidence directories or safetensors files");
  PGPT_CHECK(
      ConfigError,
      arguments.options.kinds.empty() && arguments.options.initial_path.empty() && !arguments.options.final_iteration,
      "compare: --kinds, --initial and --iteration are for tensors; remove them");
  PGPT_CHECK(ConfigError, !arguments.logs || arguments.options.iterations.empty(),
             "compare: --iterations chooses among tensors or metrics, not lines of logs; remove it");
  const NumbersReport report =
      arguments.logs
          ? compare_logs(a, b, arguments.options.tolerances)
          : compare_metrics(a, b, arguments.options.preset, arguments.options.tolerances, arguments.options.iterations);
  print(arguments.json ? format_json(report) : format_table(report, arguments.all));
  return report.agrees() ? ExitCode::kDone : kDiffer;
}

}  // namespace pgpt::training

// gpt_tool compare: two evidence directories, safetensors files, metrics files or logs.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "pgpt/checkpoint/safetensors.h"
#include "pgpt/training/compare.h"
#include "pgpt/training/compare_runs.h"
#include "pgpt/training/tool_commands.h"

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

double to_double(const std::string& option, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  PGPT_CHECK(ConfigError, !text.empty() && *end == '\0' && value >= 0, "compare: ", option, ": '", text,
             "' is no bound; give a number such as 1e-2");
  return value;
}

std::int64_t to_integer(const std::string& option, const std::string& text) {
  PGPT_CHECK(ConfigError,
             !text.empty() && text.size() < 16 && text.find_first_not_of("0123456789") == std::string::npos,
             "compare: ", option, ": '", text, "' is no iteration number");
  return std::stoll(text);
}

Arguments parse(const std::vector<std::string>& words) {
  Arguments result;
  std::size_t i = 0;
  const auto is_option = [](const std::string& word) { return word.rfind("--", 0) == 0; };
  const auto value = [&](const std::string& option) {
    PGPT_CHECK(ConfigError, i < words.size() && !is_option(words[i]), "compare: ", option, " needs a value");
    return words[i++];
  };
  const auto values = [&](const std::string& option) {
    std::vector<std::string> all = {value(option)};
    while (i < words.size() && !is_option(words[i])) all.push_back(words[i++]);
    return all;
  };
  while (i < words.size()) {
    const std::string word = words[i++];
    if (word == "--log") {
      result.logs = true;
    } else if (word == "--json") {
      result.json = true;
    } else if (word == "--all") {
      result.all = true;
    } else if (word == "--exact") {
      result.options.preset = "exact";
    } else if (word == "--preset") {
      result.options.preset = value(word);
      (void)Bounds::preset(result.options.preset);
    } else if (word == "--tolerance") {
      const std::string pair = value(word);
      const std::size_t equals = pair.find('=');
      PGPT_CHECK(ConfigError, equals != std::string::npos && equals > 0, "compare: --tolerance ", pair,
                 ": write NAME=BOUND, e.g. gradients=3e-2");
      result.options.tolerances[pair.substr(0, equals)] = to_double(word, pair.substr(equals + 1));
    } else if (word == "--iterations") {
      for (const std::string& text : values(word)) result.options.iterations.push_back(to_integer(word, text));
    } else if (word == "--kinds") {
      result.options.kinds = values(word);
    } else if (word == "--initial") {
      result.options.initial_path = value(word);
    } else if (word == "--iteration") {
      result.options.final_iteration = to_integer(word, value(word));
    } else if (word == "--plot") {
      result.plot = value(word);
      PGPT_CHECK(ConfigError, std::filesystem::path(result.plot).extension() == ".svg", "compare: --plot ", result.plot,
                 ": pictures are written as SVG; give a name that ends in .svg");
    } else {
      PGPT_CHECK(ConfigError, !is_option(word), "compare: unknown option ", word,
                 "; gpt_tool compare --help lists them");
      result.paths.push_back(word);
    }
  }
  PGPT_CHECK(ConfigError, result.paths.size() == 2, "compare: give two evidence directories, files or logs, not ",
             result.paths.size());
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
    PGPT_CHECK(DataError, std::filesystem::exists(path), "compare: ", path, " does not exist");
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

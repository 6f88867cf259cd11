#include "pgpt/training/tool_commands.h"

#include <cstdio>

namespace pgpt::training {
namespace {

std::string help() {
  std::string text = "usage: gpt_tool COMMAND [ARGUMENTS]\n\n";
  for (const ToolCommand& command : tool_commands()) {
    text += std::string("  ") + command.name + " " + command.synopsis + "\n      " + command.summary + "\n";
  }
  return text;
}

}  // namespace

const std::vector<ToolCommand>& tool_commands() {
  static const std::vector<ToolCommand> all = {
      {"inspect", "DIR [--step N] [--verify] [--arguments] [--json]", "What a checkpoint holds; --verify checks every byte.", tool_inspect},
      {"compare",
       "A B [--log] [--preset bf16|fp32|exact] [--exact] [--tolerance NAME=BOUND ...] [--iterations N ...] [--kinds KIND ...]\n"
       "          [--initial FILE] [--iteration N] [--all] [--json] [--plot FILE.svg]",
       "Compares two runs (evidence directories, safetensors files, metrics files, or logs with --log) and names the first difference;\n"
       "      exit code 1 when they differ.",
       tool_compare},
      {"diff", "A B [--step-a N] [--step-b N]", "Compares two checkpoints, whatever layouts saved them; exit code 1 when they differ.", tool_diff},
  };
  return all;
}

ExitCode run_tool(const std::vector<std::string>& arguments) noexcept {
  try {
    if (arguments.empty() || arguments[0] == "--help" || arguments[0] == "-h" || arguments[0] == "help") {
      std::fputs(help().c_str(), arguments.empty() ? stderr : stdout);
      return arguments.empty() ? ExitCode::kConfiguration : ExitCode::kDone;
    }
    for (const ToolCommand& command : tool_commands()) {
      if (arguments[0] != command.name) continue;
      const std::vector<std::string> rest(arguments.begin() + 1, arguments.end());
      if (!rest.empty() && (rest[0] == "--help" || rest[0] == "-h")) {
        std::printf("usage: gpt_tool %s %s\n\n%s\n", command.name, command.synopsis, command.summary);
        return ExitCode::kDone;
      }
      return command.run(rest);
    }
    std::fprintf(stderr, "gpt_tool: unknown command '%s'\n%s", arguments[0].c_str(), help().c_str());
    return ExitCode::kConfiguration;
  } catch (const Error& error) {
    std::fprintf(stderr, "gpt_tool: %s\n", error.what());
    return error.code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpt_tool: %s\n", error.what());
    return ExitCode::kConfiguration;
  }
}

}  // namespace pgpt::training

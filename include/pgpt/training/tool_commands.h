#pragma once

#include <string>
#include <vector>

#include "pgpt/base/error.h"

// Subcommands of gpt_tool; each lives in a file of its own, src/training/tool_NAME.cpp, and is listed in
// tool_commands().
namespace pgpt::training {

/// One subcommand: `run` gets the words after its name, prints its result to stdout and returns the exit code. It
/// throws pgpt::Error for what the user has to change.
struct ToolCommand {
  const char* name;
  const char* synopsis;  ///< its arguments, as help prints them
  const char* summary;   ///< one line of help
  ExitCode (*run)(const std::vector<std::string>& arguments);
};

/// All subcommands in the order of the help text.
[[nodiscard]] const std::vector<ToolCommand>& tool_commands();

/// The whole of gpt_tool: dispatches `arguments` (without the program name), prints help and errors; nothing is thrown.
[[nodiscard]] ExitCode run_tool(const std::vector<std::string>& arguments) noexcept;

/// Prints parameters, memory and operations of a training command for any layout, without a GPU.
ExitCode tool_estimate(const std::vector<std::string>& arguments);
/// Makes a .bin/.idx pair of JSON lines (README, "Train on your data").
ExitCode tool_preprocess(const std::vector<std::string>& arguments);
/// Prints what a checkpoint holds; --verify reads and checks every byte, --json prints the manifest with sizes.
ExitCode tool_inspect(const std::vector<std::string>& arguments);
/// Compares evidence directories, safetensors files, metrics files or training logs (--log); exit code 1 when they
/// differ.
ExitCode tool_compare(const std::vector<std::string>& arguments);
/// Compares two checkpoints tensor by tensor and value by value of their state; exit code 1 when they differ.
ExitCode tool_diff(const std::vector<std::string>& arguments);

/// Writes a checkpoint's weights as a model of another program (docs/conversion.md).
ExitCode tool_export(const std::vector<std::string>& arguments);
/// Makes a checkpoint of weights from a model of another program (docs/conversion.md).
ExitCode tool_import(const std::vector<std::string>& arguments);

}  // namespace pgpt::training

// gpt_tool: looks at, compares and converts what pretrain_gpt reads and writes; needs no GPU.

#include <string>
#include <vector>

#include "pgpt/training/tool_commands.h"

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  return static_cast<int>(pgpt::training::run_tool(arguments));
}

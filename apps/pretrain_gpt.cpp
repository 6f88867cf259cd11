// pretrain_gpt: parse, validate, join the job, train; errors become exit codes.

#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "pgpt/base/error.h"
#include "pgpt/training/launch.h"

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  return static_cast<int>(pgpt::training::launch(arguments));
}

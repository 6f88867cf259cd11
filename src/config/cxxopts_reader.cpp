// The only file that sees cxxopts. Its vectors are cut at this character instead of commas, which paths may hold.
#define CXXOPTS_VECTOR_DELIMITER '\x1f'
#include <cxxopts.hpp>

#include "pgpt/base/error.h"
#include "values.h"

namespace pgpt::config {

std::vector<Occurrence> read_with_cxxopts(const std::vector<Occurrence>& occurrences) {
  std::vector<Occurrence> read;
  cxxopts::Options options("pretrain_gpt");
  auto add = options.add_options();
  std::vector<std::string> words = {"pretrain_gpt"};
  for (const Occurrence& use : occurrences) {
    read.push_back({use.option, use.name, {}});
    const std::string key = use.name.substr(2);
    if (use.option->type == OptionType::kSwitch) {
      add(key, "", cxxopts::value<bool>());
      words.push_back(use.name);
    } else if (!use.tokens.empty()) {
      add(key, "", cxxopts::value<std::vector<std::string>>());
      // Each value is ended, not separated, by the delimiter, so that empty ones survive.
      std::string word = use.name + "=";
      for (const std::string& token : use.tokens) word += token + CXXOPTS_VECTOR_DELIMITER;
      words.push_back(std::move(word));
    }
  }
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  try {
    const cxxopts::ParseResult result = options.parse(static_cast<int>(argv.size()), argv.data());
    for (Occurrence& use : read) {
      const std::string key = use.name.substr(2);
      if (use.option->type != OptionType::kSwitch && result.count(key) > 0) {
        use.tokens = result[key].as<std::vector<std::string>>();
      }
    }
  } catch (const cxxopts::exceptions::exception& error) {
    throw ConfigError(error.what());
  }
  return read;
}

}  // namespace pgpt::config

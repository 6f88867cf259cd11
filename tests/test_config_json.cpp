// --config and --print-config.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "support/catch.h"
#include "support/json.h"
#include "test_config_support.h"

using namespace pgpt::config;
using namespace test_config;

namespace {

/// A file with this text that is removed with the object.
class ConfigFile {
 public:
  explicit ConfigFile(const std::string& text) { pgpt::test::write_text(path(), text); }
  ConfigFile(const ConfigFile&) = delete;
  ConfigFile& operator=(const ConfigFile&) = delete;
  ~ConfigFile() { std::remove(path().c_str()); }
  [[nodiscard]] static std::string path() { return "test_config_file.json"; }
  [[nodiscard]] static std::string flag() { return "--config " + path() + " "; }
};

std::string file_error(const std::string& json) {
  const ConfigFile file(json);
  return error_of(kTiny + ConfigFile::flag());
}

}  // namespace

TEST_CASE("a printed configuration reads back as the same configuration", "[cpu][config]") {
  const nlohmann::json cases = pgpt::test::read_json(std::string(PGPT_TEST_DATA) + "/config_cases.json");
  for (const auto& [name, entry] : cases.items()) {
    INFO(name);
    const std::string flags = entry["flags"];
    const std::int64_t world = entry["ranks"];
    const ParsedCommand printed = parse(flags + " --print-config", world);
    CHECK(printed.action == ParsedCommand::Action::kPrintConfig);
    const ConfigFile file(printed.text);
    const ParsedCommand read = parse(ConfigFile::flag() + "--print-config", world);
    CHECK(read.text == printed.text);
    CHECK(read.config == printed.config);
  }
}

TEST_CASE("lists, patterns, infinities and options without effect survive the round trip", "[cpu][config]") {
  std::vector<std::string> arguments =
      split_words(kTiny +
                  "--iterations-to-skip 2 4 --num-experts 2 --moe-layer-freq [1,0]*2 --loss-scale-window inf "
                  "--rampup-batch-size 1 2 3 --no-log-progress-line --evidence-dir D --timing-log-level 2 "
                  "--moe-aux-loss-coeff 0.5 --print-config --evidence-content");
  arguments.insert(arguments.end(), {"", "a \"b\""});
  const ParsedCommand printed = parse_words(arguments);
  const ConfigFile file(printed.text);
  const ParsedCommand read = parse(ConfigFile::flag() + "--print-config");
  CHECK(read.text == printed.text);
  CHECK(read.config == printed.config);
  CHECK(read.warnings == printed.warnings);
  CHECK(read.config.logging.progress_line == false);
}

TEST_CASE("the command line wins over the file", "[cpu][config]") {
  const ConfigFile file(R"({"num_layers": 6, "hidden-size": 32, "disable_bias_linear": true, "bf16": true, "lr": 1})");
  const Config c = config_of(kTiny + ConfigFile::flag() + "--hidden-size 128");
  CHECK(c.model.num_layers == 4);
  CHECK(c.model.hidden_size == 128);
  CHECK(c.optimizer.lr == 1e-3);
  CHECK_FALSE(c.model.add_bias_linear);
  CHECK(c.training.params_dtype == Dtype::kBFloat16);
}

TEST_CASE("switches in a file name the option or what it stores", "[cpu][config]") {
  const auto bias = [](const std::string& json) {
    const ConfigFile file(json);
    return config_of(kTiny + ConfigFile::flag()).model.add_bias_linear;
  };
  CHECK_FALSE(bias(R"({"disable-bias-linear": true})"));
  CHECK(bias(R"({"disable-bias-linear": false})"));
  CHECK_FALSE(bias(R"({"add_bias_linear": false})"));
  CHECK(bias(R"({"add_bias_linear": true})"));
  CHECK(bias(R"({"add_bias_linear": null})"));
}

TEST_CASE("wrong files are refused with file and key", "[cpu][config]") {
  CHECK(contains(error_of(kTiny + "--config /no/such/file.json"), "--config /no/such/file.json cannot be read"));
  CHECK(contains(file_error("{"), "is not valid JSON"));
  CHECK(contains(file_error("[1]"), "must hold one JSON object"));
  CHECK(contains(file_error(R"({"num_layer": 3})"), "\"num_layer\" is no option; did you mean num_layers?"));
  CHECK(contains(file_error(R"({"num_layers": 3.5})"), "\"num_layers\" takes an integer, not 3.5"));
  CHECK(contains(file_error(R"({"num_layers": "3"})"), "\"num_layers\" takes an integer, not \"3\""));
  CHECK(contains(file_error(R"({"bf16": 1})"), "\"bf16\" takes true or false, not 1"));
  CHECK(contains(file_error(R"({"lr": true})"), "\"lr\" takes a number, not true"));
  CHECK(contains(file_error(R"({"lr": "fast"})"), "\"lr\" takes a number, not 'fast'"));
  CHECK(contains(file_error(R"({"tensorboard_dir": 3})"), "\"tensorboard_dir\" takes a string, not 3"));
  CHECK(contains(file_error(R"({"optimizer": "adagrad"})"), "\"optimizer\" takes one of adam, sgd"));
  CHECK(contains(file_error(R"({"optimizer": "lion"})"), "--optimizer lion is not supported"));
  CHECK(contains(file_error(R"({"iterations_to_skip": 3})"), "\"iterations_to_skip\" takes a list of integers, not 3"));
  CHECK(contains(file_error(R"({"num_layers": [3]})"), "\"num_layers\" takes an integer, not [3]"));
  CHECK(contains(file_error(R"({"moe_layer_freq": [1, "0"]})"),
                 "\"moe_layer_freq\" takes an integer, a list of integers"));
  CHECK(contains(file_error(R"({"seed": 1, "seed": 2})"), "\"seed\" stands twice"));
  CHECK(contains(file_error(R"({"add_bias_linear": true, "disable_bias_linear": true})"),
                 "which another key of the file sets too"));
  CHECK(contains(file_error(R"({"dry_run": true})"), "\"dry_run\" belongs on the command line"));
  CHECK(contains(file_error(R"({"config": "x"})"), "\"config\" belongs on the command line"));
  const std::string start = "--config " + ConfigFile::path() + ": ";
  CHECK(file_error(R"({"num-layer": 3})") == start + "\"num-layer\" is no option; did you mean num-layers?");
  CHECK(file_error(R"({"add_bias_lineer": true})") ==
        start + "\"add_bias_lineer\" is no option; did you mean add_bias_linear?");
  CHECK(file_error(R"({"no such key": 3})") == start + "\"no such key\" is no option; pretrain_gpt --help lists them");
  CHECK(file_error(R"({"num_layers": "3"})") ==
        start + "\"num_layers\" takes an integer, not \"3\"; leave the quotes out");
  CHECK(file_error(R"({"num_layers": "x"})") == start + "\"num_layers\" takes an integer, not \"x\"");
  CHECK(contains(file_error(R"({"bf16": "true"})"), "takes true or false, not \"true\"; leave the quotes out"));
  CHECK(contains(file_error(R"({"tensorboard_dir": 3})"), "takes a string, not 3; put it in quotes"));
  CHECK(file_error(R"({"optimizer": "adagrad"})") == start + "\"optimizer\" takes one of adam, sgd, not 'adagrad'");
  CHECK(contains(file_error(R"({"seed": 1, "seed": 2})"), start + "\"seed\" stands twice; remove one of the two"));
  CHECK(file_error("{").starts_with("--config " + ConfigFile::path() + " is not valid JSON: parse error at line 1"));
  CHECK(file_error(" \n") == "--config " + ConfigFile::path() + " is empty; give a JSON object, {} for no options");
  CHECK(error_of(kTiny + "--config .") == "--config . is a folder; give a file in it");
}

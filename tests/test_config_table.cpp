// The option table as data: every row is complete, is reachable, and does what its status says.
#include <map>
#include <set>

#include "pgpt/config/option_table.h"
#include "support/catch.h"
#include "test_config_support.h"

using namespace pgpt::config;
using namespace test_config;

namespace {

/// A value that differs from the default and that the row's type accepts.
std::vector<std::string> other_value(const Option& option) {
  const auto one = [&]() -> std::string {
    switch (option.type) {
      case OptionType::kInteger:
      case OptionType::kPattern:
        return option.default_text == "3" ? "5" : "3";
      case OptionType::kReal:
        return "0.25";
      case OptionType::kChoice:
        for (const Choice& choice : option.choices) {
          if (choice.name != option.default_text) return choice.name;
        }
        return option.choices.front().name;
      default:
        return "word";
    }
  };
  if (option.type == OptionType::kSwitch) return {};
  return std::vector<std::string>(option.count == ValueCount::kExactly ? option.exact_count : 1, one());
}

std::string command_with(const std::string& name, const std::vector<std::string>& values) {
  std::string command = kTiny + name;
  for (const std::string& value : values) command += " " + value;
  return command + " --dry-run";
}

}  // namespace

TEST_CASE("every row has a unique name, a destination, a group and a sentence of help", "[cpu][config]") {
  std::set<std::string> names;
  std::map<std::string, const Option*> first;
  for (const Option& option : option_table()) {
    INFO(option.names.front());
    for (const std::string& name : option.names) {
      CHECK(names.insert(name).second);
      CHECK(name.starts_with("--"));
      CHECK(find_option(name) != nullptr);
    }
    CHECK_FALSE(option.destination.empty());
    CHECK_FALSE(option.group.empty());
    CHECK(option.help.ends_with('.'));
    CHECK((option.status == Status::kWorks) == option.note.empty());
    for (const Choice& choice : option.choices) CHECK((choice.status == Status::kWorks) == choice.note.empty());
    CHECK((option.type == OptionType::kChoice) == !option.choices.empty());
    CHECK_NOTHROW(default_value(option));
    // Rows that share a destination agree on its default and its kind.
    const auto [before, fresh] = first.emplace(option.destination, &option);
    if (!fresh) {
      CHECK(before->second->default_text == option.default_text);
      CHECK(before->second->type == option.type);
      CHECK(before->second->status == option.status);
    }
  }
  CHECK(names.size() > 500);
}

TEST_CASE("what a checkpoint says of an option can be read back and compared", "[cpu][config]") {
  int architecture = 0;
  for (const Option& option : option_table()) {
    INFO(option.names.front());
    if (option.taken == Taken::kNever && !option.imported) continue;
    CHECK_FALSE(option.is_list());
    CHECK_FALSE(option.is_family());
    CHECK(find_destination(option.destination) == &option);  // where rows share a destination, the first has the mark
    if (!option.architecture) continue;
    ++architecture;
    // A run that is told to give the checkpoint's value must be able to take it, whoever wrote the checkpoint.
    CHECK(option.imported);
    CHECK(option.taken != Taken::kNever);
    if (option.taken == Taken::kIfUnset) CHECK_FALSE(option.default_text);  // it would always count as set
  }
  CHECK(architecture > 20);
}

TEST_CASE("every option round-trips from the command line to its destination", "[cpu][config]") {
  for (const Option& option : option_table()) {
    if (option.is_family()) continue;
    const std::vector<std::string> tokens = other_value(option);
    for (const std::string& name : option.names) {
      INFO(name);
      const Value value = convert_value(option, name, tokens);
      if (option.type == OptionType::kSwitch) {
        CHECK(value == Value(option.switch_value));
        CHECK_THROWS_AS(convert_value(option, name, {"1"}), pgpt::ConfigError);
        continue;
      }
      if (option.default_text != tokens.front()) CHECK(value != default_value(option));
      if (option.count == ValueCount::kOne) CHECK_THROWS_AS(convert_value(option, name, {}), pgpt::ConfigError);
      if (option.type == OptionType::kChoice)
        CHECK_THROWS_AS(convert_value(option, name, {"no-such-choice"}), pgpt::ConfigError);
      if (option.type == OptionType::kInteger) CHECK_THROWS_AS(convert_value(option, name, {"1e3"}), pgpt::ConfigError);
      if (option.type == OptionType::kReal) CHECK_THROWS_AS(convert_value(option, name, {"x"}), pgpt::ConfigError);
    }
  }
}

TEST_CASE("refused options stop the program with their advice unless set to their default", "[cpu][config]") {
  int refused = 0;
  for (const Option& option : option_table()) {
    if (option.status != Status::kRefused) continue;
    ++refused;
    std::string name = option.names.front();
    if (const std::size_t star = name.find('*'); star != std::string::npos) name.replace(star, 1, "x");
    const std::string text = error_of(command_with(name, other_value(option)));
    INFO(name << ": " << text);
    CHECK(contains(text, name));
    CHECK(contains(text, option.note));
    if (option.default_text && option.type != OptionType::kSwitch) {
      CHECK(error_of(command_with(name, {*option.default_text})) == "");
    }
  }
  CHECK(refused > 50);
}

TEST_CASE("options without effect warn once and change nothing", "[cpu][config]") {
  const Config plain = parse(kTiny + "--dry-run").config;
  int ignored = 0;
  for (const Option& option : option_table()) {
    if (option.status != Status::kNoEffect) continue;
    // These need a second option or a larger world; test_config_rules.cpp has their cases.
    static const std::set<std::string> kConditional = {"tp_comm_overlap",
                                                       "hierarchical_context_parallel_sizes",
                                                       "wandb_project",
                                                       "distribute_saved_activations",
                                                       "overlap_param_gather_with_optimizer_step",
                                                       "moe_shared_expert_overlap"};
    if (kConditional.contains(option.destination)) continue;
    ++ignored;
    std::string name = option.names.front();
    if (const std::size_t star = name.find('*'); star != std::string::npos) name.replace(star, 1, "x");
    const std::string once = command_with(name, other_value(option));
    INFO(once);
    const ParsedCommand command = parse(once + once.substr(kTiny.size() - 1));
    int warnings = 0;
    for (const std::string& line : command.warnings) warnings += contains(line, option.names.front()) ? 1 : 0;
    CHECK(warnings == 1);
    Config without_dump = command.config;
    without_dump.arguments = plain.arguments;
    without_dump.checkpoint = plain.checkpoint;  // names of the reference's formats are kept for the cross-field checks
    CHECK(without_dump == plain);
  }
  CHECK(ignored > 100);
}

TEST_CASE("refused and ineffective choices say so", "[cpu][config]") {
  for (const Option& option : option_table()) {
    for (const Choice& choice : option.choices) {
      if (choice.status == Status::kWorks) continue;
      const std::string command = command_with(option.names.front(), {choice.name});
      INFO(command);
      if (choice.status == Status::kRefused) {
        CHECK(contains(error_of(command),
                       option.names.front() + " " + choice.name + " is not supported: " + choice.note));
      } else {
        const ParsedCommand parsed = parse(command);
        REQUIRE(parsed.warnings.size() == 1);
        CHECK(contains(parsed.warnings[0], choice.note));
      }
    }
  }
}

TEST_CASE("switches generated from configuration classes have both spellings, hand-written ones one", "[cpu][config]") {
  for (const char* name :
       {"--no-log-loss-scale-to-tensorboard", "--disable-log-loss-scale-to-tensorboard", "--disable-bias-linear",
        "--no-initialization", "--no-gradient-accumulation-fusion", "--disable-gloo-process-groups",
        "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"}) {
    CHECK(find_option(name) != nullptr);
  }
  for (const char* name :
       {"--no-bias-linear", "--disable-initialization", "--gradient-accumulation-fusion", "--no-gloo-process-groups"}) {
    CHECK(find_option(name) == nullptr);
  }
}

TEST_CASE("families of names are recognised by their fixed ends", "[cpu][config]") {
  CHECK(find_option("--mamba-state-dim") != nullptr);
  CHECK(find_option("--mup-embedding-mult") != nullptr);
  CHECK(find_option("--mup-embedding") == nullptr);
  CHECK(find_option("--moe-deepep-num-sms") != nullptr);
  const ParsedCommand command = parse(kTiny + "--straggler-minmax-count 3 --straggler-ctrlr-port 1 --dry-run");
  REQUIRE(command.warnings.size() == 1);
  CHECK(contains(command.warnings[0], "--straggler-*"));
}

TEST_CASE("the written option page is the generated one", "[cpu][config]") {
  const std::string page = pgpt::test::read_text(std::string(PGPT_SOURCE_DIR) + "/docs/options.md");
  CHECK(page == help_markdown());  // regenerate: pretrain_gpt --help-markdown > docs/options.md
}

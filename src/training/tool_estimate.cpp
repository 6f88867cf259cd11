// gpt_tool estimate: parameters, memory and operations of a training command for any layout, without a GPU.
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "pgpt/base/spelling.h"
#include "pgpt/config/estimate.h"
#include "pgpt/config/option_table.h"
#include "pgpt/config/parse.h"
#include "pgpt/data/tokenizer.h"
#include "pgpt/training/checkpointing.h"
#include "pgpt/training/tool_commands.h"
#include "text.h"

namespace pgpt::training {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMebibyte = 1024.0 * 1024.0;

/// Reads the options as pretrain_gpt --dry-run does; sizes do not depend on data, so that none need be named.
config::Config parse(std::vector<std::string> words) {
  words.emplace_back("--dry-run");
  config::ParseContext context;
  context.checkpoint_arguments = [](const std::string& load, std::optional<std::int64_t> step) {
    auto stored = stored_arguments(load, step);
    PGPT_CHECK(DataError, stored, "estimate: --use-checkpoint-args: --load ", load,
               " holds no checkpoint; give one, or leave --use-checkpoint-args out");
    return stored;
  };
  config::ParsedCommand command;
  try {
    command = config::parse_command_line(words, context);
  } catch (const ConfigError& error) {
    if (!std::string(error.what()).starts_with("no data source")) throw;
    words.emplace_back("--mock-data");
    command = config::parse_command_line(words, context);
  }
  PGPT_CHECK(ConfigError, command.action == config::ParsedCommand::Action::kDryRun,
             "estimate: --version and --help-markdown belong to pretrain_gpt; give the options of a training command");
  if (command.config.model.padded_vocab_size == 0) {
    const data::TokenizerFacts facts = data::resolve_tokenizer(command.config);
    config::apply_tokenizer(command.config, facts.vocab_size, facts.eod, facts.pad);
  }
  return command.config;
}

std::string layout_line(const config::Config& c) {
  const config::ParallelConfig& p = c.parallel;
  const config::TrainingConfig& t = c.training;
  return text(
      "%lld rank(s): tensor %lld, GTP %lld, data parallel %lld, context %lld, pipeline %lld; micro-batch %lld x %lld "
      "tokens, %lld a step",
      static_cast<long long>(p.world_size), static_cast<long long>(p.tensor), static_cast<long long>(p.gtp),
      static_cast<long long>(p.replicate_data), static_cast<long long>(p.context), static_cast<long long>(p.pipeline),
      static_cast<long long>(t.micro_batch_size), static_cast<long long>(c.model.seq_length),
      static_cast<long long>(t.global_batch_size / (t.micro_batch_size * p.data_ranks())));
}

Json rank_json(const config::RankEstimate& r) {
  Json moments = Json::array();
  for (const config::MemoryMoment& m : r.moments) {
    moments.push_back(
        {{"name", m.name}, {"activation_bytes", m.activations}, {"logit_bytes", m.logits}, {"work_bytes", m.work}});
  }
  return {{"parameters", r.parameters},
          {"weight_bytes", r.weight_bytes},
          {"gradient_bytes", r.gradient_bytes},
          {"master_bytes", r.master_bytes},
          {"moment_bytes", r.moment_bytes},
          {"buffer_bytes", r.buffer_bytes},
          {"resident_bytes", r.resident_bytes()},
          {"peak_bytes", r.peak_bytes()},
          {"peak_moment", r.fullest_moment().name},
          {"moments", std::move(moments)}};
}

void print_json(const config::Config& c, const config::Estimate& sizes) {
  Json json;
  json["layout"] = layout_line(c);
  json["parameters"] = sizes.total_parameters;
  json["step_flops"] = sizes.step_flops;
  json["pipeline_ranks"] = Json::array();
  for (const config::RankEstimate& rank : sizes.stages) json["pipeline_ranks"].push_back(rank_json(rank));
  json["recompute"] = Json::array();
  for (const config::RecomputeChoice& choice : config::estimate_recompute_choices(c)) {
    Json entry = rank_json(choice.rank);
    entry["options"] = choice.options;
    json["recompute"].push_back(std::move(entry));
  }
  std::printf("%s\n", json.dump(1).c_str());
}

void print_text(const config::Config& c, const config::Estimate& sizes) {
  std::printf("%s\n", layout_line(c).c_str());
  std::printf("parameters of the model: %lld; floating-point operations of a step: %.4e\n",
              static_cast<long long>(sizes.total_parameters), sizes.step_flops);
  for (std::size_t i = 0; i < sizes.stages.size(); ++i) {
    const config::RankEstimate& rank = sizes.stages[i];
    std::printf("\n");
    if (sizes.stages.size() > 1) std::printf("pipeline rank %zu\n", i);
    std::printf("parameters of a rank: %lld\n", static_cast<long long>(rank.parameters));
    for (const std::string& line : config::memory_table(rank)) std::printf("%s\n", line.c_str());
  }
  std::printf("\nby recompute choice (MiB)\n%14s%13s%13s\n", "activations", "other", "peak");
  for (const config::RecomputeChoice& choice : config::estimate_recompute_choices(c)) {
    const config::MemoryMoment& fullest = choice.rank.fullest_moment();
    std::printf("%14.1f%13.1f%13.1f  %s\n", fullest.activations / kMebibyte,
                (fullest.logits + fullest.work) / kMebibyte, choice.rank.peak_bytes() / kMebibyte,
                choice.options.empty() ? "none" : choice.options.c_str());
  }
  std::printf("\nThe CUDA context, loaded kernels and, with several ranks, NCCL's buffers come on top.\n");
}

/// Says so when a word is a mistyped --json, which pretrain_gpt does not know.
void check_own_option(const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    const std::string name = word.substr(0, word.find('='));
    if (!name.starts_with("--") || config::find_option(name) != nullptr) continue;
    PGPT_CHECK(ConfigError, name != "--json", "estimate: --json takes no value, found '", word.substr(name.size() + 1),
               "'; write --json alone, or leave it out");
    if (!nearest_words(name, config::listed_names()).empty()) continue;
    const std::string near = did_you_mean(name, {"--json"});
    PGPT_CHECK(ConfigError, near.empty(), "estimate: unknown option ", name, near);
  }
}

}  // namespace

ExitCode tool_estimate(const std::vector<std::string>& words) {
  std::vector<std::string> options = words;
  const bool as_json = std::find(options.begin(), options.end(), "--json") != options.end();
  options.erase(std::remove(options.begin(), options.end(), "--json"), options.end());
  check_own_option(options);
  const config::Config config = parse(std::move(options));
  const config::Estimate sizes = config::estimate(config);
  if (as_json) {
    print_json(config, sizes);
  } else {
    print_text(config, sizes);
  }
  return ExitCode::kDone;
}

}  // namespace pgpt::training

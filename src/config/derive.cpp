#include "derive.h"

#include <algorithm>
#include <cctype>

namespace pgpt::config {

namespace {

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

void fill_argument_dump(Derivation& d) {
  for (const auto& [name, value] : d.values.all()) {
    const Option* option = find_destination(name);
    const bool listed = option == nullptr || !(option->action || option->hidden) || name == "world_size";
    if (listed) d.config.arguments.emplace_back(name, print_value(value));
  }
  std::stable_sort(d.config.arguments.begin(), d.config.arguments.end(),
                   [](const auto& a, const auto& b) { return lower(a.first) < lower(b.first); });
}

void set_argument(Config& config, const std::string& name, const std::string& value) {
  const auto found = std::find_if(config.arguments.begin(), config.arguments.end(),
                                  [&](const auto& entry) { return entry.first == name; });
  if (found != config.arguments.end()) found->second = value;
}

}  // namespace

std::int64_t Derivation::positive(const char* destination) const {
  const std::int64_t value = values.integer(destination);
  PGPT_CHECK(ConfigError, value > 0, option_name(destination), " is ", value, "; it must be above 0");
  return value;
}

std::optional<std::int64_t> Derivation::maybe_positive(const char* destination) const {
  if (!values.is_set(destination)) return std::nullopt;
  return positive(destination);
}

void Derivation::warn_unused(const char* destination, const char* needed) {
  static const Values defaults;
  const Value& value = values.at(destination);
  if (value == defaults.at(destination)) return;
  // A switch says all with its name.
  const std::string given = std::holds_alternative<bool>(value) ? "" : " " + print_value(value);
  notice(concat("WARNING: ", option_name(destination), given, " has no effect without ", needed));
}

void Derivation::warn_unused(std::initializer_list<const char*> destinations, const char* needed) {
  for (const char* destination : destinations) warn_unused(destination, needed);
}

void derive_all(Derivation& d) {
  derive_world(d);
  derive_shorthands(d);
  derive_batches(d);
  derive_pipeline(d);
  derive_overlap(d);
  check_microbatches(d);
  derive_precision(d);
  derive_run_length(d);
  derive_model_sizes(d);
  derive_intervals(d);
  derive_weight_decay(d);
  derive_recompute(d);
  derive_tensor_parallel(d);
  check_gtp(d);
  derive_model_kind(d);
  derive_experts(d);
  derive_data(d);
  derive_checkpoint(d);
  check_heads(d);
  derive_schedules(d);
  derive_logging(d);
  derive_tokenizer(d);
  d.values.derive("padded_vocab_size", d.config.model.padded_vocab_size > 0 ? Value(d.config.model.padded_vocab_size)
                                                                            : Value(std::monostate{}));
  fill_argument_dump(d);
}

void apply_tokenizer(Config& config, std::int64_t vocab_size, std::int64_t eod_id, std::int64_t pad_id) {
  set_vocabulary(config, vocab_size, eod_id, pad_id);
  set_argument(config, "vocab_size", std::to_string(vocab_size));
  set_argument(config, "padded_vocab_size", std::to_string(config.model.padded_vocab_size));
}

std::string format_arguments(const Config& config) {
  // Name and dots fill this many columns, as log readers of the reference expect.
  constexpr std::size_t kWidth = 48;
  std::string out = "------------------------ arguments ------------------------\n";
  for (const auto& [name, value] : config.arguments) {
    const std::size_t dots = name.size() < kWidth ? kWidth - name.size() : 0;
    out += "  " + name + " " + std::string(dots, '.') + " " + value + "\n";
  }
  return out + "-------------------- end of arguments ---------------------";
}

}  // namespace pgpt::config

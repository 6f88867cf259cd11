// Data sources, tokenizer, checkpoints, logging.
#include <nlohmann/json.hpp>
#include <sstream>

#include "derive.h"

namespace pgpt::config {

namespace {

constexpr auto kLegacySplit = "969, 30, 1";
constexpr auto kSources =
    "--mock-data, --data-path, --data-args-path, --train-data-path with --valid-data-path and "
    "--test-data-path, or --per-split-data-args-path";

std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> result;
  for (std::string word; stream >> word;) result.push_back(word);
  return result;
}

void read_per_split_file(const std::string& path, DataConfig& data) {
  const std::string text = read_option_file("--per-split-data-args-path", path);
  const nlohmann::json document = nlohmann::json::parse(text, nullptr, false);
  PGPT_CHECK(DataError, document.is_object(), "--per-split-data-args-path ", path,
             " must hold a JSON object with the keys train, valid and test");
  const auto read = [&](const char* key) -> std::vector<std::string> {
    PGPT_CHECK(DataError, document.contains(key), "--per-split-data-args-path ", path, " lacks the key \"", key,
               "\"; use null for no data");
    const nlohmann::json& value = document[key];
    if (value.is_null()) return {};
    if (value.is_string()) return words(value.get<std::string>());
    PGPT_CHECK(DataError, value.is_array(), "--per-split-data-args-path ", path, ": \"", key,
               "\" must be a string, a list or null");
    std::vector<std::string> list;
    for (const nlohmann::json& item : value) list.push_back(item.is_string() ? item.get<std::string>() : item.dump());
    return list;
  };
  data.train_data_path = read("train");
  data.valid_data_path = read("valid");
  data.test_data_path = read("test");
}

}  // namespace

void derive_shorthands(Derivation& d) {
  Values& v = d.values;
  if (v.flag("recompute_activations")) {
    PGPT_CHECK(ConfigError, v.text("recompute_granularity") != "full",
               "--recompute-activations means selective, but --recompute-granularity is full; give one");
    v.derive("recompute_granularity", std::string("selective"));
  }
  if (!v.is_set("tokenizer_type")) v.derive("tokenizer_type", std::string("GPT2BPETokenizer"));
  const bool path = !v.texts("data_path").empty();
  const bool file = v.is_set("data_args_path");
  PGPT_CHECK(ConfigError, !path || !file, "--data-path and --data-args-path exclude each other; give one");
  if (path && !v.is_set("split")) {
    v.derive("split", std::string(kLegacySplit));
    d.notice(concat("WARNING: --data-path without --split; using ", kLegacySplit));
  }
  PGPT_CHECK(ConfigError, !file || v.is_set("split"), "--data-args-path needs --split, e.g. --split ", kLegacySplit);
}

void derive_data(Derivation& d) {
  DataConfig& data = d.config.data;
  const Values& v = d.values;
  data.mock = v.flag("mock_data");
  data.data_path = v.texts("data_path");
  if (v.is_set("data_args_path")) {
    data.data_path = words(read_option_file("--data-args-path", v.text("data_args_path")));
    PGPT_CHECK(DataError, !data.data_path.empty(), "--data-args-path ", v.text("data_args_path"), " holds no words");
  }
  data.train_data_path = v.texts("train_data_path");
  data.valid_data_path = v.texts("valid_data_path");
  data.test_data_path = v.texts("test_data_path");
  const bool per_split = !data.train_data_path.empty() || !data.valid_data_path.empty() || !data.test_data_path.empty();
  const bool per_split_file = v.is_set("per_split_data_args_path");
  PGPT_CHECK(ConfigError, !per_split || !per_split_file,
             "--train/valid/test-data-path and --per-split-data-args-path exclude each other; give one");
  if (per_split_file) read_per_split_file(v.text("per_split_data_args_path"), data);
  const int sources = int{data.mock} + int{!data.data_path.empty()} + int{per_split || per_split_file};
  PGPT_CHECK(ConfigError, sources != 0, "no data source; give one of ", kSources);
  PGPT_CHECK(ConfigError, sources == 1, "more than one data source:", data.mock ? " --mock-data" : "",
             v.is_set("data_args_path") ? " --data-args-path"
             : data.data_path.empty()   ? ""
                                        : " --data-path",
             per_split_file ? " --per-split-data-args-path"
             : per_split    ? " --train/valid/test-data-path"
                            : "",
             "; give one of them");
  if (data.mock) d.warn_unused("split", "--data-path");
  PGPT_CHECK(ConfigError, !v.given("split") || !(per_split || per_split_file),
             "--split cannot be combined with data paths for each split; remove it");
  data.split = v.text("split");
  data.cache_path = v.text("data_cache_path");
  data.mmap = v.flag("mmap_bin_files");
  data.data_sharding = v.flag("data_sharding");
  if (v.text("dataloader_type") != "cyclic") d.warn_unused("data_sharding", "--dataloader-type cyclic");
  data.num_workers = v.integer("num_workers");
  PGPT_CHECK(ConfigError, data.num_workers >= 0, "--num-workers is ", data.num_workers, "; it must not be negative");
  (void)d.positive("num_dataset_builder_threads");
  data.reset_position_ids = v.flag("reset_position_ids");
  if (d.config.model.position_embedding != PositionEmbedding::kLearnedAbsolute) {
    d.warn_unused("reset_position_ids", "--position-embedding-type learned_absolute");
  }
  data.reset_attention_mask = v.flag("reset_attention_mask");
  data.eod_mask_loss = v.flag("eod_mask_loss");
  data.inter_document_masking = v.flag("dataloader_inter_document_masking");
  data.create_attention_mask = v.flag("create_attention_mask_in_dataloader") && !data.inter_document_masking;
  data.allow_ambiguous_pad_tokens = v.flag("allow_ambiguous_pad_tokens");
  data.mid_level_surplus = v.real("mid_level_dataset_surplus");
  PGPT_CHECK(ConfigError, data.mid_level_surplus >= 0, "--mid-level-dataset-surplus is ", data.mid_level_surplus,
             "; it must not be negative");
}

std::int64_t padded_vocab_size(std::int64_t vocab_size, std::int64_t divisor, std::int64_t tensor) {
  PGPT_CHECK(ConfigError, vocab_size > 0 && divisor > 0 && tensor > 0, "cannot pad a vocabulary of ", vocab_size,
             " to a multiple of --make-vocab-size-divisible-by ", divisor, " x tensor parallel size ", tensor);
  const std::int64_t unit = divisor * tensor;
  return (vocab_size + unit - 1) / unit * unit;
}

void set_vocabulary(Config& config, std::int64_t vocab_size, std::int64_t eod_id, std::int64_t pad_id) {
  ModelConfig& m = config.model;
  const std::int64_t tensor = config.parallel.tensor;
  PGPT_CHECK(ConfigError, vocab_size > 0, "the vocabulary has ", vocab_size, " entries; give --vocab-size");
  PGPT_CHECK(ConfigError, eod_id < vocab_size, "the end-of-document id ", eod_id, " is not below the vocabulary size ",
             vocab_size, "; change --null-tokenizer-eod-id or --vocab-size");
  PGPT_CHECK(ConfigError, pad_id < vocab_size, "the pad id ", pad_id, " is not below the vocabulary size ", vocab_size,
             "; change --null-tokenizer-pad-id or --vocab-size");
  m.vocab_size = vocab_size;
  if (m.padded_vocab_size > 0) {
    PGPT_CHECK(ConfigError, m.padded_vocab_size >= vocab_size, "--padded-vocab-size ", m.padded_vocab_size,
               " is below the vocabulary size ", vocab_size);
  } else if (m.pad_vocab_size) {
    m.padded_vocab_size = padded_vocab_size(vocab_size, m.make_vocab_size_divisible_by, tensor);
    config.notices.push_back(concat(" > padded vocab (size: ", vocab_size, ") with ", m.padded_vocab_size - vocab_size,
                                    " dummy tokens (new size: ", m.padded_vocab_size, ")"));
  } else {
    m.padded_vocab_size = vocab_size;
  }
  PGPT_CHECK(ConfigError, m.padded_vocab_size % tensor == 0, "the padded vocabulary of ", m.padded_vocab_size,
             " entries is not divisible by --tensor-model-parallel-size ", tensor,
             "; change --padded-vocab-size or remove --no-pad-vocab-size");
  config.data.eod_id = eod_id;
  config.data.pad_id = pad_id;
}

void derive_tokenizer(Derivation& d) {
  ModelConfig& m = d.config.model;
  DataConfig& data = d.config.data;
  const Values& v = d.values;
  data.tokenizer_type = v.text("tokenizer_type");
  data.tokenizer_model = v.text("tokenizer_model");
  data.vocab_file = v.text("vocab_file");
  data.merge_file = v.text("merge_file");
  data.vocab_extra_ids = v.integer("vocab_extra_ids");
  PGPT_CHECK(ConfigError, data.vocab_extra_ids >= 0, "--vocab-extra-ids is ", data.vocab_extra_ids,
             "; it must not be negative");
  data.tiktoken_num_special_tokens = v.integer("tiktoken_num_special_tokens");
  m.make_vocab_size_divisible_by = d.positive("make_vocab_size_divisible_by");
  m.pad_vocab_size = v.flag("pad_vocab_size");
  m.padded_vocab_size = d.maybe_positive("padded_vocab_size").value_or(0);
  const std::optional<std::int64_t> vocab = d.maybe_positive("vocab_size");
  const std::optional<std::int64_t> eod = v.maybe_integer("null_tokenizer_eod_id");
  PGPT_CHECK(ConfigError, !eod || *eod >= 0, "--null-tokenizer-eod-id is ", *eod, "; it must not be negative");
  const std::int64_t pad = v.integer("null_tokenizer_pad_id");
  PGPT_CHECK(ConfigError, pad >= -1, "--null-tokenizer-pad-id is ", pad, "; give -1 for none, or an id");
  if (data.tokenizer_type == "NullTokenizer") {
    PGPT_CHECK(ConfigError, vocab.has_value(),
               "--tokenizer-type NullTokenizer needs --vocab-size N, the number of token ids of the data");
    set_vocabulary(d.config, *vocab, eod.value_or(*vocab - 1), pad);
    return;
  }
  const bool files = !data.vocab_file.empty() || !data.tokenizer_model.empty();
  PGPT_CHECK(ConfigError, files || vocab || m.padded_vocab_size > 0,
             "the vocabulary size is not known: --tokenizer-type ", data.tokenizer_type, " needs ",
             data.tokenizer_type == "GPT2BPETokenizer" ? "--vocab-file" : "--tokenizer-model",
             " or --vocab-size with --null-tokenizer-eod-id",
             data.mock ? "; for --mock-data use --tokenizer-type NullTokenizer --vocab-size N" : "");
  data.eod_id = eod.value_or(-1);
  data.pad_id = pad;
  m.vocab_size = vocab.value_or(0);
  // With files, they decide or must agree; the data module reads them.
  if (vocab && !files) set_vocabulary(d.config, *vocab, data.eod_id, pad);
}

void derive_intervals(Derivation& d) {
  CheckpointConfig& c = d.config.checkpoint;
  const Values& v = d.values;
  c.save = v.text("save");
  c.save_interval = d.maybe_positive("save_interval").value_or(0);
  PGPT_CHECK(ConfigError, c.save.empty() || c.save_interval > 0, "--save needs --save-interval above 0");
  c.save_retain_interval = d.maybe_positive("save_retain_interval").value_or(0);
  PGPT_CHECK(ConfigError,
             c.save_retain_interval == 0 || (c.save_interval > 0 && c.save_retain_interval % c.save_interval == 0),
             "--save-retain-interval ", c.save_retain_interval, " is not a multiple of --save-interval ",
             c.save_interval);
  LoggingConfig& l = d.config.logging;
  l.log_interval = d.positive("log_interval");
  l.memory_interval = d.maybe_positive("log_memory_interval").value_or(0);
  PGPT_CHECK(ConfigError, l.memory_interval % l.log_interval == 0, "--log-memory-interval ", l.memory_interval,
             " is not a multiple of --log-interval ", l.log_interval);
}

void derive_checkpoint(Derivation& d) {
  CheckpointConfig& c = d.config.checkpoint;
  Values& v = d.values;
  c.load = v.text("load");
  c.load_hf = v.text("load_hf");
  c.pretrained = v.text("pretrained_checkpoint");
  if (c.load.empty()) {
    d.warn_unused({"ckpt_step", "override_ckpt_iteration"}, "--load");
    if (c.pretrained.empty())
      d.warn_unused({"exit_on_missing_checkpoint", "no_load_optim", "no_load_rng", "finetune"}, "--load");
  }
  if (c.save.empty()) {
    d.warn_unused("save_interval", "--save");
    if (!v.is_set("non_persistent_save_interval")) d.warn_unused({"no_save_optim", "no_save_rng"}, "--save");
  }
  PGPT_CHECK(ConfigError, c.load_hf.empty() || (c.load.empty() && c.pretrained.empty()),
             "--load-hf excludes --load and --pretrained-checkpoint; give one");
  c.step = d.maybe_positive("ckpt_step");
  c.save_optimizer = !v.flag("no_save_optim");
  c.save_rng = !v.flag("no_save_rng");
  c.load_optimizer = !v.flag("no_load_optim");
  c.load_rng = !v.flag("no_load_rng");
  c.finetune = v.flag("finetune");
  c.exit_on_missing = v.flag("exit_on_missing_checkpoint");
  c.use_checkpoint_args = v.flag("use_checkpoint_args");
  c.use_checkpoint_parallel_args = v.flag("use_mp_args_from_checkpoint_args");
  c.use_checkpoint_tokenizer = v.flag("use_tokenizer_model_from_checkpoint_args");
  c.override_iteration = v.maybe_integer("override_ckpt_iteration");
  PGPT_CHECK(ConfigError, !c.override_iteration || !c.finetune,
             "--override-ckpt-iteration cannot be combined with --finetune, which starts at iteration 0");
  PGPT_CHECK(ConfigError, !c.override_iteration || *c.override_iteration >= 0, "--override-ckpt-iteration is ",
             *c.override_iteration, "; it must not be negative");
  c.load_main_params = v.flag("load_main_params_from_ckpt");
  PGPT_CHECK(ConfigError, !c.load_main_params || !c.load_optimizer,
             "--load-main-params-from-ckpt needs --no-load-optim");
  c.async_save = v.flag("async_save");
  if (c.async_save && !v.flag("use_persistent_ckpt_worker")) {
    c.async_save = false;
    v.derive("async_save", false);
    d.notice("WARNING: --async-save is switched off because --use-persistent-ckpt-worker is missing");
  }
  c.format = v.text("ckpt_format");
  PGPT_CHECK(ConfigError, !c.async_save || c.format != "torch",
             "--async-save does not work with --ckpt-format torch; use torch_dist");
  c.auto_detect_format = v.flag("auto_detect_ckpt_format");
  c.strictness = v.text("dist_ckpt_strictness");
  c.optimizer_fully_reshardable = v.flag("dist_ckpt_optim_fully_reshardable");
  c.fully_parallel_save = v.flag("ckpt_fully_parallel_save");
  c.fully_parallel_load = v.flag("ckpt_fully_parallel_load");
  c.non_persistent = v.is_set("non_persistent_ckpt_type");
  c.non_persistent_interval = d.maybe_positive("non_persistent_save_interval").value_or(0);
  c.non_persistent_dir = v.text("non_persistent_global_ckpt_dir");
  PGPT_CHECK(ConfigError, c.non_persistent_interval == 0 || c.non_persistent,
             "--non-persistent-save-interval needs --non-persistent-ckpt-type global");
  PGPT_CHECK(ConfigError, c.non_persistent_interval == 0 || !c.save.empty() || !c.non_persistent_dir.empty(),
             "--non-persistent-save-interval needs --save or --non-persistent-global-ckpt-dir");
  if (!c.non_persistent) d.warn_unused("non_persistent_global_ckpt_dir", "--non-persistent-ckpt-type global");
  if (c.async_save && c.save.empty() && c.non_persistent_interval == 0) d.warn_unused("async_save", "--save");
  if (d.config.training.skip_train && c.load_optimizer) {
    c.load_optimizer = false;
    v.derive("no_load_optim", true);
  }
}

void derive_logging(Derivation& d) {
  LoggingConfig& l = d.config.logging;
  const Values& v = d.values;
  l.loss_window = v.text("loss_window") == "step" ? LossWindow::kStep : LossWindow::kMegatron;
  l.throughput = v.flag("log_throughput");
  l.params_norm = v.flag("log_params_norm");
  l.num_zeros_in_grad = v.flag("log_num_zeros_in_grad");
  l.progress = v.flag("log_progress");
  PGPT_CHECK(ConfigError, !l.progress || !d.config.checkpoint.save.empty(),
             "--log-progress writes progress.txt into the folder of checkpoints; give --save FOLDER");
  if (v.is_set("log_progress_line")) l.progress_line = v.flag("log_progress_line");
  l.timing_level = v.text("timing_log_level").front() - '0';
  l.timing_option = v.text("timing_log_option");
  l.metrics_file = v.text("metrics_file");
  l.tensorboard_dir = v.text("tensorboard_dir");
  l.tensorboard_interval = d.positive("tensorboard_log_interval");
  l.timers_to_tensorboard = v.flag("log_timers_to_tensorboard");
  l.validation_ppl_to_tensorboard = v.flag("log_validation_ppl_to_tensorboard");
  l.memory_to_tensorboard = v.flag("log_memory_to_tensorboard");
  l.world_size_to_tensorboard = v.flag("log_world_size_to_tensorboard");
  l.loss_scale_to_tensorboard = v.flag("log_loss_scale_to_tensorboard");
  l.evidence_dir = v.text("evidence_dir");
  l.evidence_iterations = v.integers("evidence_iterations");
  l.evidence_content = v.texts("evidence_content");
  PGPT_CHECK(ConfigError, !l.evidence_dir.empty() || (l.evidence_iterations.empty() && l.evidence_content.empty()),
             "--evidence-iterations and --evidence-content need --evidence-dir");
  l.level = v.maybe_integer("logging_level");
  if (!v.text("wandb_project").empty()) {
    PGPT_CHECK(ConfigError, !v.text("wandb_exp_name").empty(), "--wandb-project needs --wandb-exp-name");
    PGPT_CHECK(ConfigError, !v.text("wandb_save_dir").empty() || !d.config.checkpoint.save.empty(),
               "--wandb-project needs --wandb-save-dir or --save");
  }
}

}  // namespace pgpt::config

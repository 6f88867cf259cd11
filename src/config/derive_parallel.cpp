// Parallel sizes, pipeline stages, GTP rules.
#include <numeric>

#include "derive.h"
#include "pgpt/mesh/mesh.h"

namespace pgpt::config {

namespace {

/// Weight shards of one family (dense or expert) and the GTP degree that follows.
std::int64_t gtp_degree(Derivation& d, const char* destination, std::int64_t tensor, const char* tensor_option,
                        std::int64_t& shards) {
  shards = d.values.maybe_integer(destination).value_or(tensor);
  PGPT_CHECK(ConfigError, shards >= tensor, option_name(destination), " ", shards, " is below ", tensor_option, " ",
             tensor, "; it counts tensor parallel shards too, so give ", tensor, " x the wanted GTP degree");
  PGPT_CHECK(ConfigError, shards % tensor == 0, option_name(destination), " ", shards, " is not a multiple of ",
             tensor_option, " ", tensor, "; give ", tensor, " x the wanted GTP degree");
  d.values.derive(destination, shards);
  return shards / tensor;
}

void check_divides(std::int64_t world, std::int64_t product, const std::string& factors) {
  PGPT_CHECK(ConfigError, world % product == 0, "world size ", world, " is not divisible by ", factors, " = ", product,
             "; start a multiple of ", product, " ranks or change these options");
}

class LayoutParser {
 public:
  explicit LayoutParser(const std::string& text) : text_(text) {}

  std::string parse() {
    std::string result = sequence();
    if (position_ != text_.size()) fail("')' without '('");
    return result;
  }

 private:
  // Far above any real layout; keeps a mistyped repeat from filling memory.
  static constexpr std::size_t kMaxLetters = 100000;

  [[noreturn]] void fail(const std::string& what) const {
    throw ConfigError(concat("--pipeline-model-parallel-layout '", text_, "': ", what, " at position ", position_ + 1,
                             "; stages are letters E, t, m, L, ended by |, e.g. Et*3|(tt|)*2tL"));
  }
  std::string sequence() {
    std::string out;
    while (position_ < text_.size() && text_[position_] != ')') {
      const char c = text_[position_];
      if (c == ',' || c == ' ') {
        ++position_;
        continue;
      }
      std::string item;
      if (c == '(') {
        ++position_;
        if (++depth_ > 50) fail("brackets are nested too deeply");
        item = sequence();
        if (position_ == text_.size()) fail("')' is missing");
        --depth_;
      } else if (std::string("EtmL|").find(c) != std::string::npos) {
        item = c;
      } else {
        fail(concat("unexpected '", c, "'"));
      }
      ++position_;
      const std::size_t times = repeats();
      if (item.size() * times + out.size() > kMaxLetters) fail("the layout is too long");
      for (std::size_t i = 0; i < times; ++i) out += item;
    }
    return out;
  }
  std::size_t repeats() {
    if (position_ == text_.size() || text_[position_] != '*') return 1;
    ++position_;
    std::size_t times = 0;
    const std::size_t begin = position_;
    while (position_ < text_.size() && text_[position_] >= '0' && text_[position_] <= '9') {
      times = times * 10 + static_cast<std::size_t>(text_[position_++] - '0');
      if (times > kMaxLetters) fail("the repeat is too large");
    }
    if (begin == position_) fail("a number is missing after '*'");
    return times;
  }

  const std::string& text_;
  std::size_t position_ = 0;
  int depth_ = 0;
};

std::int64_t count(const std::string& stage, char letter) { return std::count(stage.begin(), stage.end(), letter); }

/// Layers of the virtual stages of a layout, whose letters must describe this model.
void use_layout(Derivation& d, std::int64_t layers, std::int64_t mtp_layers) {
  ParallelConfig& p = d.config.parallel;
  const std::vector<std::string> stages = expand_pipeline_layout(d.values.text("pipeline_model_parallel_layout"));
  const auto size = static_cast<std::int64_t>(stages.size());
  PGPT_CHECK(ConfigError, size % p.pipeline == 0, "--pipeline-model-parallel-layout has ", size,
             " stages, which is not a multiple of --pipeline-model-parallel-size ", p.pipeline);
  std::int64_t found_layers = 0, found_mtp = 0, embeddings = 0, losses = 0;
  for (const std::string& stage : stages) {
    p.stage_layers.push_back(count(stage, 't'));
    found_layers += count(stage, 't');
    found_mtp += count(stage, 'm');
    embeddings += count(stage, 'E');
    losses += count(stage, 'L');
  }
  PGPT_CHECK(ConfigError, embeddings == 1 && stages.front().starts_with('E'),
             "--pipeline-model-parallel-layout needs one E, first in the first stage; found ", embeddings);
  PGPT_CHECK(ConfigError, losses == 1 && stages.back().ends_with('L'),
             "--pipeline-model-parallel-layout needs one L, last in the last stage; found ", losses);
  PGPT_CHECK(ConfigError, found_layers == layers, "--pipeline-model-parallel-layout places ", found_layers,
             " layers (t), but --num-layers is ", layers);
  PGPT_CHECK(ConfigError, found_mtp == mtp_layers, "--pipeline-model-parallel-layout places ", found_mtp,
             " layers for multi-token prediction (m), but --mtp-num-layers is ", mtp_layers);
  p.virtual_pipeline = size / p.pipeline;
}

}  // namespace

std::vector<std::string> expand_pipeline_layout(const std::string& layout) {
  std::vector<std::string> stages(1);
  for (const char c : LayoutParser(layout).parse()) {
    if (c == '|') {
      stages.emplace_back();
    } else {
      stages.back() += c;
    }
  }
  return stages;
}

void derive_world(Derivation& d) {
  ParallelConfig& p = d.config.parallel;
  p.world_size = d.world_size;
  p.tensor = d.positive("tensor_model_parallel_size");
  p.pipeline = d.positive("pipeline_model_parallel_size");
  p.context = d.positive("context_parallel_size");
  p.expert = d.positive("expert_model_parallel_size");
  p.expert_tensor = d.maybe_positive("expert_tensor_parallel_size").value_or(p.tensor);
  p.pipeline_before_data = d.values.flag("use_tp_pp_dp_mapping");
  p.gtp = gtp_degree(d, "tensor_parallel_num_weight_shards", p.tensor, "--tensor-model-parallel-size", p.weight_shards);
  p.expert_gtp = gtp_degree(
      d, "expert_tensor_parallel_num_weight_shards", p.expert_tensor,
      d.values.given("expert_tensor_parallel_size") ? "--expert-tensor-parallel-size" : "--tensor-model-parallel-size",
      p.expert_weight_shards);
  check_divides(p.world_size, p.tensor * p.pipeline * p.context * p.gtp,
                concat("tensor ", p.tensor, " x pipeline ", p.pipeline, " x context ", p.context, " x GTP ", p.gtp,
                       " (--tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size, "
                       "--tensor-parallel-num-weight-shards)"));
  check_divides(p.world_size, p.expert_tensor * p.expert * p.pipeline * p.expert_gtp,
                concat("expert tensor ", p.expert_tensor, " x expert ", p.expert, " x pipeline ", p.pipeline,
                       " x expert GTP ", p.expert_gtp,
                       " (--expert-tensor-parallel-size, --expert-model-parallel-size, --pipeline-model-parallel-size, "
                       "--expert-tensor-parallel-num-weight-shards)"));
  p.replicate_data = p.world_size / (p.tensor * p.pipeline * p.context * p.gtp);
  // The mesh checks what is left: equal pipeline groups of the dense and the expert grid.
  const mesh::Mesh mesh({p.world_size, p.tensor, p.pipeline, p.context, p.gtp, p.expert, p.expert_tensor, p.expert_gtp,
                         p.pipeline_before_data});

  const std::vector<std::int64_t> levels = d.values.integers("hierarchical_context_parallel_sizes");
  const std::int64_t product = std::accumulate(levels.begin(), levels.end(), std::int64_t{1}, std::multiplies<>());
  PGPT_CHECK(ConfigError, levels.empty() || product == p.context, "--hierarchical-context-parallel-sizes multiply to ",
             product, ", but --context-parallel-size is ", p.context);
  d.notice(concat("using world size: ", p.world_size, ", data-parallel size: ", p.replicate_data,
                  ", context-parallel size: ", p.context, ", hierarchical context-parallel sizes: ",
                  print_value(d.values.at("hierarchical_context_parallel_sizes")),
                  ", tensor-model-parallel size: ", p.tensor, ", pipeline-model-parallel size: ", p.pipeline));
  p.context_comm = d.values.texts("cp_comm_type");
  if (p.context_comm.size() == 1) d.values.derive("cp_comm_type", p.context_comm.front());
  for (const std::string& kind : p.context_comm) {
    PGPT_CHECK(ConfigError, kind != "a2a+p2p" || !levels.empty(),
               "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes");
  }
  d.values.derive("world_size", p.world_size);
  d.values.derive("data_parallel_size", p.replicate_data);
  d.values.derive("expert_tensor_parallel_size", p.expert_tensor);
  p.average_in_collective = d.values.flag("ddp_average_in_collective");
  p.gtp_prefetch = d.values.flag("gtp_prefetch");
  const std::string transport = d.values.text("gtp_transport");
  if (p.gtp == 1 && transport == "copy-engine")
    d.notice("WARNING: --gtp-transport copy-engine has no effect without --tensor-parallel-num-weight-shards above 1");
  p.gtp_transport = transport == "auto"   ? GtpTransport::kAutomatic
                    : transport == "nccl" ? GtpTransport::kNccl
                                          : GtpTransport::kCopyEngine;
  p.gtp_keep_gathered_layers = d.values.integer("gtp_keep_gathered_layers");
  p.gtp_split_products = d.values.text("gtp_weight_gradients") == "split";
  p.gtp_communicators = d.values.text("gtp_communicators") == "1" ? 1 : 2;
  if (p.gtp == 1) {
    d.warn_unused({"gtp_keep_gathered_layers", "gtp_weight_gradients", "gtp_communicators"},
                  "--tensor-parallel-num-weight-shards above 1");
  }
  p.gtp_async_reduce_scatter = d.values.flag("gtp_async_reduce_scatter");
  p.gtp_fp32_accumulation = d.values.flag("gtp_remat_reduce_scatter_with_fp32_accumulation");
  p.ddp_bucket_size = d.maybe_positive("ddp_bucket_size").value_or(0);
  p.ddp_num_buckets = d.maybe_positive("ddp_num_buckets").value_or(0);
  PGPT_CHECK(ConfigError, p.ddp_bucket_size == 0 || p.ddp_num_buckets == 0,
             "--ddp-bucket-size and --ddp-num-buckets exclude each other; give one");
  p.timeout_minutes = static_cast<double>(d.positive("distributed_timeout_minutes"));
  p.timeout_seconds_after_init = d.maybe_positive("distributed_timeout_seconds_after_init");
  p.backend_given = d.values.is_set("distributed_backend");
  p.backend = d.values.text("distributed_backend") == "nccl" ? Backend::kNccl : Backend::kGloo;
}

void derive_pipeline(Derivation& d) {
  ParallelConfig& p = d.config.parallel;
  const Values& v = d.values;
  const std::optional<std::int64_t> per_stage = d.maybe_positive("num_layers_per_virtual_pipeline_stage");
  const std::optional<std::int64_t> per_rank = d.maybe_positive("num_virtual_stages_per_pipeline_rank");
  const bool layout = v.is_set("pipeline_model_parallel_layout");
  PGPT_CHECK(ConfigError, int{per_stage.has_value()} + int{per_rank.has_value()} + int{layout} <= 1,
             "--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank and "
             "--pipeline-model-parallel-layout exclude each other; give one");
  const std::int64_t layers =
      d.maybe_positive("num_layers").value_or(d.maybe_positive("encoder_num_layers").value_or(0));
  const std::int64_t mtp_layers = v.maybe_integer("mtp_num_layers").value_or(0);
  const std::optional<std::int64_t> first = d.maybe_positive("decoder_first_pipeline_num_layers");
  const std::optional<std::int64_t> last = d.maybe_positive("decoder_last_pipeline_num_layers");
  const bool embedding = v.flag("account_for_embedding_in_pipeline_split");
  const bool loss = v.flag("account_for_loss_in_pipeline_split");
  const bool uneven = first || last;
  PGPT_CHECK(ConfigError, !uneven || (!embedding && !loss && !layout),
             "--decoder-first/last-pipeline-num-layers cannot be combined with --account-for-... options or a layout");
  PGPT_CHECK(ConfigError, layers > 0, "--num-layers is required; give the number of transformer layers");
  PGPT_CHECK(ConfigError, p.gtp_keep_gathered_layers >= 0 && p.gtp_keep_gathered_layers <= layers,
             "--gtp-keep-gathered-layers ", p.gtp_keep_gathered_layers, ": give 0 to ", layers, " (--num-layers)");
  const std::int64_t counted = layers + int{embedding} + int{loss};
  p.virtual_pipeline = 0;
  if (layout) {
    PGPT_CHECK(ConfigError, !embedding && !loss, "--account-for-... options cannot be combined with a layout");
    use_layout(d, layers, mtp_layers);
  } else {
    // Layers of each pipeline rank, counting embedding and loss where asked.
    std::vector<std::int64_t> rank_layers(static_cast<std::size_t>(p.pipeline), 0);
    if (uneven) {
      const std::int64_t rest_ranks = p.pipeline - int{first.has_value()} - int{last.has_value()};
      const std::int64_t rest = layers - first.value_or(0) - last.value_or(0);
      PGPT_CHECK(ConfigError, p.pipeline > 1,
                 "--decoder-first/last-pipeline-num-layers need --pipeline-model-parallel-size "
                 "above 1, found ",
                 p.pipeline);
      PGPT_CHECK(ConfigError, rest_ranks == 0 ? rest == 0 : rest >= 0 && rest % rest_ranks == 0, "--num-layers ",
                 layers, " minus the layers of the first and last stage leaves ", rest, " for ", rest_ranks,
                 " other pipeline stages; it must divide");
      std::fill(rank_layers.begin(), rank_layers.end(), rest_ranks == 0 ? 0 : rest / rest_ranks);
      if (first) rank_layers.front() = *first;
      if (last) rank_layers.back() = *last;
    } else {
      PGPT_CHECK(
          ConfigError, counted % p.pipeline == 0, "--num-layers ", layers,
          counted == layers ? "" : concat(" (", counted, " with embedding and loss counted)"),
          " is not divisible by --pipeline-model-parallel-size ", p.pipeline,
          "; change one of them, or use --decoder-first-pipeline-num-layers or --pipeline-model-parallel-layout");
      std::fill(rank_layers.begin(), rank_layers.end(), counted / p.pipeline);
    }
    if (per_stage) {
      PGPT_CHECK(ConfigError, !uneven && counted / p.pipeline % *per_stage == 0, "a pipeline stage has ",
                 counted / p.pipeline, " layers, which --num-layers-per-virtual-pipeline-stage ", *per_stage,
                 " does not divide", uneven ? " (uneven splits need --num-virtual-stages-per-pipeline-rank)" : "");
      p.virtual_pipeline = counted / p.pipeline / *per_stage;
    } else if (per_rank) {
      p.virtual_pipeline = *per_rank;
    }
    const std::int64_t chunks = std::max<std::int64_t>(1, p.virtual_pipeline);
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (const std::int64_t n : rank_layers) {
        PGPT_CHECK(ConfigError, n % chunks == 0, "a pipeline stage has ", n, " layers, which ", chunks,
                   " virtual stages (--num-virtual-stages-per-pipeline-rank) do not divide");
        p.stage_layers.push_back(n / chunks);
      }
    }
    if (embedding) --p.stage_layers.front();
    if (loss) --p.stage_layers.back();
  }
  if (p.virtual_pipeline == 1) p.virtual_pipeline = 0;

  p.overlap_p2p = v.flag("overlap_p2p_comm");
  if (p.virtual_pipeline > 0) {
    const std::int64_t needed = p.overlap_p2p ? 2 : 3;
    PGPT_CHECK(ConfigError, p.pipeline >= needed,
               "virtual pipeline stages need --pipeline-model-parallel-size of at least ", needed,
               p.overlap_p2p ? "" : " with --no-overlap-p2p-communication", ", found ", p.pipeline);
  } else {
    p.overlap_p2p = false;
  }
  p.microbatch_group_size = d.maybe_positive("microbatch_group_size_per_virtual_pipeline_stage").value_or(p.pipeline);
  PGPT_CHECK(ConfigError, p.virtual_pipeline == 0 || p.microbatch_group_size >= p.pipeline,
             "--microbatch-group-size-per-virtual-pipeline-stage ", p.microbatch_group_size,
             " is below --pipeline-model-parallel-size ", p.pipeline);
  d.values.derive("overlap_p2p_comm", p.overlap_p2p);
  d.values.derive("microbatch_group_size_per_virtual_pipeline_stage", p.microbatch_group_size);
  Value printed = std::monostate{};
  if (p.virtual_pipeline > 0) printed = p.virtual_pipeline;
  d.values.derive("virtual_pipeline_model_parallel_size", printed);
  d.notice("Number of virtual stages per pipeline stage: " + print_value(printed));
}

void derive_overlap(Derivation& d) {
  ParallelConfig& p = d.config.parallel;
  p.use_distributed_optimizer = d.values.flag("use_distributed_optimizer");
  p.overlap_grad_reduce = d.values.flag("overlap_grad_reduce");
  p.overlap_param_gather = d.values.flag("overlap_param_gather");
  PGPT_CHECK(ConfigError, !p.overlap_param_gather || p.use_distributed_optimizer,
             "--overlap-param-gather needs --use-distributed-optimizer");
  PGPT_CHECK(ConfigError, !p.overlap_param_gather || p.overlap_grad_reduce,
             "--overlap-param-gather needs --overlap-grad-reduce");
  if (d.values.flag("overlap_param_gather_with_optimizer_step")) {
    PGPT_CHECK(ConfigError, p.overlap_param_gather && p.virtual_pipeline > 0,
               "--overlap-param-gather-with-optimizer-step needs --overlap-param-gather and virtual pipeline stages");
  }
  PGPT_CHECK(
      ConfigError, !p.average_in_collective || !d.values.flag("calculate_per_token_loss"),
      "--ddp-average-in-collective cannot be combined with --calculate-per-token-loss: gradients are summed there");
}

void derive_tensor_parallel(Derivation& d) {
  ParallelConfig& p = d.config.parallel;
  p.sequence_parallel = d.values.flag("sequence_parallel");
  PGPT_CHECK(ConfigError, !d.values.flag("tp_comm_overlap") || p.sequence_parallel,
             "--tp-comm-overlap needs --sequence-parallel");
  if (p.sequence_parallel && p.tensor == 1) {
    p.sequence_parallel = false;
    d.notice("WARNING: --sequence-parallel is switched off because --tensor-model-parallel-size is 1");
  }
  PGPT_CHECK(ConfigError, !p.sequence_parallel || d.config.model.seq_length % p.tensor == 0, "--seq-length ",
             d.config.model.seq_length, " is not divisible by --tensor-model-parallel-size ", p.tensor,
             ", which --sequence-parallel needs");
  d.values.derive("sequence_parallel", p.sequence_parallel);
}

void check_gtp(Derivation& d) {
  const ParallelConfig& p = d.config.parallel;
  const Values& v = d.values;
  if (p.gtp == 1 && p.expert_gtp == 1) return;
  const std::string gtp =
      p.gtp > 1 ? concat("GTP (--tensor-parallel-num-weight-shards ", p.weight_shards, ")")
                : concat("expert GTP (--expert-tensor-parallel-num-weight-shards ", p.expert_weight_shards, ")");
  PGPT_CHECK(ConfigError, !p.average_in_collective, "--ddp-average-in-collective cannot be combined with ", gtp,
             ": averaging over the ranks without GTP misses the factor 1/GTP; remove it");
  PGPT_CHECK(ConfigError, !v.flag("use_decentralized_pg"), "--use-decentralized-pg cannot be combined with ", gtp,
             "; remove it");
  PGPT_CHECK(ConfigError,
             !v.flag("dist_ckpt_optim_fully_reshardable") || !v.flag("distrib_optim_fully_reshardable_mem_efficient"),
             "--dist-ckpt-optim-fully-reshardable with --distrib-optim-fully-reshardable-mem-efficient cannot be "
             "combined with ",
             gtp, "; remove the latter");
  PGPT_CHECK(ConfigError, !v.flag("data_parallel_random_init"), "--data-parallel-random-init cannot be combined with ",
             gtp, ": its broadcast would overwrite shards; remove it");
}

}  // namespace pgpt::config

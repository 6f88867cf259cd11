#include "pgpt/data/datasets.h"

#include <algorithm>
#include <array>
#include <limits>

#include "pgpt/base/error.h"
#include "pgpt/config/batch_calculator.h"
#include "pgpt/data/blend.h"
#include "pgpt/data/description.h"
#include "pgpt/data/indexed_dataset.h"

namespace pgpt::data {
namespace {

constexpr const char* kMockSplit = "1,1,1";
constexpr const char* kDefaultSplit = "969, 30, 1";
constexpr std::size_t kMostReadAhead = 16;

using Source = std::shared_ptr<const DocumentSource>;

const char* label(Split split) {
  switch (split) {
    case Split::kTrain:
      return "train:      ";
    case Split::kValid:
      return "validation: ";
    default:
      return "test:       ";
  }
}

std::int64_t or_default(std::int64_t value, std::int64_t fallback) { return value > 0 ? value : fallback; }

/// Where the documents of one split come from.
struct Origin {
  std::vector<std::string> prefixes;  ///< empty = mock data
  std::optional<std::vector<double>> weights;
  std::optional<std::string> split_string;  ///< absent with per-split paths
  std::optional<SplitMatrix> matrix;
};

/// One data set of a blend and how its cache files are called.
struct Part {
  std::shared_ptr<const GptDataset> dataset;
  std::string name, description, stamp;
};

class Builder {
 public:
  Builder(const config::Config& config, const TokenizerFacts& tokenizer, const LineSink& print)
      : config_(config), tokenizer_(tokenizer), print_(print) {}

  std::shared_ptr<const Dataset> build(const Origin& origin, Split split, std::optional<std::int64_t> samples,
                                       bool needed) {
    if (origin.matrix && !(*origin.matrix)[static_cast<std::size_t>(split)]) {
      PGPT_CHECK(ConfigError, split != Split::kTrain || !needed, "--split '", *origin.split_string,
                 "' gives no documents to training");
      if (needed)
        line(concat("WARNING: --split '", *origin.split_string, "' gives no documents to the ", name_of(split),
                    " split; there is no evaluation on it"));
      return nullptr;
    }
    std::vector<Source> sources;
    std::vector<DocumentRange> ranges;
    for (std::size_t i = 0; i < std::max<std::size_t>(origin.prefixes.size(), 1); ++i) {
      sources.push_back(origin.prefixes.empty() ? mock() : open(origin.prefixes[i]));
      const DocumentRange all{0, sources.back()->size()};
      ranges.push_back(origin.matrix ? *split_range(*origin.matrix, split, all.end) : all);
      announce(split, *sources.back(), ranges.back(), origin, needed);
    }
    if (!needed) return nullptr;
    if (origin.prefixes.size() <= 1 && !(origin.weights && origin.matrix)) {
      // Per-split lists ignore the weight of a single prefix, as the reference does.
      const Part part = build_part(origin, 0, sources[0], ranges[0], split, samples);
      check_not_empty(part);
      return part.dataset;
    }
    return build_blend(origin, sources, ranges, split, samples);
  }

 private:
  void line(const std::string& text) const {
    if (print_) print_(text);
  }

  Source mock() {
    if (!mock_) mock_ = std::make_shared<MockDocuments>(tokenizer_.vocab_size, tokenizer_.eod);
    return mock_;
  }

  Source open(const std::string& prefix) {
    for (const auto& source : opened_) {
      if (source->name() == prefix) return source;
    }
    const auto source = std::make_shared<IndexedDataset>(prefix, config_.data.mmap);
    if (source->unused_bytes() > 0) {
      line(concat("WARNING: ", prefix, ".bin has ", source->unused_bytes(), " bytes more than ", prefix,
                  ".idx tells of; check that the two belong together"));
    }
    opened_.push_back(source);
    return source;
  }

  void announce(Split split, const DocumentSource& source, const DocumentRange& range, const Origin& origin,
                bool needed) const {
    const std::string text = concat("    ", label(split), "documents [", range.begin, ", ", range.end, ") of ",
                                    source.size(), " in ", source.name());
    if (range.size() > 0 || !needed) {
      line(text + (needed ? "" : ", not used"));
      return;
    }
    throw DataError(concat(
        "the ", name_of(split), " split needs documents, but ",
        origin.split_string ? concat("--split '", *origin.split_string, "'") : std::string("the file"),
        " leaves it none: [", range.begin, ", ", range.end, ") of ", source.size(), " documents in ", source.name(),
        "; change --split, give more documents", split == Split::kTrain ? "" : ", or set --eval-iters 0"));
  }

  void check_not_empty(const Part& part) const {
    PGPT_CHECK(DataError, part.dataset->size() > 0, part.name, ": no full sample fits, one epoch has ",
               part.dataset->order().plan.tokens_per_epoch, " tokens and a sample needs ", config_.model.seq_length + 1,
               " (--seq-length ", config_.model.seq_length, " and the following token)");
  }

  SampleOptions sample_options() const {
    const auto& data = config_.data;
    SampleOptions options;
    options.eod = tokenizer_.eod;
    options.pad = tokenizer_.effective_pad(data.allow_ambiguous_pad_tokens);
    options.eod_mask_loss = data.eod_mask_loss;
    options.reset_position_ids = data.reset_position_ids;
    options.reset_attention_mask = data.reset_attention_mask && data.create_attention_mask;
    options.inter_document_masking = data.inter_document_masking;
    options.vocab_limit = or_default(config_.model.padded_vocab_size, tokenizer_.vocab_size);
    return options;
  }

  Part build_part(const Origin& origin, std::size_t i, const Source& source, const DocumentRange& range, Split split,
                  std::optional<std::int64_t> samples) const {
    const bool is_mock = origin.prefixes.empty();
    PGPT_CHECK(ConfigError,
               config_.training.seed >= 0 && config_.training.seed <= std::numeric_limits<std::uint32_t>::max(),
               "--seed ", config_.training.seed, " must lie in [0, 4294967295]");
    OrderRequest request;
    request.documents = range;
    request.num_samples = samples;
    request.seq_length = config_.model.seq_length;
    request.seed = static_cast<std::uint32_t>(config_.training.seed);

    DatasetDescription description;
    description.class_name = is_mock ? "MockGPTDataset" : "GPTDataset";
    if (!is_mock) description.path = origin.prefixes[i];
    description.num_samples = samples;
    description.split = split;
    description.seed = request.seed;
    description.seq_length = request.seq_length;
    description.split_string = origin.split_string;
    description.matrix = origin.matrix;
    description.tokenizer = tokenizer_.description;

    std::optional<IndexCache> cache;
    if (!config_.data.cache_path.empty()) {
      cache.emplace(config_.data.cache_path, print_);
    } else if (!is_mock) {
      cache.emplace(origin.prefixes[i] + "/cache/GPTDataset_indices", print_);
    }
    Part part;
    part.name = source->name();
    part.description = description.text();
    part.stamp = source->stamp();
    auto order = load_or_build_order(*source, request, cache ? &*cache : nullptr,
                                     {description.class_name, name_of(split), part.description, ""});
    const OrderPlan plan = order.plan;
    part.dataset = std::make_shared<GptDataset>(source, request, sample_options(), std::move(order));
    line(concat("    ", label(split), plan.samples, " samples from ", plan.epochs,
                plan.epochs == 1 ? " epoch" : " epochs", " of ", plan.tokens_per_epoch, " tokens",
                plan.separate_last_epoch ? ", the last shuffled apart" : ""));
    return part;
  }

  std::shared_ptr<const Dataset> build_blend(const Origin& origin, const std::vector<Source>& sources,
                                             const std::vector<DocumentRange>& ranges, Split split,
                                             std::optional<std::int64_t> samples) const {
    PGPT_CHECK(
        ConfigError, !origin.weights || samples,
        "--full-validation uses every sample once, which contradicts weights in the data path; leave the weights out");
    std::vector<Part> parts;
    std::vector<double> weights;
    std::optional<std::int64_t> size;
    if (origin.weights) {
      const BlendSizes sizes = blend_sizes(*origin.weights, *samples, config_.data.mid_level_surplus);
      size = 0;
      for (const std::int64_t target : sizes.target) *size += target;
      for (std::size_t i = 0; i < sources.size(); ++i) {
        parts.push_back(build_part(origin, i, sources[i], ranges[i], split, sizes.built[i]));
        check_not_empty(parts.back());
      }
      weights = normalize(normalize(*origin.weights));
    } else {
      std::int64_t total = 0;
      for (std::size_t i = 0; i < sources.size(); ++i) {
        parts.push_back(build_part(origin, i, sources[i], ranges[i], split, std::nullopt));
        check_not_empty(parts.back());
        weights.push_back(static_cast<double>(parts.back().dataset->size()));
        total += parts.back().dataset->size();
      }
      if (samples) {
        size = std::min(*samples, total);
        PGPT_CHECK(DataError, *size == *samples || config_.data.dataloader == config::DataloaderType::kCyclic, "the ",
                   name_of(split), " data sets without weights give ", total, " samples (one epoch of each), but ",
                   *samples, " are asked for; give weights, shorten the run, or use --dataloader-type cyclic");
        weights = normalize(weights);
      }
    }
    std::vector<std::shared_ptr<const Dataset>> datasets;
    std::vector<std::string> names;
    std::vector<std::string> descriptions;
    std::string stamp;
    for (const Part& part : parts) {
      datasets.push_back(part.dataset);
      names.push_back(part.name);
      descriptions.push_back(part.description);
      stamp += part.stamp + "; ";
    }
    const CacheKey key{"BlendedDataset", name_of(split), blend_description(descriptions, split, weights, !size, size),
                       stamp};
    return std::make_shared<BlendedDataset>(std::move(datasets), names, blend_index(key, parts, origin, size));
  }

  BlendIndex blend_index(const CacheKey& key, const std::vector<Part>& parts, const Origin& origin,
                         std::optional<std::int64_t> size) const {
    constexpr const char* kNames[] = {"dataset_index", "dataset_sample_index"};
    std::vector<std::int64_t> sizes;
    std::int64_t total = 0;
    for (const Part& part : parts) {
      sizes.push_back(part.dataset->size());
      total += part.dataset->size();
    }
    std::optional<IndexCache> cache;
    if (!config_.data.cache_path.empty()) cache.emplace(config_.data.cache_path, print_);
    if (cache) {
      if (auto arrays = cache->load(key, kNames);
          arrays && (*arrays)[0].rows() == size.value_or(total) && (*arrays)[1].rows() == size.value_or(total)) {
        return {(*arrays)[0], (*arrays)[1]};
      }
    }
    // blend_by_weight normalises once more, as the reference does with weights that are normalised already.
    const BlendIndex index = !size            ? blend_all(sizes)
                             : origin.weights ? blend_by_weight(normalize(*origin.weights), *size)
                                              : blend_by_weight(std::vector<double>(sizes.begin(), sizes.end()), *size);
    if (cache) {
      const IntArray arrays[] = {index.dataset, index.dataset_sample};
      cache->store(key, kNames, arrays);
    }
    return index;
  }

  const config::Config& config_;
  const TokenizerFacts& tokenizer_;
  const LineSink& print_;
  Source mock_;
  std::vector<Source> opened_;
};

/// Sources of the three splits; a split without one is empty.
std::array<std::optional<Origin>, 3> origins(const config::Config& config) {
  const auto& data = config.data;
  std::array<std::optional<Origin>, 3> result;
  const std::array<const std::vector<std::string>*, 3> lists = {&data.train_data_path, &data.valid_data_path,
                                                                &data.test_data_path};
  const bool per_split = std::any_of(lists.begin(), lists.end(), [](const auto* list) { return !list->empty(); });
  const int given = (data.mock ? 1 : 0) + (data.data_path.empty() ? 0 : 1) + (per_split ? 1 : 0);
  PGPT_CHECK(ConfigError, given == 1, given == 0 ? "no data is given" : "several data sources are given",
             "; use exactly one of --mock-data, --data-path, and --train-data-path with --valid-data-path and "
             "--test-data-path");
  if (per_split) {
    constexpr std::array<const char*, 3> kOptions = {"--train-data-path", "--valid-data-path", "--test-data-path"};
    for (std::size_t i = 0; i < 3; ++i) {
      if (lists[i]->empty()) continue;
      BlendList list = parse_blend_list(*lists[i], kOptions[i]);
      result[i] = Origin{std::move(list.prefixes), std::move(list.weights), std::nullopt, std::nullopt};
    }
    return result;
  }
  const std::string split = data.mock ? kMockSplit : data.split.empty() ? kDefaultSplit : data.split;
  Origin origin;
  origin.split_string = split;
  origin.matrix = split_matrix(parse_split(split));
  if (!data.mock) {
    BlendList list = parse_blend_list(data.data_path, "--data-path");
    origin.prefixes = std::move(list.prefixes);
    origin.weights = std::move(list.weights);
  }
  result.fill(origin);
  return result;
}

}  // namespace

SampleCounts requested_samples(const config::Config& config) {
  const config::RequestedSamples requested = config::requested_samples(config.training);
  return {requested.train, requested.validation, requested.test};
}

Datasets build_datasets(const config::Config& config, const TokenizerFacts& tokenizer, const SampleCounts& counts,
                        const LineSink& print) {
  const auto line = [&print](const std::string& text) {
    if (print) print(text);
  };
  line("> building train, validation, and test datasets ...");
  line(" > datasets target sizes (minimum size):");
  line(concat("    ", label(Split::kTrain), counts.train));
  line(concat("    ", label(Split::kValid), counts.valid ? std::to_string(*counts.valid) : "None"));
  line(concat("    ", label(Split::kTest), counts.test));
  line("> building train, validation, and test datasets for GPT ...");
  if (config.data.reset_attention_mask && !config.data.create_attention_mask) {
    line(concat("WARNING: --reset-attention-mask has no effect together with ",
                config.data.inter_document_masking ? "--dataloader-inter-document-masking"
                                                   : "--no-create-attention-mask-in-dataloader"));
  }
  const auto sources = origins(config);
  const bool evaluates = config.training.full_validation || config.training.eval_iters > 0;
  const bool trains = !config.training.skip_train && counts.train > 0;
  PGPT_CHECK(ConfigError, sources[0] || !trains, "training needs data; add --train-data-path");
  Builder builder(config, tokenizer, print);
  Datasets sets;
  if (sources[0]) sets.train = builder.build(*sources[0], Split::kTrain, counts.train, trains);
  if (sources[1]) sets.valid = builder.build(*sources[1], Split::kValid, counts.valid, evaluates);
  if (sources[2]) sets.test = builder.build(*sources[2], Split::kTest, counts.test, evaluates);
  line("> finished creating GPT datasets ...");
  return sets;
}

std::unique_ptr<DataLoader> make_loader(const config::Config& config, std::shared_ptr<const Dataset> dataset,
                                        Split split, std::int64_t data_rank, std::int64_t data_size,
                                        std::int64_t consumed) {
  if (!dataset) return nullptr;
  const bool full = split == Split::kValid && config.training.full_validation;
  SamplerRequest request;
  request.name = name_of(split);
  request.total = dataset->size();
  request.consumed = split == Split::kTest || full ? 0 : consumed;
  request.micro_batch = split == Split::kTrain
                            ? config.training.micro_batch_size
                            : or_default(config.training.eval_micro_batch_size, config.training.micro_batch_size);
  if (full) request.micro_batch = 1;
  request.rank = data_rank;
  request.size = data_size;

  std::unique_ptr<Sampler> sampler;
  if (full) {
    sampler = std::make_unique<FullValidationSampler>(request);
  } else if (config.data.dataloader == config::DataloaderType::kCyclic) {
    sampler = std::make_unique<CyclicSampler>(request, config.data.data_sharding);
  } else {
    sampler = std::make_unique<SingleSampler>(request);
  }
  LoaderOptions options;
  options.background = config.data.num_workers > 0;
  options.depth =
      std::min(kMostReadAhead, 2 * static_cast<std::size_t>(std::max<std::int64_t>(config.data.num_workers, 1)));
  options.restart_positions = config.data.inter_document_masking;
  return std::make_unique<DataLoader>(std::move(dataset), std::move(sampler), options);
}

}  // namespace pgpt::data

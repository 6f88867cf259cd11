#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "pgpt/config/config.h"
#include "pgpt/data/gpt_dataset.h"
#include "pgpt/data/index_cache.h"
#include "pgpt/data/loader.h"
#include "pgpt/data/tokenizer.h"

namespace pgpt::data {

/// Samples that a run asks for.
struct SampleCounts {
  std::int64_t train = 0;
  std::optional<std::int64_t> valid = 0;  ///< empty = the whole set once (--full-validation)
  std::int64_t test = 0;
};
[[nodiscard]] SampleCounts requested_samples(const config::Config& config);

/// The data sets of a run; null where the run needs none (no share in --split, or evaluation off).
struct Datasets {
  std::shared_ptr<const Dataset> train, valid, test;
};

/// Builds what the run needs and prints the reference's lines, the documents of each split, and warnings through
/// `print`. Throws DataError or ConfigError when a needed set cannot give its samples.
[[nodiscard]] Datasets build_datasets(const config::Config& config, const TokenizerFacts& tokenizer,
                                      const SampleCounts& counts, const LineSink& print);

/// Loader of one data rank (GTP included) that continues after `consumed` samples of all ranks together; null for a
/// null set. Test sets and full validation ignore `consumed` and start at 0.
[[nodiscard]] std::unique_ptr<DataLoader> make_loader(const config::Config& config,
                                                      std::shared_ptr<const Dataset> dataset, Split split,
                                                      std::int64_t data_rank, std::int64_t data_size,
                                                      std::int64_t consumed);

}  // namespace pgpt::data

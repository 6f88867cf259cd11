#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "pgpt/data/gpt_dataset.h"
#include "pgpt/data/sampler.h"

namespace pgpt::data {

/// Counts of one micro-batch that the FLOP count and the metrics sum over ranks and micro-batches.
struct PackedStatistics {
  std::int64_t tokens = 0;                    ///< mbs * S
  std::int64_t valid_tokens = 0;              ///< positions with loss
  std::int64_t documents = 0;                 ///< document pieces joined into the samples
  std::int64_t squared_document_lengths = 0;  ///< sum over those pieces
  std::int64_t segments = 0;                  ///< attention segments: documents when they are masked, else one a sample
  std::int64_t squared_segment_lengths = 0;   ///< what attention costs; S * S a sample without masking

  PackedStatistics& operator+=(const PackedStatistics& other);
};

/// One micro-batch; arrays are [mbs, S] row-major.
struct MicroBatch {
  std::int64_t micro_batch = 0;
  std::int64_t seq_length = 0;
  std::vector<std::int64_t> tokens, labels, position_ids;
  std::vector<float> loss_mask;
  /// Ends of the attention segments in the micro-batch seen as one sequence of mbs * S tokens, after a 0; empty: causal
  /// over each sample.
  std::vector<std::int32_t> cu_seqlens;
  bool restart_positions = false;        ///< rotary positions count from the start of each segment
  std::vector<std::int64_t> sample_ids;  ///< indices into the data set
  PackedStatistics statistics;
};

/// How a loader works; none of it changes the order or the contents.
struct LoaderOptions {
  bool background = false;         ///< read ahead in one thread
  std::size_t depth = 2;           ///< micro-batches read ahead, at least 1
  bool restart_positions = false;  ///< handed on in MicroBatch
};

/// Hands out this rank's micro-batches in the sampler's order. Not thread-safe for several consumers.
class DataLoader {
 public:
  DataLoader(std::shared_ptr<const Dataset> dataset, std::unique_ptr<Sampler> sampler, const LoaderOptions& options);
  /// Stops and joins the thread.
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  /// Next micro-batch; blocks while it is being read. Throws DataError when the data is exhausted, and whatever reading
  /// threw (after all micro-batches read before it), again at every further call.
  [[nodiscard]] MicroBatch next();

 private:
  [[nodiscard]] MicroBatch make();
  void run();

  std::shared_ptr<const Dataset> dataset_;
  std::unique_ptr<Sampler> sampler_;
  LoaderOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<MicroBatch> ready_;
  std::exception_ptr failure_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace pgpt::data

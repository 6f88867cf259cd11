#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace pgpt::data {

/// Which samples one data rank reads: `rank` of `size` data ranks (GTP included), `micro_batch` samples at a time.
struct SamplerRequest {
  std::string name = "train";  ///< data set's name in messages
  std::int64_t total = 0;      ///< samples in the data set
  std::int64_t consumed = 0;   ///< samples that all data ranks together have used before
  std::int64_t micro_batch = 1;
  std::int64_t rank = 0;
  std::int64_t size = 1;
};

/// A stream of micro-batches of sample indices.
class Sampler {
 public:
  virtual ~Sampler() = default;
  /// Next micro-batch of this rank, or nothing at the end of the data.
  [[nodiscard]] virtual std::optional<std::vector<std::int64_t>> next() = 0;
  /// One sentence for the user who asked for more than there is.
  [[nodiscard]] virtual std::string exhausted() const = 0;
};

/// Samples in order, once (--dataloader-type single). Throws DataError when nothing is left at construction.
class SingleSampler : public Sampler {
 public:
  /// `drop_last` = false also gives the last, incomplete group (possibly empty on high ranks).
  explicit SingleSampler(const SamplerRequest& request, bool drop_last = true);
  [[nodiscard]] std::optional<std::vector<std::int64_t>> next() override;
  [[nodiscard]] std::string exhausted() const override;

 private:
  SamplerRequest request_;
  bool drop_last_;
  std::int64_t position_;
};

/// Every epoch in a new random order, for ever (--dataloader-type cyclic). All ranks get the same number of
/// micro-batches.
class CyclicSampler : public Sampler {
 public:
  CyclicSampler(const SamplerRequest& request, bool data_sharding);
  [[nodiscard]] std::optional<std::vector<std::int64_t>> next() override;
  [[nodiscard]] std::string exhausted() const override;

 private:
  void start_epoch();

  SamplerRequest request_;
  bool data_sharding_;
  std::int64_t consumed_;              ///< over all ranks
  std::int64_t active_;                ///< samples used an epoch
  std::vector<std::int64_t> pending_;  ///< this rank's remaining samples of the epoch
  std::size_t cursor_ = 0;
  bool started_ = false;
};

/// The whole validation set, one sample at a time, rank, rank + size, ..., again and again (--full-validation).
class FullValidationSampler : public Sampler {
 public:
  /// Throws DataError when there are fewer samples than ranks.
  explicit FullValidationSampler(const SamplerRequest& request);
  [[nodiscard]] std::optional<std::vector<std::int64_t>> next() override;
  [[nodiscard]] std::string exhausted() const override;
  /// Items of one pass on the rank that has the most: the number of evaluation iterations.
  [[nodiscard]] static std::int64_t iterations(std::int64_t total, std::int64_t size) {
    return (total + size - 1) / size;
  }

 private:
  SamplerRequest request_;
  std::int64_t position_;
};

}  // namespace pgpt::data

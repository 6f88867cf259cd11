#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pgpt/data/int_array.h"
#include "pgpt/data/sample_order.h"

namespace pgpt::data {

/// Receives one line of text without line end; may be empty (nothing is printed then).
using LineSink = std::function<void(const std::string&)>;

/// Identity of a cached index.
struct CacheKey {
  std::string class_name;   ///< GPTDataset, MockGPTDataset or BlendedDataset
  std::string split;        ///< train, valid or test
  std::string description;  ///< text that names the files through its MD5
  std::string stamp;  ///< everything else that must be equal: file sizes, times, settings absent from the description

  /// `<md5>-<class>-<split>`, the common beginning of the files' names.
  [[nodiscard]] std::string base_name() const;
};

/// Index arrays kept in a directory under the reference's names and in its formats, plus one side file `-verify.json`
/// (stamp, sizes and checksums) that is written last. Anything that does not verify is a miss; files are published by
/// rename, so that several jobs may use one directory; a directory that cannot be written only warns.
class IndexCache {
 public:
  /// `warn` gets one line when the cache cannot be used.
  IndexCache(std::string directory, LineSink warn);

  /// The arrays named `names`, mapped from their files, or nothing.
  [[nodiscard]] std::optional<std::vector<IntArray>> load(const CacheKey& key,
                                                          std::span<const char* const> names) const;
  /// Publishes the arrays unless an equal entry has appeared meanwhile.
  void store(const CacheKey& key, std::span<const char* const> names, std::span<const IntArray> arrays) const;

  [[nodiscard]] const std::string& directory() const { return directory_; }

 private:
  std::string directory_;
  LineSink warn_;
};

/// Builds an order, or takes it from `cache` (may be null) when everything about it matches.
[[nodiscard]] SampleOrder load_or_build_order(const DocumentSource& source, const OrderRequest& request,
                                              const IndexCache* cache, CacheKey key);

}  // namespace pgpt::data

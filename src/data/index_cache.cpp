#include "pgpt/data/index_cache.h"

#include <unistd.h>

#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>

#include "file_util.h"
#include "pgpt/base/error.h"
#include "pgpt/data/checksum.h"

namespace pgpt::data {
namespace {

constexpr int kVerifyVersion = 1;

std::string array_path(const std::string& directory, const CacheKey& key, const std::string& name) {
  return (std::filesystem::path(directory) / (key.base_name() + "-" + name + ".npy")).string();
}

std::string text_path(const std::string& directory, const CacheKey& key, const char* name) {
  return (std::filesystem::path(directory) / (key.base_name() + "-" + name)).string();
}

void publish(const std::string& path, std::span<const std::span<const char>> parts) {
  const std::string temporary = temporary_name(path);
  int fd = create_file(temporary);
  try {
    for (const auto part : parts) write_all(fd, part, temporary);
    const int closing = fd;
    fd = -1;
    close_file(closing, temporary, false);  // what a crash leaves incomplete does not verify
    rename_file(temporary, path);
  } catch (...) {
    if (fd >= 0) ::close(fd);
    ::unlink(temporary.c_str());
    throw;
  }
}

void publish(const std::string& path, const std::string& text) {
  const std::span<const char> part(text);
  publish(path, {&part, 1});
}

nlohmann::json array_facts(const IntArray& array) {
  return {{"header", array.npy_header().substr(8)}, {"bytes", array.bytes().size()}, {"crc32", crc32(array.bytes())}};
}

bool same_shape(const IntArray& array, IntType type, std::int64_t rows, std::int64_t columns) {
  return array.type() == type && array.rows() == rows && array.columns() == columns;
}

}  // namespace

std::string CacheKey::base_name() const { return md5_hex(description) + "-" + class_name + "-" + split; }

IndexCache::IndexCache(std::string directory, LineSink warn)
    : directory_(std::move(directory)), warn_(std::move(warn)) {}

std::optional<std::vector<IntArray>> IndexCache::load(const CacheKey& key, std::span<const char* const> names) const {
  const std::string verify_path = text_path(directory_, key, "verify.json");
  std::error_code ignored;
  if (!std::filesystem::exists(verify_path, ignored)) return std::nullopt;
  // Whatever is wrong with the files, building again is right and cheap.
  try {
    const auto verify = nlohmann::json::parse(read_file(verify_path));
    if (verify.at("version") != kVerifyVersion || verify.at("stamp") != key.stamp) return std::nullopt;
    if (read_file(text_path(directory_, key, "description.txt")) != key.description) return std::nullopt;
    std::vector<IntArray> arrays;
    for (const char* name : names) {
      arrays.push_back(IntArray::map_npy(array_path(directory_, key, name)));
      if (verify.at("arrays").at(name) != array_facts(arrays.back())) return std::nullopt;
    }
    return arrays;
  } catch (const Error&) {
    return std::nullopt;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

void IndexCache::store(const CacheKey& key, std::span<const char* const> names,
                       std::span<const IntArray> arrays) const {
  if (load(key, names)) return;  // another job was faster
  try {
    std::error_code error;
    std::filesystem::create_directories(directory_, error);
    PGPT_CHECK(DataError, !error, "cannot create ", directory_, ": ", error.message());
    nlohmann::json verify = {{"version", kVerifyVersion}, {"stamp", key.stamp}, {"arrays", nlohmann::json::object()}};
    // The side file goes first and comes last, so that a half-replaced entry is never complete.
    ::unlink(text_path(directory_, key, "verify.json").c_str());
    publish(text_path(directory_, key, "description.txt"), key.description);
    for (std::size_t i = 0; i < names.size(); ++i) {
      const std::string header = arrays[i].npy_header();
      const auto bytes = arrays[i].bytes();
      const std::span<const char> parts[] = {header, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}};
      publish(array_path(directory_, key, names[i]), parts);
      verify["arrays"][names[i]] = array_facts(arrays[i]);
    }
    publish(text_path(directory_, key, "verify.json"), verify.dump(1));
  } catch (const Error& problem) {
    if (warn_) {
      warn_(concat(
          "WARNING: the data index cache in ", directory_, " cannot be written (", problem.what(),
          "); going on without it. Give a writable --data-cache-path to avoid building the index at each start"));
    }
  }
}

SampleOrder load_or_build_order(const DocumentSource& source, const OrderRequest& request, const IndexCache* cache,
                                CacheKey key) {
  constexpr const char* kNames[] = {"document_index", "sample_index", "shuffle_index"};
  const OrderPlan plan = plan_order(source, request);
  if (cache != nullptr) {
    key.stamp = concat(source.stamp(), "; documents ", request.documents.begin, " to ", request.documents.end, "; ",
                       plan.tokens_per_epoch, " tokens; extra token ", request.extra_token, "; partial ",
                       request.keep_last_partial);
    if (auto arrays = cache->load(key, kNames)) {
      SampleOrder order{plan, (*arrays)[0], (*arrays)[1], (*arrays)[2]};
      const IntType rows = plan.wide_sample_index ? IntType::kInt64 : IntType::kInt32;
      if (same_shape(order.document_index, IntType::kInt32, plan.epochs * request.documents.size(), 1) &&
          same_shape(order.sample_index, rows, plan.samples + 1, 2) && order.shuffle_index.rows() == plan.samples) {
        return order;
      }
    }
  }
  try {
    SampleOrder order = build_order(source, request);
    if (cache != nullptr) {
      const IntArray arrays[] = {order.document_index, order.sample_index, order.shuffle_index};
      cache->store(key, kNames, arrays);
    }
    return order;
  } catch (const std::bad_alloc&) {
    throw DataError(concat(source.name(), ": not enough memory for the index of ", plan.samples, " samples in ",
                           plan.epochs, " epochs; lower --train-iters or --train-samples"));
  }
}

}  // namespace pgpt::data

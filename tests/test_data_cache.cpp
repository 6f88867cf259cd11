// The index cache: names and bytes as the reference's, and never a stale, damaged or foreign index.
#include <sys/wait.h>
#include <unistd.h>

#include <map>

#include "pgpt/data/description.h"
#include "support/catch.h"
#include "test_data_support.h"

using namespace pgpt;
using namespace pgpt::data;
using namespace pgpt::data::test;
namespace fs = std::filesystem;

namespace {

/// Works inside `path`, so that prefixes can be relative as in the golden file.
class InFolder {
 public:
  explicit InFolder(const std::string& path) : before_(fs::current_path()) { fs::current_path(path); }
  ~InFolder() {
    std::error_code ignored;
    fs::current_path(before_, ignored);
  }
  InFolder(const InFolder&) = delete;
  InFolder& operator=(const InFolder&) = delete;

 private:
  fs::path before_;
};

void copy_corpora(const TemporaryFolder& folder) {
  for (const std::string name : {"corpus_a", "corpus_c"}) {
    for (const char* suffix : {".bin", ".idx"}) fs::copy_file(golden_path(name + suffix), folder / (name + suffix));
  }
}

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  if (!fs::exists(directory)) return names;
  for (const auto& entry : fs::directory_iterator(directory)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

/// Files that the reference writes too.
std::vector<std::string> shared_names(const std::string& directory) {
  auto names = names_in(directory);
  std::erase_if(names, [](const std::string& name) { return contains(name, "verify.json"); });
  return names;
}

std::map<std::string, fs::file_time_type> times_in(const std::string& directory) {
  std::map<std::string, fs::file_time_type> times;
  for (const auto& name : names_in(directory)) times[name] = fs::last_write_time(fs::path(directory) / name);
  return times;
}

config::Config cached_config(const TemporaryFolder& folder) {
  config::Config config = small_config(folder / "corpus_a");
  config.data.cache_path = folder / "cache";
  return config;
}

}  // namespace

TEST_CASE("cache files have the reference's names and bytes", "[cpu]") {
  const TemporaryFolder folder;
  copy_corpora(folder);
  const InFolder inside(folder.path());
  const json expected = golden("cache.json");

  config::Config config = small_config("corpus_a", "969, 30, 1");
  config.data.cache_path = "cache";
  (void)build(config);
  auto files = expected["gpt"]["files"].get<std::vector<std::string>>();
  std::sort(files.begin(), files.end());
  CHECK(shared_names("cache") == files);
  const std::string base = expected["gpt"]["md5"].get<std::string>() + "-GPTDataset-train-";
  CHECK(read_text("cache/" + base + "description.txt") == expected["gpt"]["description"].get<std::string>());
  for (const auto& [name, facts] : expected["gpt"]["npy"].items()) {
    const std::string bytes = read_text("cache/" + name);
    CHECK(bytes.size() == facts["bytes"].get<std::size_t>());
    CHECK(crc_of(bytes) == facts["crc32"].get<std::uint32_t>());
    const std::string header = facts["header_ascii"];
    CHECK(bytes.substr(10, header.size()) == header);
  }

  config.data.data_path = {"0.3", "corpus_a", "0.7", "corpus_c"};
  config.data.split = "1,0,0";
  config.data.cache_path = "blend";
  config.training.train_iters = 12;
  (void)build(config);
  files = expected["blended"]["files"].get<std::vector<std::string>>();
  std::sort(files.begin(), files.end());
  CHECK(shared_names("blend") == files);
  const std::string blend = expected["blended"]["md5"].get<std::string>() + "-BlendedDataset-train-description.txt";
  CHECK(read_text("blend/" + blend) == expected["blended"]["description"].get<std::string>());
}

TEST_CASE("descriptions print null, given ids and mock data as the reference does", "[cpu]") {
  const json expected = golden("cache.json")["gpt_per_split_num_samples_null"];
  DatasetDescription description;
  description.class_name = "GPTDataset";
  description.path = "corpus_a";
  description.seq_length = 8;
  config::Config config = small_config("corpus_a");
  config.data.eod_id = 0;
  description.tokenizer = resolve_tokenizer(config).description;
  CHECK(description.text() == expected["description"].get<std::string>());
  CHECK(md5_hex(description.text()) == expected["md5"].get<std::string>());

  const json mock = golden("mock_run.json");
  description.class_name = "MockGPTDataset";
  description.path.reset();
  description.num_samples = 6;
  description.seq_length = 64;
  description.split_string = "1,1,1";
  description.matrix = split_matrix(parse_split("1,1,1"));
  description.tokenizer = resolve_tokenizer(small_config("")).description;
  CHECK(description.text() == mock["train_unique_description"].get<std::string>());
  CHECK(md5_hex(description.text()) == mock["train_unique_description_md5"].get<std::string>());

  description.path = "d\xC3\xA9j\xC3\xA0 \"x\"/\xF0\x9F\x98\x80";
  CHECK(contains(description.text(), R"("dataset_path": "d\u00e9j\u00e0 \"x\"/\ud83d\ude00")"));
}

TEST_CASE("the default cache folder stands beside the corpus, and mock data has none", "[cpu]") {
  const TemporaryFolder folder;
  copy_corpora(folder);
  (void)build(small_config(folder / "corpus_a"));
  CHECK(names_in(folder / "corpus_a/cache/GPTDataset_indices").size() == 5);
  const auto before = names_in(folder.path());
  const InFolder inside(folder.path());
  config::Config mock = small_config("");
  mock.model.seq_length = 4096;
  (void)build(mock);
  CHECK(names_in(folder.path()) == before);
}

TEST_CASE("a second build takes the index from the cache", "[cpu]") {
  const TemporaryFolder folder;
  copy_corpora(folder);
  const config::Config config = cached_config(folder);
  const auto first = all_tokens(*build(config).train);
  const auto times = times_in(folder / "cache");
  REQUIRE(times.size() == 5);
  CHECK(all_tokens(*build(config).train) == first);
  CHECK(times_in(folder / "cache") == times);
  // What is loaded is the file, not a rebuilt index: the mapping shows the file's own name.
  const auto order = load_or_build_order(IndexedDataset(folder / "corpus_a"), OrderRequest{{0, 7}, 5, 8}, nullptr, {});
  const IndexCache cache(folder / "cache", {});
  CacheKey key{"GPTDataset", "train", read_text((fs::path(folder / "cache") / times.begin()->first).string()), ""};
  REQUIRE(key.base_name() + "-description.txt" == times.begin()->first);
  const char* const names[] = {"document_index", "sample_index", "shuffle_index"};
  CHECK_FALSE(cache.load(key, names).has_value());  // wrong stamp
  key.stamp = json::parse(read_text(folder / ("cache/" + key.base_name() + "-verify.json")))["stamp"];
  const auto arrays = cache.load(key, names);
  REQUIRE(arrays.has_value());
  CHECK(crc32((*arrays)[2].bytes()) == crc32(order.shuffle_index.bytes()));
}

TEST_CASE("a corpus rebuilt under the same prefix never gets the old index", "[cpu]") {
  const TemporaryFolder folder;
  const auto corpus = [&](std::int64_t shift, bool longer) {
    std::vector<std::vector<std::int64_t>> documents;
    for (std::int64_t d = 0; d < 6; ++d) {
      std::vector<std::int64_t> document;
      // Equal totals with other lengths: only times or lengths can tell the corpora apart.
      for (std::int64_t k = 0; k < (longer ? 5 + d : 10 - d); ++k) document.push_back(10 * d + k + shift);
      documents.push_back(document);
    }
    write_corpus(folder / "corpus_a", documents);
  };
  const config::Config config = cached_config(folder);
  config::Config uncached = config;
  uncached.data.cache_path = folder / "other";
  for (const bool longer : {false, true, false}) {
    corpus(longer ? 3 : 0, longer);
    fs::remove_all(folder / "other");
    CHECK(all_tokens(*build(config).train) == all_tokens(*build(uncached).train));
  }
}

TEST_CASE("damaged, foreign and incomplete cache files are rebuilt", "[cpu]") {
  const TemporaryFolder folder;
  copy_corpora(folder);
  const config::Config config = cached_config(folder);
  const auto expected = all_tokens(*build(config).train);
  std::map<std::string, std::string> good;
  for (const auto& name : names_in(folder / "cache")) good[name] = read_text(folder / ("cache/" + name));
  REQUIRE(good.size() == 5);

  config::Config other = config;
  other.training.seed = 7;
  other.data.cache_path = folder / "seed7";
  (void)build(other);

  const auto check = [&](const std::string& name, const std::string& what) {
    INFO(name << " " << what);
    CHECK(all_tokens(*build(config).train) == expected);
    for (const auto& [file, bytes] : good) {
      if (!contains(file, "verify")) CHECK(read_text(folder / ("cache/" + file)) == bytes);
    }
  };
  for (const auto& [name, bytes] : good) {
    const std::string path = folder / ("cache/" + name);
    for (std::size_t size = 0; size < bytes.size(); size += 1 + bytes.size() / 12) {
      write_text(path, bytes.substr(0, size));
      check(name, "truncated");
    }
    for (std::size_t at = 0; at < bytes.size(); at += 1 + bytes.size() / 25) {
      std::string damaged = bytes;
      damaged[at] = static_cast<char>(damaged[at] ^ 0x11);
      write_text(path, damaged);
      check(name, "changed");
    }
    fs::remove(path);
    check(name, "removed");
    fs::create_directory(path + ".tmp.leftover");
    const auto ending = name.substr(name.find("-train-"));
    for (const auto& foreign : names_in(folder / "seed7")) {
      if (!contains(foreign, ending)) continue;
      write_text(path, read_text(folder / ("seed7/" + foreign)));
      check(name, "from another seed");
    }
  }
  // Entries without the side file (the reference's own) may be stale and are not trusted.
  for (const auto& [name, bytes] : good) {
    if (contains(name, "shuffle_index")) {
      std::string stale = bytes;
      std::swap(stale[128], stale[132]);
      write_text(folder / ("cache/" + name), stale);
    }
    if (contains(name, "verify")) fs::remove(folder / ("cache/" + name));
  }
  check("all", "without side file");
}

TEST_CASE("a cache that cannot be written only warns", "[cpu]") {
  const TemporaryFolder folder;
  copy_corpora(folder);
  config::Config config = cached_config(folder);
  const auto expected = all_tokens(*build(config).train);
  write_text(folder / "file", "not a folder");
  config.data.cache_path = folder / "file/cache";
  Lines lines;
  CHECK(all_tokens(*build(config, lines.sink()).train) == expected);
  CHECK(lines.has("WARNING: the data index cache in " + (folder / "file/cache") + " cannot be written"));
  CHECK(lines.has("--data-cache-path"));

  if (::geteuid() != 0) {
    fs::create_directory(folder / "readonly");
    fs::permissions(folder / "readonly", fs::perms::owner_read | fs::perms::owner_exec);
    config.data.cache_path = folder / "readonly";
    Lines more;
    CHECK(all_tokens(*build(config, more.sink()).train) == expected);
    CHECK(more.has("cannot be written"));
  }
}

TEST_CASE("jobs that start together on a cold cache all get the right index", "[cpu]") {
  const TemporaryFolder folder;
  copy_corpora(folder);
  config::Config config = cached_config(folder);
  const auto expected = all_tokens(*build(small_config(folder / "corpus_a")).train);
  for (int round = 0; round < 10; ++round) {
    fs::remove_all(folder / "cache");
    std::vector<pid_t> children;
    for (int job = 0; job < 3; ++job) {
      const pid_t child = ::fork();
      REQUIRE(child >= 0);
      if (child == 0) {
        bool good = true;
        try {
          for (int again = 0; again < 5; ++again) good = good && all_tokens(*build(config).train) == expected;
        } catch (...) {
          good = false;
        }
        ::_exit(good ? 0 : 1);
      }
      children.push_back(child);
    }
    for (const pid_t child : children) {
      int status = -1;
      REQUIRE(::waitpid(child, &status, 0) == child);
      CHECK(WIFEXITED(status));
      CHECK(WEXITSTATUS(status) == 0);
    }
    CHECK(names_in(folder / "cache").size() == 5);  // no temporary file stays
    CHECK(all_tokens(*build(config).train) == expected);
  }
}

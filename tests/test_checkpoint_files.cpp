// Shards, manifests and folders by themselves: any cut reads back as any other, and every kind of damage is found.

#include <ATen/ATen.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <set>

#include "pgpt/base/error.h"
#include "pgpt/checkpoint/checksum.h"
#include "pgpt/checkpoint/directory.h"
#include "pgpt/checkpoint/safetensors.h"
#include "support/catch.h"
#include "support/safetensors_reader.h"
#include "support/tensor_check.h"
#include "support/text.h"
#include "test_checkpoint_support.h"

using namespace pgpt;
using namespace pgpt::checkpoint;
using test::contains;
using test::error_of;
using test::read_text;
using test::write_text;
namespace fs = std::filesystem;

namespace {

/// Values that name their own place, so that a misplaced element is seen.
at::Tensor numbered(const std::vector<std::int64_t>& shape, at::ScalarType dtype) {
  return at::arange(num_elements(shape), at::TensorOptions().dtype(at::kLong)).remainder(32003).view(shape).to(dtype);
}

/// Cuts each dimension of a tensor at `cuts` and gives the boxes to writers in turn.
std::vector<LocalTensor> boxes_of(const std::string& name, const at::Tensor& whole,
                                  const std::vector<std::vector<std::int64_t>>& cuts) {
  std::vector<LocalTensor> boxes = {
      {name, whole.sizes().vec(), std::vector<std::int64_t>(static_cast<std::size_t>(whole.dim()), 0), whole, 0, 1}};
  for (std::size_t d = 0; d < cuts.size(); ++d) {
    std::vector<LocalTensor> next;
    for (const LocalTensor& box : boxes) {
      std::int64_t begin = 0;
      std::vector<std::int64_t> ends = cuts[d];
      ends.push_back(whole.size(static_cast<std::int64_t>(d)));
      for (const std::int64_t end : ends) {
        LocalTensor part = box;
        part.values = box.values.narrow(static_cast<std::int64_t>(d), begin, end - begin).contiguous();
        part.offset[d] = begin;
        next.push_back(std::move(part));
        begin = end;
      }
    }
    boxes = std::move(next);
  }
  return boxes;
}

/// Writes the boxes to `files` shards and publishes the manifest.
Manifest write(const fs::path& folder, const std::vector<LocalTensor>& boxes, std::size_t files,
               const IoOptions& options) {
  fs::create_directories(folder);
  Manifest manifest;
  manifest.program = "test";
  manifest.block_bytes = options.block_bytes;
  manifest.state.iteration = 3;
  for (std::size_t f = 0; f < files; ++f) {
    std::vector<LocalTensor> mine;
    for (std::size_t i = f; i < boxes.size(); i += files) {
      if (boxes[i].values.numel() > 0) mine.push_back(boxes[i]);
    }
    const std::string text = summaries_text(write_shards(folder, concat("shard_", f), mine, options));
    for (const ShardSummary& file : parse_summaries(text)) merge(manifest, file);
  }
  check_coverage(manifest, "test");
  write_text_atomically((folder / kManifestName).string(), manifest_text(manifest));
  return manifest;
}

const std::vector<std::vector<std::vector<std::int64_t>>> kCuts = {{},         {{7}},         {{3, 4, 9}},
                                                                   {{5}, {2}}, {{}, {3, 11}}, {{1, 2}, {1, 5, 6}, {1}}};

}  // namespace

TEST_CASE("CRC-32C is the standard one and continues", "[cpu][checkpoint]") {
  CHECK(crc32c("123456789", 9) == 0xE3069283U);  // check value of the polynomial's definition
  const std::string zeros(32, '\0');
  CHECK(crc32c(zeros.data(), zeros.size()) == 0x8A9136AAU);  // RFC 3720, B.4
  const std::string ones(32, '\xff');
  CHECK(crc32c(ones.data(), ones.size()) == 0x62A8AB43U);
  std::mt19937 random(1);
  std::string bytes(1000, ' ');
  for (char& c : bytes) c = static_cast<char>(random());
  for (const std::size_t cut : {0, 1, 7, 8, 13, 999, 1000}) {
    CHECK(crc32c(bytes.data() + cut, bytes.size() - cut, crc32c(bytes.data(), cut)) ==
          crc32c(bytes.data(), bytes.size()));
  }
}

TEST_CASE("a tensor written in any cut reads back in any other", "[cpu][checkpoint]") {
  const test::ScratchFolder scratch;
  int number = 0;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat, at::kLong}) {
    const at::Tensor whole = numbered({13, 17, 2}, dtype);
    const at::Tensor vector = numbered({29}, dtype);
    const at::Tensor scalar = numbered({}, dtype);
    for (const auto& from : kCuts) {
      for (const int threads : {1, 4}) {
        IoOptions options;
        options.block_bytes = 64;  // pieces span many blocks
        options.threads = threads;
        std::vector<LocalTensor> boxes = boxes_of("m", whole, from);
        for (LocalTensor& box : boxes_of("v", vector, {{4, 28}})) boxes.push_back(box);
        boxes.push_back({"s", {}, {}, scalar, 0, 1});
        const fs::path folder = scratch.path(std::to_string(number++));
        write(folder, boxes, 3, options);
        const Checkpoint checkpoint(folder);
        checkpoint.verify(options);
        test::require_equal(checkpoint.read("m", options), whole);
        test::require_equal(checkpoint.read("v", options), vector);
        test::require_equal(checkpoint.read("s", options), scalar);
        for (const auto& to : kCuts) {
          std::vector<LocalTensor> targets = boxes_of("m", at::zeros_like(whole), to);
          checkpoint.load(targets, false, options);
          for (const LocalTensor& target : targets) {
            at::Tensor expected = whole;
            for (std::int64_t d = 0; d < whole.dim(); ++d) {
              expected = expected.narrow(d, target.offset[static_cast<std::size_t>(d)], target.values.size(d));
            }
            CHECK(at::equal(target.values, expected));
          }
        }
      }
    }
  }
}

TEST_CASE("large shards go past the page cache, in whole pages or not, and into several files", "[cpu][checkpoint]") {
  const test::ScratchFolder scratch;
  // Two of whole pages, one that ends inside a page, one that starts everything after it at an odd byte, one small.
  const std::vector<std::pair<std::string, at::Tensor>> tensors = {
      {"pages", numbered({512, 1024}, at::kFloat)},
      {"odd", numbered({1000, 1001}, at::kBFloat16)},
      {"bytes", numbered({1'500'001}, at::kLong).to(at::kChar)},
      {"after", numbered({300, 1000}, at::kFloat)},
      {"more pages", numbered({1024, 1024}, at::kBFloat16)},
      {"small", numbered({3}, at::kFloat)}};
  int number = 0;
  for (const std::uint64_t block_bytes : {std::uint64_t{4} << 20, std::uint64_t{100'000}, std::uint64_t{1600}}) {
    for (const std::uint64_t file_bytes : {std::uint64_t{512} << 20, std::uint64_t{1} << 20}) {
      IoOptions options;
      options.block_bytes = block_bytes;
      options.file_bytes = file_bytes;
      options.threads = 3;
      std::vector<LocalTensor> parts;
      for (const auto& [name, values] : tensors) {
        for (const LocalTensor& part : boxes_of(name, values, {})) parts.push_back(part);
      }
      const fs::path folder = scratch.path(std::to_string(number++));
      const Manifest manifest = write(folder, parts, 1, options);
      CHECK(manifest.files.size() == (file_bytes > tensor_bytes(parts) ? 1 : 3));  // no more than threads
      const Checkpoint checkpoint(folder);
      checkpoint.verify(options);
      std::map<std::string, test::StoredTensor> stored;  // as another reader sees it
      for (const auto& [file, entry] : manifest.files) {
        CHECK(fs::file_size(folder / file) == entry.bytes);
        stored.merge(test::read_safetensors((folder / file).string()));
      }
      for (const auto& [name, values] : tensors) {
        INFO(name << ", blocks of " << block_bytes);
        test::require_equal(checkpoint.read(name, options), values);
        REQUIRE(stored.at(name).bytes.size() == static_cast<std::size_t>(values.numel()) * values.element_size());
        CHECK(std::memcmp(stored.at(name).bytes.data(), values.data_ptr(), stored.at(name).bytes.size()) == 0);
      }
      // Into other boxes and another type, from wherever the blocks lie.
      const at::Tensor half = at::zeros({200, 500}, at::kBFloat16);
      checkpoint.load({{"after", {300, 1000}, {50, 250}, half, 0, 1}}, true, options);
      CHECK(at::equal(half, tensors[3].second.narrow(0, 50, 200).narrow(1, 250, 500).to(at::kBFloat16)));
      // The last byte of a file, which no whole page holds.
      const fs::path victim = folder / manifest.files.rbegin()->first;
      const auto last = static_cast<std::streamoff>(fs::file_size(victim)) - 1;
      std::fstream file(victim, std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(last);
      const auto byte = static_cast<char>(file.get() ^ 1);
      file.seekp(last);
      file.put(byte);
      file.close();
      CHECK(error_of<DataError>([&] { Checkpoint(folder).verify(options); }).find(victim.string() + " is damaged") !=
            std::string::npos);
    }
  }
}

TEST_CASE("a snapshot copies once and keeps its memory", "[cpu][checkpoint]") {
  const at::Tensor a = numbered({100, 7}, at::kBFloat16);
  const at::Tensor b = numbered({1000}, at::kFloat);
  std::vector<LocalTensor> parts = boxes_of("a", a, {});
  parts.push_back(boxes_of("b", b, {}).front());
  std::vector<at::Tensor> memory;
  const std::vector<LocalTensor> first = host_snapshot(parts, memory);
  const at::Tensor expected = b.clone();
  b.fill_(-1);
  test::require_equal(first[0].values, a);
  test::require_equal(first[1].values, expected);
  const std::vector<LocalTensor> second = host_snapshot(parts, memory);
  CHECK(second[1].values.data_ptr() == first[1].values.data_ptr());
  test::require_equal(second[1].values, b);
  CHECK(memory.size() == 1);
}

TEST_CASE("shards are safetensors files that another reader understands", "[cpu][checkpoint]") {
  const test::ScratchFolder scratch;
  const at::Tensor whole = numbered({8, 5}, at::kFloat);
  write(scratch.path("c"), boxes_of("decoder.weight", whole, {{3}}), 1, {});
  const auto tensors = test::read_safetensors(scratch.path("c") + "/shard_0.safetensors");
  REQUIRE(tensors.size() == 2);  // two boxes in one file: the second has a numbered name
  const test::StoredTensor& first = tensors.at("decoder.weight");
  const test::StoredTensor& second = tensors.at("decoder.weight#1");
  CHECK(first.dtype == "F32");
  CHECK(first.shape == std::vector<std::int64_t>{3, 5});
  CHECK(std::memcmp(first.bytes.data(), whole.data_ptr(), first.bytes.size()) == 0);
  CHECK(std::memcmp(second.bytes.data(), whole.data_ptr<float>() + 15, second.bytes.size()) == 0);
}

TEST_CASE("replicas share the work without gaps or doubles", "[cpu][checkpoint]") {
  for (const std::int64_t replicas : {1, 2, 3, 5}) {
    const at::Tensor large = numbered({701, 512}, at::kFloat);  // above the size from which tensors are cut
    std::vector<LocalTensor> all;
    std::vector<std::uint64_t> bytes;
    for (std::int64_t replica = 0; replica < replicas; ++replica) {
      std::vector<LocalTensor> held = {{"large", {701, 512}, {0, 0}, large, replica, replicas}};
      for (int i = 0; i < 20; ++i)
        held.push_back({concat("small", i), {64}, {0}, numbered({64}, at::kFloat), replica, replicas});
      const std::vector<LocalTensor> mine = writers_part(held, true);
      bytes.push_back(tensor_bytes(mine));
      all.insert(all.end(), mine.begin(), mine.end());
    }
    const test::ScratchFolder scratch;
    write(scratch.path("c"), all, 1, {});  // checks coverage
    test::require_equal(Checkpoint(scratch.path("c")).read("large"), large);
    // The large tensor is cut between pages of two rows: each end moves by less than two. Of the 20 small ones nobody
    // has two more than another.
    CHECK(*std::max_element(bytes.begin(), bytes.end()) - *std::min_element(bytes.begin(), bytes.end()) <=
          4 * 512 * 4 + 64 * 4);
  }
}

TEST_CASE("types convert only when asked", "[cpu][checkpoint]") {
  const test::ScratchFolder scratch;
  const at::Tensor values = numbered({6, 4}, at::kFloat).div(7.0);
  write(scratch.path("c"), boxes_of("t", values, {}), 1, {});
  const Checkpoint checkpoint(scratch.path("c"));
  LocalTensor target{"t", {6, 4}, {0, 0}, at::zeros({6, 4}, at::kBFloat16), 0, 1};
  CHECK(contains(error_of<DataError>([&] { checkpoint.load({target}, false, {}); }), "tensor t has type F32"));
  checkpoint.load({target}, true, {});
  test::require_equal(target.values, values.to(at::kBFloat16));
}

TEST_CASE("holes, overlaps and strangers in the list of pieces are refused", "[cpu][checkpoint]") {
  const test::ScratchFolder scratch;
  const Manifest good = write(scratch.path("c"), boxes_of("t", numbered({8, 4}, at::kFloat), {{4}}), 2, {});
  const auto refused = [&](auto change) {
    Manifest bad = good;
    change(bad);
    return error_of<DataError>([&] { check_coverage(bad, "here"); });
  };
  CHECK(refused([](Manifest&) {}).empty());
  CHECK(refused([](Manifest& m) { m.tensors.at("t").pieces.pop_back(); }).find("hold 16 elements of 32") !=
        std::string::npos);
  CHECK(contains(refused([](Manifest& m) { m.tensors.at("t").pieces[1].offset[0] = 3; }), "overlap"));
  CHECK(refused([](Manifest& m) {
          m.tensors.at("t").pieces[1].offset[0] = 5;
        }).find("of shape [8, 4] has a piece of shape [4, 4] at [5, 0]") != std::string::npos);
  CHECK(refused([](Manifest& m) { m.files.erase("shard_1.safetensors"); }).find("not in the list of files") !=
        std::string::npos);
  CHECK(refused([](Manifest& m) { m.tensors.at("t").pieces[0].checksums.push_back(1); }).find("checksums") !=
        std::string::npos);
}

TEST_CASE("every flipped bit, cut and missing file is found", "[cpu][checkpoint]") {
  const test::ScratchFolder scratch;
  const fs::path folder = scratch.path("c");
  IoOptions options;
  options.block_bytes = 64;
  std::vector<LocalTensor> boxes = boxes_of("a", numbered({13, 7}, at::kFloat), {{5}});
  for (LocalTensor& box : boxes_of("b", numbered({50}, at::kBFloat16), {{20}})) boxes.push_back(box);
  write(folder, boxes, 2, options);
  const std::vector<std::string> files = {"shard_0.safetensors", "shard_1.safetensors", kManifestName};
  std::mt19937 random(11);
  const auto fails_naming = [&](const std::string& file) {
    const std::string message = error_of<DataError>([&] { Checkpoint(folder).verify(options); });
    INFO(message);
    CHECK(contains(message, (folder / file).string()));
    // What a run does is to load: it must not take a single damaged element either.
    CHECK_FALSE(error_of<DataError>([&] {
                  const Checkpoint checkpoint(folder);
                  (void)checkpoint.read("a", options);
                  (void)checkpoint.read("b", options);
                }).empty());
  };
  for (const std::string& file : files) {
    const std::string bytes = read_text(folder / file);
    for (int trial = 0; trial < test::trials("PGPT_FAULT_TRIALS", 60); ++trial) {
      std::string bad = bytes;
      const std::size_t at = random() % bad.size();
      const auto bit = static_cast<char>(1U << (random() % 8));
      bad[at] = static_cast<char>(bad[at] ^ bit);
      INFO("flipped bit of byte " << at << " of " << file);
      write_text(folder / file, bad);
      fails_naming(file);
      const std::size_t length = random() % bytes.size();
      INFO("cut to " << length << " bytes");
      write_text(folder / file, bytes.substr(0, length));
      fails_naming(file);
    }
    write_text(folder / file, bytes + "x");
    fails_naming(file);
    fs::remove(folder / file);
    fails_naming(file);
    write_text(folder / file, bytes);
  }
  Checkpoint(folder).verify(options);
}

TEST_CASE("the tracker holds an iteration or the word release", "[cpu][checkpoint]") {
  const test::ScratchFolder scratch;
  const fs::path root = scratch.path("");
  CHECK_FALSE(read_tracker(root));
  for (const auto& [text, iteration] : {std::pair<std::string, std::int64_t>{"12", 12}, {" 7\n", 7}, {"\t0 ", 0}}) {
    write_text(tracker_path(root), text);
    CHECK(read_tracker(root)->iteration == iteration);
  }
  write_text(tracker_path(root), "release\n");
  CHECK(read_tracker(root)->release);
  for (const std::string bad : {"", "  ", "12x", "-3", "1 2", "latest", "1e3"}) {
    write_text(tracker_path(root), bad);
    INFO("'" << bad << "'");
    CHECK(contains(error_of<DataError>([&] { (void)read_tracker(root); }), tracker_path(root).string()));
  }
  write_tracker(root, 300);
  CHECK(read_text(tracker_path(root)) == "300");  // no newline, as the reference writes it
}

TEST_CASE("a checkpoint is published, replaced and removed as a whole", "[cpu][checkpoint]") {
  const test::ScratchFolder scratch;
  const fs::path root = fs::path(scratch.path("")) / "deep" / "save";
  const auto names = [&] {
    std::set<std::string> all;
    for (const fs::directory_entry& entry : fs::directory_iterator(root)) all.insert(entry.path().filename().string());
    return all;
  };
  fs::path partial = begin_save(root, 5);
  write_text(partial / "x", "old");
  CHECK(names() == std::set<std::string>{".iter_0000005.partial"});
  publish(root, partial, 5);
  CHECK(names() == std::set<std::string>{"iter_0000005"});
  partial = begin_save(root, 5);
  write_text(partial / "x", "new");
  publish(root, partial, 5);
  CHECK(names() == std::set<std::string>{"iter_0000005"});
  CHECK(read_text(root / "iter_0000005" / "x") == "new");

  // What killed processes leave: a half-written save, a half-deleted checkpoint, and an overwrite stopped between its
  // two renames.
  fs::create_directory(root / ".iter_0000009.partial");
  fs::create_directory(root / ".iter_0000002.deleted");
  fs::rename(root / "iter_0000005", root / ".iter_0000005.replaced");
  CHECK(checkpoint_path(root, {5, false}) == root / ".iter_0000005.replaced");
  partial = begin_save(root, 6);
  CHECK(names() ==
        std::set<std::string>{".iter_0000005.replaced", ".iter_0000006.partial"});  // still the only copy of 5
  publish(root, partial, 6);
  fs::copy(root / ".iter_0000005.replaced", root / "iter_0000005", fs::copy_options::recursive);
  CHECK(checkpoint_path(root, {5, false}) == root / "iter_0000005");
  fs::remove_all(begin_save(root, 7));
  CHECK(names() == std::set<std::string>{"iter_0000005", "iter_0000006"});
  const fs::path gone = hide_checkpoint(root / "iter_0000005");
  CHECK(names() == std::set<std::string>{gone.filename().string(), "iter_0000006"});
  CHECK(gone.filename().string().front() == '.');
  remove_hidden(gone);
  CHECK(names() == std::set<std::string>{"iter_0000006"});
}

TEST_CASE("a save can be cancelled", "[cpu][checkpoint]") {
  const test::ScratchFolder scratch;
  std::atomic<bool> cancel{true};
  IoOptions options;
  options.cancel = &cancel;
  fs::create_directories(scratch.path("c"));
  CHECK(error_of<DataError>([&] {
          (void)write_shards(scratch.path("c"), "s", boxes_of("t", numbered({8}, at::kFloat), {}), options);
        }).find("cancelled") != std::string::npos);
}

// Hidden: test_checkpoint "[checkpoint-speed]"; PGPT_SPEED_MB and PGPT_SPEED_THREADS set the size, TMPDIR the disk.
TEST_CASE("speed of a shard against plain writes and reads", "[.][checkpoint-speed]") {
  const test::ScratchFolder scratch;
  const std::int64_t rows = test::trials("PGPT_SPEED_MB", 1024) * std::int64_t{256};
  IoOptions options;
  options.threads = test::trials("PGPT_SPEED_THREADS", 4);
  const at::Tensor whole = at::full({rows, 1024}, 1.5F);
  const double megabytes = static_cast<double>(whole.numel()) * 4e-6;
  const auto timed = [&](const char* what, const std::function<void()>& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    WARN(what << ": " << megabytes / seconds.count() << " MB/s");
  };
  timed("plain write and fsync, one thread", [&] {
    const int file = ::open(scratch.path("plain").c_str(), O_WRONLY | O_CREAT, 0644);
    const char* data = static_cast<const char*>(whole.data_ptr());
    const auto size = static_cast<std::size_t>(whole.numel()) * 4;
    for (std::size_t at = 0; at < size; at += options.block_bytes) {
      REQUIRE(::write(file, data + at, std::min<std::size_t>(options.block_bytes, size - at)) > 0);
    }
    REQUIRE(::fsync(file) == 0);
    ::close(file);
  });
  fs::remove(scratch.path("plain"));
  timed("write_shards",
        [&] { write(scratch.path("c"), {{"t", whole.sizes().vec(), {0, 0}, whole, 0, 1}}, 1, options); });
  timed("verify", [&] { Checkpoint(scratch.path("c")).verify(options); });
  timed("checksums alone, one thread",
        [&] { CHECK(crc32c(whole.data_ptr(), static_cast<std::size_t>(whole.numel()) * 4) != 0); });
}

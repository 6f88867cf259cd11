// Tokenizer facts from flags and files, and preprocessing.
#include "pgpt/data/preprocess.h"
#include "pgpt/data/tokenizer.h"
#include "support/catch.h"
#include "test_data_support.h"

using namespace pgpt;
using namespace pgpt::data;
using namespace pgpt::data::test;

namespace {

config::Config tokenizer_config(const std::string& type, const std::string& path = "") {
  config::Config config;
  config.data.tokenizer_type = type;
  (type == "GPT2BPETokenizer" ? config.data.vocab_file : config.data.tokenizer_model) = path;
  return config;
}

std::string resolve_error(const config::Config& config) {
  return error_of<ConfigError>([&] { (void)resolve_tokenizer(config); });
}

void check_facts(const TokenizerFacts& facts, std::int64_t vocab, std::int64_t eod, std::int64_t pad) {
  CHECK(facts.vocab_size == vocab);
  CHECK(facts.eod == eod);
  CHECK(facts.pad == pad);
}

std::string varint(std::uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>((value & 0x7FU) | 0x80U);
  return out + static_cast<char>(value);
}

std::string bytes_field(std::uint64_t field, const std::string& bytes) {
  return varint(field << 3 | 2) + varint(bytes.size()) + bytes;
}

/// A SentencePiece piece: text, a float score, and a type unless it is the default.
std::string piece(const std::string& text, std::uint64_t type = 1) {
  std::string body = bytes_field(1, text) + varint(2 << 3 | 5) + std::string(4, '\0');
  if (type != 1) body += varint(3 << 3) + varint(type);
  return bytes_field(1, body);
}

PreprocessOptions preprocess_options(const std::string& input, const std::string& output) {
  PreprocessOptions options;
  options.inputs = {input};
  options.output_prefix = output;
  options.vocab_size = 128;
  return options;
}

TextToIds null_ids(std::int64_t vocab) {
  return [vocab](std::string_view text) { return null_tokenize(text, vocab); };
}

}  // namespace

TEST_CASE("NullTokenizer's facts follow from the vocabulary size and its overrides", "[cpu]") {
  config::Config config = tokenizer_config("NullTokenizer");
  CHECK(contains(resolve_error(config), "NullTokenizer needs --vocab-size"));
  config.model.vocab_size = 128;
  check_facts(resolve_tokenizer(config), 128, 127, -1);
  config.data.eod_id = 5;
  config.data.pad_id = 6;
  check_facts(resolve_tokenizer(config), 128, 5, 6);
  config.data.eod_id = 128;
  CHECK(contains(resolve_error(config), "128 must be below the vocabulary size 128"));
  config.data.eod_id = -1;
  config.model.padded_vocab_size = 100;
  CHECK(contains(resolve_error(config), "padded vocabulary 100 is smaller"));
}

TEST_CASE("other tokenizers can be described by flags alone", "[cpu]") {
  for (const std::string type :
       {"HuggingFaceTokenizer", "GPT2BPETokenizer", "Llama2Tokenizer", "TikTokenizer", "SFTTokenizer"}) {
    config::Config config = tokenizer_config(type, type == "SFTTokenizer" ? "" : "meta-llama/some-hub-name");
    const std::string message = resolve_error(config);
    INFO(message);
    CHECK(contains(message, "add --vocab-size or --padded-vocab-size"));
    CHECK_FALSE(contains(message, "--null-tokenizer-eod-id"));
    config.data.eod_mask_loss = true;
    CHECK(contains(resolve_error(config), "--null-tokenizer-eod-id"));
    config.model.padded_vocab_size = 1024;
    CHECK(contains(resolve_error(config), "the end-of-document id is unknown"));
    config.data.eod_mask_loss = false;
    check_facts(resolve_tokenizer(config), 1024, -1, -1);
    config.model.vocab_size = 1000;
    config.data.eod_id = 7;
    config.data.eod_mask_loss = true;
    check_facts(resolve_tokenizer(config), 1000, 7, -1);
  }
  CHECK(contains(resolve_error(tokenizer_config("")), "GPT2BPETokenizer"));
}

TEST_CASE("a GPT-2 vocabulary gives its size and end-of-text id", "[cpu]") {
  const TemporaryFolder folder;
  const std::string path = folder / "vocab.json";
  write_text(path, R"({"a": 0, "b": 1, "<|endoftext|>": 2, "c": 3})");
  config::Config config = tokenizer_config("GPT2BPETokenizer", path);
  check_facts(resolve_tokenizer(config), 4, 2, -1);
  config.model.vocab_size = 5;
  CHECK(contains(resolve_error(config), "--vocab-size 5 contradicts " + path));
  config.model.vocab_size = 4;
  config.data.eod_id = 3;
  CHECK(contains(resolve_error(config), "--null-tokenizer-eod-id 3 contradicts"));
  config = tokenizer_config("GPT2BPETokenizer", path);
  write_text(path, R"({"a": 0, "b": 1})");
  check_facts(resolve_tokenizer(config), 3, 2, -1);
  write_text(path, R"({"a": "zero"})");
  CHECK(contains(resolve_error(config), "the id of 'a'"));
  write_text(path, "{");
  CHECK(contains(resolve_error(config), "not valid JSON"));
}

TEST_CASE("a Hugging Face folder gives its size, EOS and pad", "[cpu]") {
  const TemporaryFolder folder;
  const config::Config config = tokenizer_config("HuggingFaceTokenizer", folder.path());
  CHECK(contains(resolve_error(config), "holds none of tokenizer.json"));
  write_text(folder / "tokenizer.json",
             R"({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "</s>": 2}},
                 "added_tokens": [{"id": 2, "content": "</s>"}, {"id": 3, "content": "<pad>"}]})");
  check_facts(resolve_tokenizer(config), 4, -1, -1);
  write_text(folder / "tokenizer_config.json", R"({"eos_token": {"content": "</s>"}, "pad_token": "<pad>"})");
  check_facts(resolve_tokenizer(config), 4, 2, 3);
  write_text(folder / "tokenizer_config.json",
             R"({"pad_token": null, "added_tokens_decoder": {"4": {"content": "<x>"}, "2": {"content": "</s>"}}})");
  write_text(folder / "special_tokens_map.json", R"({"eos_token": "<x>"})");
  check_facts(resolve_tokenizer(config), 5, 4, -1);
  write_text(folder / "tokenizer.json", R"({"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["</s>", -1.5]]}})");
  write_text(folder / "tokenizer_config.json", R"({"eos_token": "</s>"})");
  check_facts(resolve_tokenizer(config), 2, 1, -1);
  std::filesystem::remove(folder / "tokenizer.json");
  write_text(folder / "vocab.json", R"({"a": 0, "</s>": 1})");
  write_text(folder / "added_tokens.json", R"({"<pad>": 2})");
  check_facts(resolve_tokenizer(config), 3, 1, -1);
  std::filesystem::remove(folder / "vocab.json");
  std::filesystem::remove(folder / "special_tokens_map.json");
  std::filesystem::remove(folder / "tokenizer_config.json");
  write_text(folder / "tokenizer.model", piece("<unk>", 2) + piece("</s>", 3) + piece("x"));
  write_text(folder / "added_tokens.json", R"({"<pad>": 3})");
  check_facts(resolve_tokenizer(config), 4, 1, -1);
  CHECK(
      contains(resolve_error(tokenizer_config("HuggingFaceTokenizer", folder / "tokenizer.model")), "is not a folder"));
}

TEST_CASE("a SentencePiece model gives its pieces, EOS and pad", "[cpu]") {
  const TemporaryFolder folder;
  const std::string path = folder / "tokenizer.model";
  const std::string pieces = piece("<unk>", 2) + piece("<s>", 3) + piece("</s>", 3) + piece("a") + piece("b");
  for (const std::string type : {"SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"}) {
    write_text(path, pieces);
    check_facts(resolve_tokenizer(tokenizer_config(type, path)), 5, 2, -1);
  }
  // Named differently in the trainer specification, after an unrelated varint and a 64-bit field.
  const std::string spec = bytes_field(2, varint(4 << 3) + varint(32000) + varint(9 << 3 | 1) + std::string(8, '\1') +
                                              bytes_field(47, "<end>") + bytes_field(48, "<fill>"));
  write_text(path, pieces + piece("<end>", 3) + piece("<fill>", 3) + spec);
  check_facts(resolve_tokenizer(tokenizer_config("Llama2Tokenizer", path)), 7, 5, 6);
  // "</s>" as ordinary text is no end-of-text token.
  write_text(path, piece("<unk>", 2) + piece("</s>"));
  check_facts(resolve_tokenizer(tokenizer_config("Llama2Tokenizer", path)), 2, -1, -1);
  const std::string good = pieces + spec;
  std::size_t refused = 0;
  for (std::size_t size = 0; size < good.size(); ++size) {
    write_text(path, good.substr(0, size));
    refused += contains(error_of<ConfigError>([&] { (void)read_sentencepiece_model(path); }), path) ? 1 : 0;
  }
  CHECK(refused >= good.size() - 6);  // a cut between two of the six top-level fields is a valid, shorter model
  write_text(path, "not a model");
  CHECK(contains(error_of<ConfigError>([&] { (void)read_sentencepiece_model(path); }), "not a SentencePiece model"));
}

TEST_CASE("a tik file must hold the vocabulary asked for", "[cpu]") {
  const TemporaryFolder folder;
  json tokens = json::array();
  for (int i = 0; i < 300; ++i) tokens.push_back({{"rank", i}, {"token_bytes", "AA=="}, {"token_str", ""}});
  write_text(folder / "tik.json", tokens.dump());
  config::Config config = tokenizer_config("TikTokenizer", folder / "tik.json");
  CHECK(contains(resolve_error(config), "less than the vocabulary of 131072; give --vocab-size 1300"));
  config.model.vocab_size = 1200;
  check_facts(resolve_tokenizer(config), 1200, 2, 4);
  config.model.vocab_size = 1000;
  CHECK(contains(resolve_error(config), "--tiktoken-num-special-tokens 1000"));
}

TEST_CASE("NullTokenizer reads integers separated by single blanks", "[cpu]") {
  CHECK(null_tokenize("1 20 127", 128) == std::vector<std::int64_t>{1, 20, 127});
  for (const std::string bad : {"", "1  2", " 1", "1 ", "a", "1 2x", "1.5"}) {
    CHECK(contains(error_of<DataError>([&] { (void)null_tokenize(bad, 128); }), "is not an integer"));
  }
  for (const std::string bad : {"128", "-1", "1 65536"}) {
    CHECK(contains(error_of<DataError>([&] { (void)null_tokenize(bad, 128); }), "does not lie in [0, 128)"));
  }
}

TEST_CASE("preprocessing gives the reference's files byte for byte", "[cpu]") {
  const json expected = golden("preprocess.json");
  const TemporaryFolder folder;
  std::string input;
  for (const auto& line : expected["input_jsonl_lines"]) input += line.get<std::string>() + "\n";
  write_text(folder / "in.jsonl", input);
  REQUIRE(expected["runs"].size() == 4);
  for (const auto& run : expected["runs"]) {
    const std::string arguments = run["arguments"];
    INFO(arguments);
    PreprocessOptions options = preprocess_options(folder / "in.jsonl", folder / "o");
    options.vocab_size = contains(arguments, "--vocab-size 100000") ? 100000 : 128;
    options.append_eod = contains(arguments, "--append-eod");
    options.eod = options.vocab_size - 1;
    options.partitions = contains(arguments, "--partitions 2") ? 2 : 1;
    const PreprocessResult result = preprocess_jsonl(options, null_ids(options.vocab_size));
    CHECK(result.documents == 3);
    CHECK(result.input_bytes == static_cast<std::int64_t>(input.size()));
    REQUIRE(result.pairs.size() == 1);
    CHECK(result.pairs[0].sequences == 3);
    CHECK(result.tokens() == 7 + (options.append_eod ? 3 : 0));
    for (const auto& [name, hex_text] : run["files"].items()) {
      std::string hex;
      for (const char c : read_text(folder / name)) {
        hex += "0123456789abcdef"[static_cast<unsigned char>(c) >> 4];
        hex += "0123456789abcdef"[static_cast<unsigned char>(c) & 15];
      }
      CHECK(hex == hex_text.get<std::string>());
    }
  }
  // Contiguous partitions keep the order.
  PreprocessOptions options = preprocess_options(folder / "in.jsonl", folder / "sequential");
  options.partitions = 2;
  options.keep_sequential_samples = true;
  (void)preprocess_jsonl(options, null_ids(128));
  options = preprocess_options(folder / "in.jsonl", folder / "plain");
  (void)preprocess_jsonl(options, null_ids(128));
  CHECK(read_text(folder / "sequential_text_document.bin") == read_text(folder / "plain_text_document.bin"));
}

TEST_CASE("lists of texts become one document of several sequences, and several keys several files", "[cpu]") {
  const TemporaryFolder folder;
  write_text(folder / "in.jsonl",
             "{\"text\": [\"1 2\", \"3\"], \"other\": \"9\"}\n{\"text\": [], \"other\": \"8 7\"}\n");
  PreprocessOptions options = preprocess_options(folder / "in.jsonl", folder / "o");
  options.keys = {"text", "other"};
  options.append_eod = true;
  options.eod = 127;
  const PreprocessResult result = preprocess_jsonl(options, null_ids(128));
  REQUIRE(result.pairs.size() == 2);
  CHECK(result.pairs[0].prefix == folder / "o_text_document");
  CHECK(result.pairs[1].prefix == folder / "o_other_document");
  CHECK(result.pairs[0].tokens == 4);
  CHECK(result.pairs[1].tokens == 5);
  CHECK(result.tokens() == 9);
  const IndexedDataset text(result.pairs[0].prefix);
  CHECK(text.size() == 2);
  CHECK(text.length(0) == 2);
  CHECK(text.length(1) == 2);  // 3 and EOD
  CHECK(text.boundaries() == 3);
  CHECK(text.boundary(1) == 2);
  CHECK(text.boundary(2) == 2);  // the empty document
  CHECK(IndexedDataset(result.pairs[1].prefix).length(1) == 3);
}

TEST_CASE("preprocessing errors name file and line and leave nothing behind", "[cpu]") {
  const TemporaryFolder folder;
  const std::string input = folder / "in.jsonl";
  const auto message = [&](const std::string& second_line) {
    write_text(input, "{\"text\": \"1 2\"}\n" + second_line + "\n");
    const std::string text =
        error_of([&] { (void)preprocess_jsonl(preprocess_options(input, folder / "o"), null_ids(128)); });
    CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), std::filesystem::directory_iterator()) ==
          1);
    return text;
  };
  for (const std::string line :
       {"", "{", "[1]", "{\"other\": \"1\"}", "{\"text\": 5}", "{\"text\": [5]}", "{\"text\": \"x\"}",
        "{\"text\": \"500\"}", "{\"text\": \"-1\"}", "{\"text\": \"\"}"}) {
    INFO(line);
    CHECK(contains(message(line), input + " line 2: "));
  }
  CHECK(contains(message("{\"other\": \"1\"}"), "no key 'text'"));
  CHECK(contains(message("{\"text\": \"500\"}"), "500 does not lie in [0, 128)"));
  CHECK(contains(
      error_of([&] { (void)preprocess_jsonl(preprocess_options(folder / "no", folder / "o"), null_ids(128)); }),
      "cannot open"));
  PreprocessOptions options = preprocess_options(input, folder / "o");
  options.append_eod = true;
  CHECK(contains(error_of<ConfigError>([&] { (void)preprocess_jsonl(options, null_ids(128)); }), "--append-eod"));
}

TEST_CASE("workers and the cut into files do not change what preprocessing writes", "[cpu]") {
  const TemporaryFolder folder;
  // More than one batch for one worker (8192 lines) and for three.
  constexpr int kLines = 30000;
  std::vector<std::string> lines;
  for (int i = 0; i < kLines; ++i) {
    std::string text = std::to_string(i % 1000);
    for (int j = 0; j < i % 7; ++j) text += ' ' + std::to_string((i * 31 + j) % 1000);
    lines.push_back("{\"text\": \"" + text + "\"}\n");
  }
  std::string whole;
  std::string first;
  std::string second;
  for (int i = 0; i < kLines; ++i) {
    whole += lines[static_cast<std::size_t>(i)];
    (i < 12345 ? first : second) += lines[static_cast<std::size_t>(i)];
  }
  write_text(folder / "whole.jsonl", whole);
  write_text(folder / "1.jsonl", first);
  write_text(folder / "2.jsonl", second);
  for (const std::int64_t partitions : {1, 3}) {
    PreprocessOptions options = preprocess_options(folder / "whole.jsonl", folder / "one");
    options.vocab_size = 1000;
    options.partitions = partitions;
    std::vector<std::int64_t> reports;
    (void)preprocess_jsonl(options, null_ids(1000), [&](const auto& result) { reports.push_back(result.documents); });
    CHECK(reports.size() > 3);
    CHECK(std::is_sorted(reports.begin(), reports.end()));
    CHECK(reports.back() == kLines);
    // Line i stands at its place among those with the same remainder, after all of smaller remainders.
    const IndexedDataset written(folder / "one_text_document");
    REQUIRE(written.size() == kLines);
    std::int64_t at = 0;
    for (std::int64_t part = 0; part < partitions; ++part) {
      for (std::int64_t i = part; i < kLines; i += partitions, ++at) {
        std::int64_t id = -1;
        written.read(at, 0, 1, &id);
        if (id != i % 1000 || written.length(at) != i % 7 + 1) FAIL("document " << at << " is not line " << i);
      }
    }
    options.inputs = {folder / "1.jsonl", folder / "2.jsonl"};
    options.output_prefix = folder / "three";
    options.workers = 3;
    CHECK(preprocess_jsonl(options, null_ids(1000)).documents == kLines);
    for (const char* file : {"_text_document.bin", "_text_document.idx"}) {
      CHECK(read_text(folder / (std::string("three") + file)) == read_text(folder / (std::string("one") + file)));
    }
  }
  // Whichever worker fails first, the first wrong line is named.
  std::string wrong = whole;
  wrong += "{\"text\": \"1000\"}\n{\n";
  write_text(folder / "wrong.jsonl", wrong);
  PreprocessOptions options = preprocess_options(folder / "wrong.jsonl", folder / "wrong");
  options.vocab_size = 1000;
  options.workers = 3;
  CHECK(
      contains(error_of([&] { (void)preprocess_jsonl(options, null_ids(1000)); }), "wrong.jsonl line 30001: token id"));
}

TEST_CASE("a preprocessing run that fails leaves the files of an earlier one alone", "[cpu]") {
  const TemporaryFolder folder;
  write_text(folder / "good.jsonl", "{\"text\": \"1 2\", \"other\": \"3\"}\n");
  write_text(folder / "bad.jsonl", "{\"text\": \"4\", \"other\": \"5\"}\n{\"text\": \"4\", \"other\": \"x\"}\n");
  write_text(folder / "empty.jsonl", "");
  PreprocessOptions options = preprocess_options(folder / "good.jsonl", folder / "o");
  options.keys = {"text", "other"};
  (void)preprocess_jsonl(options, null_ids(128));
  const auto contents = [&] {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
      files[entry.path().filename()] = read_text(entry.path());
    }
    return files;
  };
  const auto before = contents();
  REQUIRE(before.size() == 3 + 4);
  const auto stop = [](const PreprocessResult&) { throw DataError("stopped"); };
  CHECK(contains(error_of([&] { (void)preprocess_jsonl(options, null_ids(128), stop); }), "stopped"));
  options.inputs = {folder / "bad.jsonl"};
  CHECK(contains(error_of([&] { (void)preprocess_jsonl(options, null_ids(128)); }), "bad.jsonl line 2: 'x' is not"));
  options.inputs = {folder / "empty.jsonl"};
  CHECK(contains(error_of([&] { (void)preprocess_jsonl(options, null_ids(128)); }), "no token goes into"));
  options.inputs = {folder.path()};
  CHECK(contains(error_of([&] { (void)preprocess_jsonl(options, null_ids(128)); }), " is a folder; name a file in it"));
  options.inputs = {folder / "good.jsonl"};
  options.keys = {"text", "text"};
  CHECK(contains(error_of([&] { (void)preprocess_jsonl(options, null_ids(128)); }), "names a key twice"));
  options.keys = {"text"};
  options.workers = 0;
  CHECK(contains(error_of([&] { (void)preprocess_jsonl(options, null_ids(128)); }), "--workers 0"));
  CHECK(contents() == before);
}

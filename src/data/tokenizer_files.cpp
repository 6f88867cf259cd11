#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "file_util.h"
#include "pgpt/base/error.h"
#include "pgpt/data/tokenizer.h"

namespace pgpt::data {
namespace {

using nlohmann::json;

constexpr std::int64_t kTikDefaultVocab = std::int64_t{1} << 17;
// The reference's special tokens start with <unk> <s> </s> <mask> <pad> <cls> <sep>.
constexpr std::int64_t kTikEod = 2;
constexpr std::int64_t kTikPad = 4;
constexpr std::int64_t kTikNamedTokens = 7;

json parse_json(const std::string& path) {
  try {
    return json::parse(read_file(path));
  } catch (const json::exception& problem) {
    throw ConfigError(concat(path, " is not valid JSON: ", problem.what()));
  }
}

std::int64_t id_of(const json& value, const std::string& path, const std::string& token) {
  PGPT_CHECK(ConfigError, value.is_number_integer(), path, ": the id of '", token, "' is not an integer");
  return value.get<std::int64_t>();
}

void add_object(const json& object, const std::string& path, std::map<std::string, std::int64_t>& ids) {
  PGPT_CHECK(ConfigError, object.is_object(), path, ": expected an object of token ids");
  for (const auto& [token, id] : object.items()) ids[token] = id_of(id, path, token);
}

/// Name of a special token, which configurations write as a string or as an object with "content".
std::string special_token(const json& settings, const char* key) {
  if (!settings.is_object() || !settings.contains(key)) return "";
  const json& value = settings.at(key);
  if (value.is_string()) return value.get<std::string>();
  if (value.is_object() && value.contains("content") && value.at("content").is_string()) {
    return value.at("content").get<std::string>();
  }
  return "";
}

/// Reads protobuf messages field by field; only what SentencePiece models need.
class ProtoReader {
 public:
  ProtoReader(std::string_view bytes, const std::string& path) : bytes_(bytes), path_(path) {}

  /// Advances to the next field; false at the end.
  bool next() {
    if (at_ == bytes_.size()) return false;
    const std::uint64_t key = varint();
    field_ = key >> 3;
    text_ = {};
    number_ = 0;
    switch (key & 7U) {
      case 0:
        number_ = varint();
        break;
      case 1:
        text_ = take(8);
        break;
      case 2:
        text_ = take(varint());
        break;
      case 5:
        text_ = take(4);
        break;
      default:
        fail();
    }
    return true;
  }
  [[nodiscard]] std::uint64_t field() const { return field_; }
  [[nodiscard]] std::uint64_t number() const { return number_; }
  [[nodiscard]] std::string_view text() const { return text_; }

 private:
  [[noreturn]] void fail() const {
    throw ConfigError(concat(path_, " is not a SentencePiece model (damaged at byte ", at_, ")"));
  }

  std::string_view take(std::uint64_t size) {
    if (size > bytes_.size() - at_) fail();
    const std::string_view taken = bytes_.substr(at_, size);
    at_ += size;
    return taken;
  }

  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      if (at_ == bytes_.size()) fail();
      const auto byte = static_cast<unsigned char>(bytes_[at_++]);
      value |= static_cast<std::uint64_t>(byte & 0x7FU) << shift;
      if ((byte & 0x80U) == 0) return value;
    }
    fail();
  }

  std::string_view bytes_;
  const std::string& path_;
  std::size_t at_ = 0;
  std::uint64_t field_ = 0;
  std::uint64_t number_ = 0;
  std::string_view text_;
};

}  // namespace

TokenizerFileFacts read_gpt2_vocab(const std::string& path) {
  std::map<std::string, std::int64_t> ids;
  add_object(parse_json(path), path, ids);
  TokenizerFileFacts facts;
  // A vocabulary without the end-of-text token gets it appended.
  const auto eod = ids.emplace("<|endoftext|>", static_cast<std::int64_t>(ids.size())).first;
  facts.eod = eod->second;
  facts.vocab_size = static_cast<std::int64_t>(ids.size());
  return facts;
}

TokenizerFileFacts read_huggingface_folder(const std::string& path) {
  namespace fs = std::filesystem;
  PGPT_CHECK(ConfigError, fs::is_directory(path), "--tokenizer-model ", path,
             " is not a folder; HuggingFaceTokenizer needs a local folder with tokenizer.json, or add --vocab-size");
  const auto file = [&path](const char* name) { return (fs::path(path) / name).string(); };
  const auto optional_json = [&](const char* name) { return fs::exists(file(name)) ? parse_json(file(name)) : json(); };

  std::map<std::string, std::int64_t> ids;
  TokenizerFileFacts model_facts;
  std::int64_t base = 0;
  if (fs::exists(file("tokenizer.json"))) {
    const std::string name = file("tokenizer.json");
    const json tokenizer = parse_json(name);
    PGPT_CHECK(ConfigError,
               tokenizer.is_object() && tokenizer.contains("model") && tokenizer["model"].is_object() &&
                   tokenizer["model"].contains("vocab"),
               name, " has no model.vocab");
    const json& vocab = tokenizer["model"]["vocab"];
    if (vocab.is_array()) {
      // Unigram models list [piece, score] pairs; the position is the id.
      for (std::size_t i = 0; i < vocab.size(); ++i) {
        PGPT_CHECK(ConfigError, vocab[i].is_array() && !vocab[i].empty() && vocab[i][0].is_string(), name, ": entry ",
                   i, " of model.vocab is not a [piece, score] pair");
        ids[vocab[i][0].get<std::string>()] = static_cast<std::int64_t>(i);
      }
    } else {
      add_object(vocab, name, ids);
    }
    for (const json& token : tokenizer.value("added_tokens", json::array())) {
      PGPT_CHECK(ConfigError, token.is_object() && token.contains("id") && token.contains("content"), name,
                 ": an entry of added_tokens has no id or content");
      const auto content = token["content"].get<std::string>();
      ids[content] = id_of(token["id"], name, content);
    }
  } else if (fs::exists(file("vocab.json"))) {
    add_object(parse_json(file("vocab.json")), file("vocab.json"), ids);
  } else if (fs::exists(file("tokenizer.model"))) {
    model_facts = read_sentencepiece_model(file("tokenizer.model"));
    base = model_facts.vocab_size;
  } else {
    throw ConfigError(concat("--tokenizer-model ", path,
                             " holds none of tokenizer.json, vocab.json and tokenizer.model; add --vocab-size"));
  }
  if (const json added = optional_json("added_tokens.json"); added.is_object()) {
    add_object(added, file("added_tokens.json"), ids);
  }
  const json settings = optional_json("tokenizer_config.json");
  if (settings.is_object() && settings.contains("added_tokens_decoder")) {
    for (const auto& [id, token] : settings["added_tokens_decoder"].items()) {
      const std::string content = special_token(json{{"token", token}}, "token");
      if (content.empty() || id.find_first_not_of("0123456789") != std::string::npos || id.size() > 12) continue;
      const std::int64_t value = std::stoll(id);
      if (value >= base) ids[content] = value;
    }
  }
  const json map = optional_json("special_tokens_map.json");
  const auto find = [&](const char* key, std::int64_t fallback) {
    std::string token = special_token(settings, key);
    if (token.empty()) token = special_token(map, key);
    const auto found = ids.find(token);
    return found == ids.end() ? fallback : found->second;
  };
  TokenizerFileFacts facts;
  std::int64_t added = 0;
  for (const auto& [token, id] : ids) added += id >= base ? 1 : 0;
  facts.vocab_size = base + added;
  facts.eod = find("eos_token", model_facts.eod);
  facts.pad = find("pad_token", model_facts.pad);
  return facts;
}

TokenizerFileFacts read_sentencepiece_model(const std::string& path) {
  // Field numbers of sentencepiece's ModelProto, SentencePiece and TrainerSpec messages.
  constexpr std::uint64_t kPieces = 1, kTrainerSpec = 2, kPieceText = 1, kPieceType = 3, kEosPiece = 47, kPadPiece = 48;
  constexpr std::uint64_t kControl = 3;
  const std::string bytes = read_file(path);
  std::map<std::string, std::int64_t, std::less<>> controls;
  std::string eos = "</s>";
  std::string pad = "<pad>";
  std::int64_t count = 0;
  for (ProtoReader model(bytes, path); model.next();) {
    if (model.field() == kPieces) {
      std::string_view text;
      std::uint64_t type = 1;
      for (ProtoReader piece(model.text(), path); piece.next();) {
        if (piece.field() == kPieceText) text = piece.text();
        if (piece.field() == kPieceType) type = piece.number();
      }
      if (type == kControl) controls.emplace(text, count);
      ++count;
    } else if (model.field() == kTrainerSpec) {
      for (ProtoReader spec(model.text(), path); spec.next();) {
        if (spec.field() == kEosPiece) eos = spec.text();
        if (spec.field() == kPadPiece) pad = spec.text();
      }
    }
  }
  PGPT_CHECK(ConfigError, count > 0, path, " is not a SentencePiece model (it holds no pieces)");
  const auto find = [&controls](const std::string& piece) {
    const auto found = controls.find(piece);
    return found == controls.end() ? std::int64_t{-1} : found->second;
  };
  return {count, find(eos), find(pad)};
}

TokenizerFileFacts read_tiktoken_json(const std::string& path, std::int64_t special_tokens, std::int64_t vocab_size) {
  const json tokens = parse_json(path);
  PGPT_CHECK(ConfigError, tokens.is_array(), path, " is not a list of ranked tokens");
  const std::int64_t size = vocab_size > 0 ? vocab_size : kTikDefaultVocab;
  PGPT_CHECK(ConfigError, special_tokens >= kTikNamedTokens && special_tokens < size, "--tiktoken-num-special-tokens ",
             special_tokens, " must lie between ", kTikNamedTokens, " and the vocabulary size ", size);
  const auto ranked = static_cast<std::int64_t>(tokens.size());
  PGPT_CHECK(ConfigError, ranked + special_tokens >= size, path, " holds ", ranked, " tokens; with ", special_tokens,
             " special ones that is less than the vocabulary of ", size, "; give --vocab-size ",
             ranked + special_tokens, " or less");
  return {size, kTikEod, kTikPad};
}

}  // namespace pgpt::data

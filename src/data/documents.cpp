#include "pgpt/data/documents.h"

#include "pgpt/base/error.h"
#include "pgpt/data/random.h"

namespace pgpt::data {

MockDocuments::MockDocuments(std::int64_t vocab_size, std::int64_t eod) : vocab_size_(vocab_size), eod_(eod) {
  PGPT_CHECK(ConfigError, vocab_size > 0, "--mock-data needs a vocabulary; add --vocab-size");
  PGPT_CHECK(ConfigError, eod >= 0,
             "--mock-data ends its documents with EOD, which is unknown; add --null-tokenizer-eod-id");
  NumpyGenerator generator(0);
  lengths_.reserve(kCount);
  for (std::int64_t i = 0; i < kCount; ++i) lengths_.push_back(static_cast<std::int32_t>(generator.integer(1, 4096)));
}

void MockDocuments::read(std::int64_t i, std::int64_t offset, std::int64_t count, std::int64_t* out) const {
  const std::int64_t last = length(i) - 1;
  for (std::int64_t j = offset; j < offset + count; ++j) *out++ = j < last ? (j + 1) % vocab_size_ : eod_;
}

}  // namespace pgpt::data

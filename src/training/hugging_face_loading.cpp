#include "pgpt/training/hugging_face_loading.h"

#include <ATen/ATen.h>

#include "pgpt/base/error.h"
#include "pgpt/checkpoint/architecture.h"
#include "pgpt/checkpoint/hugging_face.h"

namespace pgpt::training {

void load_hugging_face(const config::Config& config, parameter::ParameterStore& store, optim::Optimizer& optimizer) {
  const std::string& folder = config.checkpoint.load_hf;
  const config::ModelConfig& mine = config.model;
  const checkpoint::HfConfig source = checkpoint::read_hf_config(folder);
  const std::string where = folder + "/config.json";
  // A tokenizer may have fewer tokens than the table has rows; more rows than this run keeps would be lost.
  const std::int64_t vocab_size = source.model.vocab_size;
  PGPT_CHECK(
      ConfigError, vocab_size >= mine.vocab_size && vocab_size <= mine.padded_vocab_size,
      "--load-hf: this run has a vocabulary of ", mine.vocab_size, " in ", mine.padded_vocab_size, " rows, ", where,
      " has vocab_size ", vocab_size,
      "; give a tokenizer or --vocab-size of as many tokens, or --make-vocab-size-divisible-by to keep more rows");
  config::ModelConfig theirs = source.model;
  theirs.vocab_size = mine.vocab_size;
  checkpoint::check_same_architecture(mine, theirs, where);
  const bool table = mine.position_embedding == config::PositionEmbedding::kLearnedAbsolute;
  PGPT_CHECK(ConfigError, !table || mine.max_position_embeddings == theirs.max_position_embeddings,
             "--max-position-embeddings is ", mine.max_position_embeddings, ", ", where, " has n_positions ",
             theirs.max_position_embeddings, "; give the same");
  PGPT_CHECK(ConfigError, mine.seq_length <= source.sliding_window.value_or(mine.seq_length), "--seq-length is ",
             mine.seq_length, ", ", where, " has sliding_window ", source.sliding_window.value_or(0),
             "; attention here sees the whole sequence, so it must not be longer");

  const checkpoint::HfWeights weights(folder);
  const std::vector<checkpoint::HfLink> links = checkpoint::hf_links(source.family, mine, vocab_size);
  weights.check(links, source.family, mine);
  PGPT_ASSERT(links.size() == store.parameters().size(), "--load-hf knows ", links.size(), " of ",
              store.parameters().size(), " parameters");
  for (const checkpoint::HfLink& link : links) {
    const parameter::Parameter& parameter = store.find(link.native);
    PGPT_ASSERT(parameter.layout.logical_shape == link.native_shape, link.native);
    const at::Tensor whole = weights.read_native(link, mine);
    const parameter::ShardLayout::Range rows = parameter.layout.local_range(0);
    parameter.weight.zero_();
    if (rows.end > rows.begin)
      parameter.weight.narrow(0, 0, rows.end - rows.begin).copy_(whole.narrow(0, rows.begin, rows.end - rows.begin));
  }
  optimizer.reset_masters();
}

}  // namespace pgpt::training

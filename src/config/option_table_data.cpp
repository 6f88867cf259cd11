// Rows of the groups "Data and tokenizer" and "Validation".
#include "rows.h"

namespace pgpt::config::rows {

namespace {
constexpr auto kText = "no text is tokenised during training";
constexpr auto kObjectStorage = "data are read from files; copy them first";
constexpr auto kBert = "it belongs to BERT-type data";
constexpr auto kFim = "fill-in-the-middle data are not implemented";
}  // namespace

Rows data_rows() {
  return {
      on("--mock-data", "Synthetic samples."),
      place("--data-path",
            "Prefix of .bin/.idx files; weight prefix pairs, or several prefixes, only in dry runs for now.")
          .any_number(),
      text("--split", kNone, "Weights of train,valid,test within --data-path; default 969, 30, 1."),
      place("--train-data-path", "Training data, instead of --data-path; only in dry runs for now.").any_number(),
      place("--valid-data-path", "Validation data.").any_number(),
      place("--test-data-path", "Test data.").any_number(),
      place("--data-args-path", "File that holds the words of --data-path."),
      place("--per-split-data-args-path",
            "JSON file with the data paths of train, valid and test; only in dry runs for now."),
      text("--per-dataset-sequences-path", kNone, "JSON of sequence counts.")
          .no_effect("counts come from the .idx files"),
      place("--data-cache-path", "Folder for index files."),
      off_pair("--no-mmap-bin-files", "Read .bin files instead of mapping them."),
      integer("--seq-length", kNone, "Tokens of a sample; required.").taken(Taken::kIfUnset),
      integer("--encoder-seq-length", kNone, "Older name of --seq-length; give only one of them."),
      integer("--decoder-seq-length", kNone, "Encoder-decoder models.").refused("use --seq-length"),
      integer("--num-workers", "2", "Loader threads; 0 = none."),
      choice("--dataloader-type", kNone, "single|cyclic|external", "Sequential (default) or shuffled every epoch.")
          .refuse("external", "use single or cyclic"),
      off_pair("--no-data-sharding", "The cyclic loader shuffles over all ranks."),
      on("--reset-position-ids", "Positions restart after each document."),
      on("--reset-attention-mask", "Attention stays within a document, up to its end-of-document token."),
      on("--eod-mask-loss", "No loss on end-of-document tokens."),
      off_pair("--no-create-attention-mask-in-dataloader", "Ignore --reset-attention-mask."),
      on("--dataloader-inter-document-masking",
         "Attention stays within a document as stored, and positions restart in each."),
      integer("--num-dataset-builder-threads", "1", "Threads that build indices; above 0.")
          .no_effect("indices are built by one thread; their content is the same"),
      real("--mid-level-dataset-surplus", "0.005", "Extra samples of each blended data set."),
      on("--allow-ambiguous-pad-tokens", "Pad and end of document may be one token."),
      on("--dataloader-fast-cache-load", "Skip checks of the index cache.").no_effect("the cache is always checked"),
      on("--dataloader-defer-npy-index-mmap", "Later mapping of the index.").no_effect("the index is mapped once"),
      text("--object-storage-cache-path", kNone, "Cache of object storage.").refused(kObjectStorage),
      on("--enable-msc", "Object storage client.").refused(kObjectStorage),
      on("--disable-msc", "No object storage client.").no_effect("there is none"),
      on("--fim-data", "Fill in the middle.").refused(kFim),
      text("--fim-*", kNone, "Fill in the middle.").refused(kFim),
      real("--sample-rate", "1.0", "BERT-type data.").no_effect(kBert),
      real("--mask-prob", "0.15", "BERT-type data.").no_effect(kBert),
      real("--short-seq-prob", "0.1", "BERT-type data.").no_effect(kBert),
      choice(
          "--tokenizer-type", kNone,
          "BertWordPieceLowerCase|BertWordPieceCase|GPT2BPETokenizer|SentencePieceTokenizer|GPTSentencePieceTokenizer|"
          "HuggingFaceTokenizer|Llama2Tokenizer|TikTokenizer|NullTokenizer|MultimodalTokenizer|NullMultimodalTokenizer|"
          "SFTTokenizer",
          "Tokenizer of the data; gives vocabulary size, end-of-document and pad ids. Default GPT2BPETokenizer.")
          .taken(Taken::kAlways)
          .refuse("MultimodalTokenizer|NullMultimodalTokenizer|SFTTokenizer", "only text pretraining data are read"),
      place("--tokenizer-model", "File or folder of the tokenizer.").taken(Taken::kWithTokenizer),
      place("--vocab-file", "vocab.json of GPT-2 BPE."),
      place("--merge-file", "merges.txt of GPT-2 BPE."),
      integer("--vocab-extra-ids", "0", "Additional sentinel tokens."),
      text("--tokenizer-metadata", kNone, "Tokenizer metadata.").no_effect(kText),
      text("--tokenizer-special-tokens", kNone, "Additional special tokens.")
          .list()
          .refused("give the final size with --vocab-size"),
      text("--chat-template", kNone, "Chat format.").no_effect(kText),
      choice("--tiktoken-pattern", kNone, "v1|v2", "Pattern of TikTokenizer.")
          .taken(Taken::kWithTokenizer)
          .no_effect(kText),
      integer("--tiktoken-num-special-tokens", "1000", "Special tokens of TikTokenizer."),
      on("--tokenizer-sentencepiece-legacy", "SentencePiece detail.").no_effect(kText),
      off("--no-tokenizer-sentencepiece-ignore-extra-whitespaces", "SentencePiece detail.").no_effect(kText),
      on("--tokenizer-hf-no-use-fast", "Hugging Face detail.").no_effect(kText),
      on("--tokenizer-hf-no-include-special-tokens", "Hugging Face detail.").no_effect(kText),
      on("--trust-remote-code", "Run code of the tokenizer.").no_effect("no such code is ever run"),
      integer("--null-tokenizer-eod-id", kNone, "End-of-document id; default vocabulary - 1 with NullTokenizer."),
      integer("--null-tokenizer-pad-id", "-1", "Pad id; -1 = none."),
  };
}

Rows validation_rows() {
  return {
      integer("--eval-interval", kNone, "Evaluate every n iterations; not given = never during training."),
      integer("--eval-iters", "100", "Batches of an evaluation; 0 = no validation and no test."),
      integer("--start-eval-at-iter", kNone, "First iteration that may evaluate."),
      integer("--eval-global-batch-size", kNone, "Samples of an evaluation batch; default --global-batch-size."),
      integer("--eval-micro-batch-size", kNone, "Samples of a forward pass; default --micro-batch-size."),
      on("--skip-train", "Evaluate only."),
      on("--full-validation", "Use the whole validation set each time."),
      on("--multiple-validation-sets", "Several validation losses.").refused("give one validation set"),
      text("--validation-set-names", kNone, "Names of validation sets.").list().refused("give one validation set"),
      on("--test-mode", "Internal tests.").no_effect("it changes no numbers"),
  };
}

}  // namespace pgpt::config::rows

"""gpt_tool preprocess seen from Python: an independent reader of .bin/.idx finds what went in, and text becomes data by
scripts/text_to_ids.py.

The second needs the `transformers` package; without it those tests are skipped (scripts/setup.sh --with-tests
installs it).
"""

import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest
from pydoc_data import topics

from conversion_support import step_losses, tool, train

try:
    import tokenizers
    import transformers
except ImportError:
    transformers = None

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "text_to_ids.py"
FORMATS = {8: "H", 4: "i"}  # the token types that preprocessing writes


def read_documents(prefix):
    """All documents of a pair of files, each a list of sequences, and the type code; by the format's description."""
    index = pathlib.Path(f"{prefix}.idx").read_bytes()
    tokens = pathlib.Path(f"{prefix}.bin").read_bytes()
    magic, version, code, sequences, boundaries = struct.unpack_from("<9sQBQQ", index)
    assert magic == b"MMIDIDX\0\0" and version == 1, (magic, version)
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    offsets = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    ends = struct.unpack_from(f"<{boundaries}q", index, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * boundaries
    read = [list(struct.unpack_from(f"<{n}{FORMATS[code]}", tokens, at)) for n, at in zip(lengths, offsets)]
    assert sum(lengths) * struct.calcsize(FORMATS[code]) == len(tokens)
    return [read[begin:end] for begin, end in zip(ends, ends[1:])], code


def small_tokenizer(texts, folder, **special_tokens):
    """A byte-level BPE tokenizer of 600 entries, as a Hugging Face folder."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=list(special_tokens.values()),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, **special_tokens)
    tokenizer.save_pretrained(folder)
    return tokenizer


def text_to_ids(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ, HF_HUB_OFFLINE="1"),
    )


class Preprocess(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def write_lines(self, name, records):
        path = self.folder / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    def test_another_reader_finds_the_documents(self):
        for vocabulary, code in ((65499, 8), (65500, 4), (1_000_000, 4)):
            last = vocabulary - 1  # also the end of a document
            records = [
                {"a": "1 2 3", "b": [str(last), "4 5"]},
                {"a": ["7"], "b": []},
                {"a": [], "b": "\u0036 6", "c": {"ignored": None}},
            ]
            source = self.write_lines("in.jsonl", records)
            flags = f"--tokenizer-type NullTokenizer --vocab-size {vocabulary} --append-eod --json-keys a b"
            done = tool(["preprocess", "--input", source, "--output-prefix", self.folder / "o"], flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            expected = {
                "a": [[[1, 2, 3, last]], [[7, last]], []],
                "b": [[[last], [4, 5, last]], [], [[6, 6, last]]],
            }
            for key, documents in expected.items():
                self.assertEqual(read_documents(self.folder / f"o_{key}_document"), (documents, code))

    @unittest.skipUnless(transformers, "the transformers package is not installed; run scripts/setup.sh --with-tests")
    def test_text_becomes_data_with_a_hugging_face_tokenizer(self):
        texts = list(topics.topics.values())[:40]
        records = [{"text": text} for text in texts] + [{"text": ""}, {"text": ["one", "", "two words"]}]
        corpus = self.write_lines("corpus.jsonl", records)
        tokenizer = small_tokenizer(texts, self.folder / "tokenizer", eos_token="<|endoftext|>")
        ids = self.folder / "ids.jsonl"
        done = text_to_ids(self.folder / "tokenizer", corpus, ids, "--workers", "1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.split()[:4], ["--tokenizer-type", "NullTokenizer", "--vocab-size", "600"])
        flags = done.stdout.strip()
        prefix = self.folder / "corpus"
        done = tool(["preprocess", "--input", ids, "--output-prefix", prefix, "--append-eod"], flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        documents, _ = read_documents(f"{prefix}_text_document")
        self.assertEqual(len(documents), len(records))
        self.assertEqual(documents[-2], [])
        eod = tokenizer.eos_token_id
        for record, document in zip(records, documents):
            sequences = record["text"] if isinstance(record["text"], list) else [record["text"]]
            sequences = [text for text in sequences if text]
            self.assertEqual(len(document), len(sequences))
            if document:
                self.assertEqual(document[-1].pop(), eod)
            self.assertEqual([tokenizer.decode(sequence) for sequence in document], sequences)

        # The tokenizer's own files give training the same numbers.
        model_flags = (
            "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
            "--micro-batch-size 2 --global-batch-size 2 --train-iters 3 --lr 1e-3 --eval-iters 0 --split 1,0,0 "
            "--reset-position-ids --distributed-backend gloo"
        )
        losses = []
        for source in (flags, f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {self.folder / 'tokenizer'}"):
            metrics = self.folder / f"metrics{len(losses)}"
            data = ["--data-path", f"{prefix}_text_document", "--metrics-file", metrics]
            codes, printed = train(model_flags, source, data)
            self.assertEqual(codes, [0], printed)
            losses.append(step_losses(metrics))
        self.assertEqual(len(losses[0]), 3)
        self.assertEqual(losses[0], losses[1])

    @unittest.skipUnless(transformers, "the transformers package is not installed; run scripts/setup.sh --with-tests")
    def test_the_script_names_file_and_line_and_leaves_nothing(self):
        small_tokenizer(["a b"], self.folder / "tokenizer")
        source = self.folder / "in.jsonl"
        for line, expected in (
            ("{", 'in.jsonl, line 2 is no JSON object; give one {"text": "..."} a line'),
            ("464 3290", "line 2 is no JSON object"),
            ('["a"]', "line 2 is no JSON object"),
            ('{"other": "x"}', "line 2: there is no key 'text'"),
            ('{"text": 5}', "line 2: 'text' is no text"),
        ):
            source.write_text('{"text": "a"}\n' + line + "\n", encoding="utf-8")
            done = text_to_ids(self.folder / "tokenizer", source, self.folder / "ids.jsonl")
            self.assertEqual(done.returncode, 1)
            self.assertIn(expected, done.stderr)
            self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["in.jsonl", "tokenizer"])

    @unittest.skipUnless(transformers, "the transformers package is not installed; run scripts/setup.sh --with-tests")
    def test_blank_lines_are_no_documents_and_count_as_lines(self):
        small_tokenizer(["a b"], self.folder / "tokenizer")
        source = self.folder / "in.jsonl"
        ids = self.folder / "ids.jsonl"
        source.write_text('\n{"text": "a"}\n  \n\n{"text": "b"}\n\n', encoding="utf-8")
        done = text_to_ids(self.folder / "tokenizer", source, ids)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("2 documents, 2 tokens", done.stderr)
        self.assertEqual(len(ids.read_text(encoding="utf-8").splitlines()), 2)
        source.write_text('\n{"text": "a"}\n\n{"other": "b"}\n', encoding="utf-8")
        self.assertIn("line 4: there is no key 'text'", text_to_ids(self.folder / "tokenizer", source, ids).stderr)

    def test_a_tokenizer_that_can_only_be_a_path_must_be_a_folder(self):
        source = self.write_lines("in.jsonl", [{"text": "a"}])
        for name in (self.folder / "tokenizer", "./tokenizer", "~/tokenizer", "tokenizer/", "a/b/c", source):
            with self.subTest(name=name):
                done = text_to_ids(str(name), source, self.folder / "ids.jsonl")
                self.assertEqual(done.returncode, 1)
                self.assertIn(f"the tokenizer {name} is no folder here", done.stderr)


if __name__ == "__main__":
    unittest.main()

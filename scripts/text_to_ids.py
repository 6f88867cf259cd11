#!/usr/bin/env python3
"""Turns the texts of a JSON lines file into token ids with a Hugging Face tokenizer, for gpt_tool preprocess. Needs the
transformers package, which scripts/setup.sh --with-tests installs into .venv.

    .venv/bin/python scripts/text_to_ids.py TOKENIZER corpus.jsonl ids.jsonl [--json-keys text ...] [--workers N]
    gpt_tool preprocess --input ids.jsonl --output-prefix corpus --append-eod <options that the first command prints>

TOKENIZER is a folder, or a name that transformers knows. Special tokens such as a begin-of-text are not added.
"""

import argparse
import itertools
import json
import os
import sys

BATCH_LINES = 1024


def fail(message):
    sys.exit(f"text_to_ids: error: {message}")


def parse_line(line, number, arguments):
    """The texts of a line: one list a key."""
    where = f"{arguments.input}, line {number}"
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        fail(f"{where} is no JSON object; give one {{\"{arguments.json_keys[0]}\": \"...\"}} a line")
    texts = []
    for key in arguments.json_keys:
        if key not in record:
            fail(f"{where}: there is no key '{key}'; name the right one with --json-keys")
        values = record[key] if isinstance(record[key], list) else [record[key]]
        if not all(isinstance(value, str) for value in values):
            fail(f"{where}: '{key}' is no text and no list of texts")
        texts.append(values)
    return texts


def check_tokenizer(name):
    """Refuses what can only be a path and is no folder, which transformers would look for on the network."""
    path_like = name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1 or os.path.exists(name)
    if path_like and not os.path.isdir(name):
        fail(f"the tokenizer {name} is no folder here; give the folder of tokenizer.json, or a name such as "
             "openai-community/gpt2")


def convert(tokenizer, lines, arguments, output):
    """Writes the ids of some numbered lines; returns how many there are."""
    records = [parse_line(line, number, arguments) for number, line in lines]
    texts = [text for record in records for values in record for text in values]
    encoded = iter(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else [])
    tokens = 0
    for record in records:
        written = {}
        for key, values in zip(arguments.json_keys, record):
            ids = [next(encoded) for _ in values]
            tokens += sum(map(len, ids))
            # A list may be empty, a text of ids may not.
            written[key] = [" ".join(map(str, sequence)) for sequence in ids if sequence]
        output.write(json.dumps(written) + "\n")
    return tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="folder of a tokenizer, or a name that transformers knows")
    parser.add_argument("input", help="file with one JSON object a line; blank lines are skipped")
    parser.add_argument("output", help="file to write: the same lines with ids in place of texts")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="keys that hold texts; others are left out")
    parser.add_argument("--workers", type=int, help="threads of the tokenizer; default: all cores")
    arguments = parser.parse_args()
    check_tokenizer(arguments.tokenizer)
    if arguments.workers:
        os.environ["RAYON_NUM_THREADS"] = str(arguments.workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        from transformers import AutoTokenizer
    except ImportError:
        fail("the transformers package is missing; run scripts/setup.sh --with-tests and start this with "
             ".venv/bin/python")
    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    except Exception as error:  # whatever a tokenizer's files can do wrong
        fail(f"transformers cannot load the tokenizer {arguments.tokenizer}: {error}")

    documents = tokens = 0
    unfinished = arguments.output + ".tmp"
    try:
        with open(arguments.input, encoding="utf-8") as source, open(unfinished, "w", encoding="utf-8") as output:
            numbered = ((number, line) for number, line in enumerate(source, 1) if line.strip())
            while lines := list(itertools.islice(numbered, BATCH_LINES)):
                tokens += convert(tokenizer, lines, arguments, output)
                documents += len(lines)
        os.replace(unfinished, arguments.output)
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{arguments.input} -> {arguments.output}: {error}")
    finally:
        if os.path.exists(unfinished):
            os.remove(unfinished)
    print(f"{arguments.output}: {documents} documents, {tokens} tokens", file=sys.stderr)
    eod = tokenizer.eos_token_id
    if eod is None:
        print("text_to_ids: the tokenizer has no end-of-text token; leave --append-eod out, or give "
              "--null-tokenizer-eod-id", file=sys.stderr)
    print(f"--tokenizer-type NullTokenizer --vocab-size {len(tokenizer)}"
          + (f" --null-tokenizer-eod-id {eod}" if eod is not None else ""))


if __name__ == "__main__":
    main()

"""Writes a corpus of random tokens as PREFIX.bin and PREFIX.idx, the format that --data-path reads."""

import array
import itertools
import random
import struct
import sys

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
TYPE_UINT16, TYPE_INT32 = 8, 4
DOCUMENT_TOKENS = 1200  # mean length; documents do not align with samples


def draw_tokens(count, vocab, kind, rng):
    """Independent tokens: `uniform` over the vocabulary, or `zipf` with probability proportional to 1 / (1 + id)."""
    if kind == "uniform":
        return rng.choices(range(vocab), k=count)
    cumulative = list(itertools.accumulate(1.0 / (1 + token) for token in range(vocab)))
    return rng.choices(range(vocab), cum_weights=cumulative, k=count)


def draw_lengths(count, rng):
    """Document lengths that sum to `count`."""
    lengths = []
    while count > 0:
        lengths.append(min(count, rng.randint(1, 2 * DOCUMENT_TOKENS - 1)))
        count -= lengths[-1]
    return lengths


def write_corpus(prefix, tokens, vocab, kind, seed=1234):
    """Writes `tokens` tokens; returns the number of bytes of the .bin file."""
    if sys.byteorder != "little":
        raise SystemExit("error: the corpus writer needs a little-endian machine")
    rng = random.Random(seed)
    code, letter = (TYPE_UINT16, "H") if vocab < 65500 else (TYPE_INT32, "i")
    data = array.array(letter, draw_tokens(tokens, vocab, kind, rng))
    lengths = draw_lengths(tokens, rng)
    size = data.itemsize
    offsets = [0, *itertools.accumulate(length * size for length in lengths)][:-1]
    with open(f"{prefix}.bin", "wb") as file:
        data.tofile(file)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(MAGIC)
        file.write(struct.pack("<QBQQ", VERSION, code, len(lengths), len(lengths) + 1))
        array.array("i", lengths).tofile(file)
        array.array("q", offsets).tofile(file)
        array.array("q", range(len(lengths) + 1)).tofile(file)
    return tokens * size

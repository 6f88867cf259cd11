"""Which tokens each step trains on, once more: index files, sample order, samplers and masks."""

import dataclasses
import re
import struct

import numpy
import torch


@dataclasses.dataclass
class Batch:
    """A micro-batch: [b, s], and masked [b, s, s], which is true where a row may not look."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    positions: torch.Tensor
    rotary_positions: torch.Tensor
    masked: torch.Tensor


def write_corpus(prefix, documents):
    """prefix.bin and prefix.idx of 16-bit tokens, one sequence a document."""
    lengths = [len(document) for document in documents]
    offsets = [2 * sum(lengths[:i]) for i in range(len(lengths))]
    with open(f"{prefix}.bin", "wb") as file:
        for document in documents:
            file.write(struct.pack(f"<{len(document)}H", *document))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1))
        file.write(struct.pack(f"<{len(lengths)}i", *lengths))
        file.write(struct.pack(f"<{len(lengths)}q", *offsets))
        file.write(struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1)))


class Samples:
    """The samples of some documents; pieces[i] lists the parts of documents that make sample i."""

    def __init__(self, documents, length, wanted, seed):
        tokens, self.documents, self.length = sum(map(len, documents)), documents, length
        epochs = 1
        while epochs * tokens < wanted * length + 1:
            epochs += 1
        separate, before = False, 0
        if epochs > 1:
            before = ((epochs - 1) * tokens - 1) // length
            separate = wanted - before < int(0.80 * ((tokens - 1) // length))
        generator = numpy.random.RandomState(seed)

        def shuffled(array):
            generator.shuffle(array)
            return array

        plain = numpy.arange(len(documents), dtype=numpy.int32)
        if separate:
            order = numpy.concatenate([shuffled(numpy.tile(plain, epochs - 1)), shuffled(plain.copy())])
        else:
            order = shuffled(numpy.tile(plain, epochs))
        self.count = (epochs * tokens - 1) // length
        if separate:
            parts = [numpy.arange(before), numpy.arange(before, self.count)]
            self.shuffle = numpy.concatenate([shuffled(part) for part in parts if len(part)])
        else:
            self.shuffle = shuffled(numpy.arange(self.count))
        sizes = [range(len(documents[document])) for document in order]
        self.stream = [(place, offset) for place, size in enumerate(sizes) for offset in size]
        self.order = order

    def __len__(self):
        return self.count

    def pieces(self, index):
        """The length + 1 tokens of a sample, cut where documents were joined."""
        start = self.shuffle[index] * self.length
        result, last = [], None
        for place, offset in self.stream[start : start + self.length + 1]:
            if place != last:
                result.append([])
            result[-1].append(self.documents[self.order[place]][offset])
            last = place
        return result


def split_bounds(text, count):
    shares = [float(number) for number in re.findall(r"[\d.]+", text)]
    shares = [share / sum(shares) for share in shares + [0.0] * (3 - len(shares))]
    bounds = [0.0]
    for share in shares:
        bounds.append(bounds[-1] + share)
    return [int(numpy.rint(bound * count)) for bound in bounds]


def build_set(options, documents, split, wanted):
    """The samples of split 0 (train), 1 (validation) or 2 (test) of a corpus."""
    bounds = split_bounds(options["split"], len(documents))
    return Samples(documents[bounds[split] : bounds[split + 1]], options["seq-length"], wanted, options["seed"])


def batch_of(options, samples):
    """A micro-batch of samples, each a list of pieces."""
    length = options["seq-length"]
    end = options["null-tokenizer-eod-id"]
    end = options["vocab-size"] - 1 if end is None else end
    pad = options["null-tokenizer-pad-id"]
    pad = -1 if pad is None or (pad == end and not options["allow-ambiguous-pad-tokens"]) else pad
    fields = []
    for pieces in samples:
        text = torch.tensor(sum(pieces, []))
        tokens, labels = text[:-1].clone(), text[1:].clone()
        loss_mask = torch.ones(length, dtype=torch.float64)
        if options["eod-mask-loss"]:
            loss_mask[tokens == end] = 0
        loss_mask[labels == pad] = 0
        positions, rotary = torch.arange(length), torch.arange(length)
        row = torch.arange(length).unsqueeze(1)
        masked = torch.arange(length) > row
        for place in (tokens == end).nonzero().flatten().tolist():
            if options["reset-position-ids"]:
                positions[place + 1 :] = torch.arange(length - place - 1)
            if options["reset-attention-mask"] and not options["no-create-attention-mask-in-dataloader"]:
                masked[place + 1 :, : place + 1] = True
        if options["dataloader-inter-document-masking"]:
            segment = torch.tensor([number for number, piece in enumerate(pieces) for _ in piece][:length])
            masked = (torch.arange(length) > row) | (segment != segment.unsqueeze(1))
            positions = torch.cat([torch.arange(len(piece)) for piece in pieces])[:length]
            rotary = positions
        tokens[tokens == pad] = 0
        labels[labels == pad] = 0
        fields.append((tokens, labels, loss_mask, positions, rotary, masked))
    return Batch(*(torch.stack(field) for field in zip(*fields)))


def sample_numbers(options, size, micro_batch, ranks, rank, consumed):
    """Endless (cyclic) or one pass (single) over a set: the sample numbers of each micro-batch of one data rank."""
    if options["dataloader-type"] == "single":
        for start in range(consumed, size - micro_batch * ranks + 1, micro_batch * ranks):
            yield list(range(start + rank * micro_batch, start + (rank + 1) * micro_batch))
        return
    step = micro_batch * ranks
    active = size - size % step
    while True:
        epoch, inside = divmod(consumed, active)
        generator = torch.Generator().manual_seed(epoch)
        if options["no-data-sharding"]:
            order = torch.randperm(size // micro_batch * micro_batch, generator=generator)
            order = order[inside:][rank::ranks].tolist()
        else:
            bucket = size // step * micro_batch
            order = torch.randperm(bucket, generator=generator)[inside // ranks :].tolist()
            order = [rank * bucket + number for number in order]
        for start in range(0, len(order) - micro_batch + 1, micro_batch):
            yield order[start : start + micro_batch]
            consumed += step

"""Shapes of the recipes in configs/, for the references that run beside pretrain_gpt: one table, no copied sizes."""

import dataclasses
import json
import pathlib

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"


@dataclasses.dataclass(frozen=True)
class Model:
    """Shape of one recipe; sizes are those of the whole model."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool
    vocab: int  # true vocabulary: what tokens are drawn from
    padded_vocab: int
    seq: int
    micro_batch: int
    tied: bool
    positions: int  # rows of the learned position table, 0 with rotary positions
    biases: bool

    @property
    def head_dim(self):
        return self.hidden // self.heads

    @property
    def tokens(self):
        """Tokens of one micro-batch."""
        return self.seq * self.micro_batch

    @property
    def matrices(self):
        """(rows, columns) of the four matrices of a layer: qkv, proj, fc1, fc2."""
        return [
            ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            (self.hidden, self.heads * self.head_dim),
            ((2 if self.gated else 1) * self.ffn, self.hidden),
            (self.hidden, self.ffn),
        ]

    @property
    def matmul_parameters(self):
        """N of the FLOP formula: layer matrices and the output matrix; an untied input embedding does not count."""
        return sum(rows * columns for rows, columns in self.matrices) * self.layers + self.padded_vocab * self.hidden

    @property
    def parameters(self):
        """All parameters but norm gains and biases."""
        embedding = 0 if self.tied else self.padded_vocab * self.hidden
        return self.matmul_parameters + embedding + self.positions * self.hidden

    @property
    def flops(self):
        """Floating-point operations of one micro-batch: 6N + 6LsH a token (causal attention counts half)."""
        return self.tokens * (6 * self.matmul_parameters + 6 * self.layers * self.seq * self.hidden)

    def with_micro_batch(self, size):
        return dataclasses.replace(self, micro_batch=size) if size else self


def load(name):
    """The model of configs/NAME.json. Raises SystemExit for an unknown name."""
    path = CONFIGS / f"{name}.json"
    if not path.exists():
        known = " ".join(sorted(file.stem for file in CONFIGS.glob("*.json")))
        raise SystemExit(f"error: no recipe {name}; there are {known}")
    c = json.loads(path.read_text(encoding="utf-8"))
    divisor = c.get("make_vocab_size_divisible_by", 128)
    rope = c.get("position_embedding_type", "learned_absolute") == "rope"
    return Model(
        name=name,
        layers=c["num_layers"],
        hidden=c["hidden_size"],
        heads=c["num_attention_heads"],
        kv_heads=c["num_query_groups"] if c.get("group_query_attention") else c["num_attention_heads"],
        ffn=c.get("ffn_hidden_size", 4 * c["hidden_size"]),
        gated=c.get("swiglu", False),
        vocab=c["vocab_size"],
        padded_vocab=-(-c["vocab_size"] // divisor) * divisor,
        seq=c["seq_length"],
        micro_batch=c["micro_batch_size"],
        tied=not c.get("untie_embeddings_and_output_weights", False),
        positions=0 if rope else c["max_position_embeddings"],
        biases=not c.get("disable_bias_linear", False),
    )


def add_arguments(parser):
    """The arguments that name a model, shared by the references."""
    parser.add_argument("--model", required=True, help="name of a recipe in configs/")
    parser.add_argument("--micro-batch-size", type=int, default=0, help="instead of the recipe's")


def from_arguments(arguments):
    return load(arguments.model).with_micro_batch(arguments.micro_batch_size)


def print_result(**values):
    """The line that bench.py reads from a reference's output."""
    print("RESULT " + json.dumps(values), flush=True)

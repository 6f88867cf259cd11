"""How Megatron-LM cuts and pads the weights that it saves, for scripts/convert_megatron_checkpoint.py."""

from checkpoint_files import check

GTP_ALIGNMENT = 16


class Degrees:
    """How the run that saved cut its weights."""

    def __init__(self, args):
        self.tensor = int(getattr(args, "tensor_model_parallel_size", 1))
        shards = int(getattr(args, "tensor_parallel_num_weight_shards", None) or self.tensor)
        check(
            shards % self.tensor == 0,
            f"the checkpoint's tensor_parallel_num_weight_shards {shards} is no multiple of its "
            f"tensor_model_parallel_size {self.tensor}",
        )
        self.gtp = shards // self.tensor

    def padded(self, rows):
        """Rows with which GTP stores `rows` rows of one tensor-parallel rank."""
        unit = GTP_ALIGNMENT * self.gtp
        return rows if self.gtp == 1 else (rows + unit - 1) // unit * unit


def gather_gate_up(stored, degrees):
    """Undoes the permutation of a gated first MLP weight that GTP saves: [rows, ...] of padded tensor-parallel parts.

    Each of the T*G shards was halved as if it held [gate; up], and the halves were stored in two groups.
    """
    shards = degrees.tensor * degrees.gtp
    if degrees.gtp == 1:
        return stored
    halves = stored.reshape(2, shards, -1, *stored.shape[1:])
    return halves.transpose(0, 1).reshape(stored.shape)


def logical_rows(name, stored, rows, degrees, gated_fc1):
    """(the tensor's rows without padding, the padding rows or None): `rows` is its logical number of rows."""
    row_cut_by_tp = not name.endswith(("linear_proj.weight", "linear_fc2.weight"))
    tensor = degrees.tensor if row_cut_by_tp else 1
    check(rows % tensor == 0, f"{name}: {rows} rows are not divisible by tensor_model_parallel_size {tensor}")
    local = rows // tensor
    padded = degrees.padded(local)
    check(
        stored.shape[0] == tensor * padded,
        f"{name} is stored with {stored.shape[0]} rows; {rows} rows, tensor parallel {tensor} and GTP "
        f"{degrees.gtp} make {tensor * padded}",
    )
    if gated_fc1 and degrees.gtp > 1:
        parts = gather_gate_up(stored, degrees).reshape(tensor, padded, *stored.shape[1:])
        whole = parts[:, :local]
        # Each tensor-parallel part holds [its gate rows; its up rows].
        whole = whole.reshape(tensor, 2, local // 2, *stored.shape[1:]).transpose(0, 1).reshape(rows, *stored.shape[1:])
    else:
        parts = stored.reshape(tensor, padded, *stored.shape[1:])
        whole = parts[:, :local].reshape(rows, *stored.shape[1:])
    padding = parts[0, local:] if tensor == 1 and padded > local else None
    return whole, padding


class Shapes:
    """Logical shapes of the model's tensors, from its arguments."""

    def __init__(self, args, vocabulary):
        def value(name, otherwise=None):
            found = getattr(args, name, None)
            return otherwise if found is None else found

        self.layers, hidden, heads = int(args.num_layers), int(args.hidden_size), int(args.num_attention_heads)
        channels = int(value("kv_channels", hidden // heads))
        groups = int(args.num_query_groups) if value("group_query_attention", False) else heads
        ffn = int(args.ffn_hidden_size)
        self.gated = bool(value("swiglu", False) or value("quick_geglu", False))
        self.rows = {
            "word_embeddings.weight": vocabulary,
            "output_layer.weight": vocabulary,
            "linear_qkv.weight": (heads + 2 * groups) * channels,
            "linear_proj.weight": hidden,
            "linear_fc1.weight": 2 * ffn if self.gated else ffn,
            "linear_fc2.weight": hidden,
        }

    def of(self, name):
        """Rows of a tensor that GTP may cut, None for others."""
        return next((rows for end, rows in self.rows.items() if name.endswith(end)), None)

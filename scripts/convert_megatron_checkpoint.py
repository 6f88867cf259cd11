#!/usr/bin/env python3
"""Converts checkpoints between Megatron-LM (torch_dist) and this program, both ways. Needs torch and numpy, no GPU.

    scripts/convert_megatron_checkpoint.py import MEGATRON_DIR DIR    to this program's format
    scripts/convert_megatron_checkpoint.py export DIR MEGATRON_DIR    to Megatron-LM's

docs/conversion.md says what is converted and what is not. Read only checkpoints that you trust: their table of contents
is a Python pickle.
"""

import argparse
import ast
import io
import json
import os
import pathlib
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import types
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

# Single processes are what this script is for.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

LAYERS = "decoder.layers."
OPTIMIZER = re.compile(r"optimizer\.state\.([a-z0-9_]+)\.(.+)")
GTP_ALIGNMENT = 16
# Arguments under the names that the reference's program stores them.
RENAMED = {"layernorm_epsilon": "norm_epsilon", "layernorm_zero_centered_gamma": "apply_layernorm_1p"}
SAFETENSORS_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
TORCH_TYPES = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}


class ConversionError(Exception):
    """What the user has to know; one line."""


def check(condition, message):
    if not condition:
        raise ConversionError(message)


# ---- Megatron-LM's side: objects -------------------------------------------------------------------------------------


class _Placeholder:
    """Stands for an object of a class that is not installed here (enums of Megatron-LM, mostly)."""

    def __init__(self, *_, **__):
        pass

    def __setstate__(self, state):
        pass


class _ObjectReader(pickle.Unpickler):
    """Builds tensors and plain values only."""

    PLAIN = {("argparse", "Namespace"), ("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2"),
             ("numpy._core.multiarray", "_reconstruct"), ("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"),
             ("_codecs", "encode")}

    def find_class(self, module, name):
        if (module, name) in self.PLAIN or (module == "torch" and (isinstance(getattr(torch, name, None), torch.dtype) or name.endswith("Storage"))):
            return super().find_class(module, name)
        return type(name, (_Placeholder,), {"__module__": module})


_OBJECT_PICKLE = types.SimpleNamespace(Unpickler=_ObjectReader, load=lambda file, **_: _ObjectReader(file).load(), __name__="pickle")


class MegatronCheckpoint:
    """One iteration's folder of a torch_dist checkpoint, opened for reading."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        check((self.folder / ".metadata").is_file(), f"{folder} is no torch_dist checkpoint: it has no .metadata")
        marker = self.folder / "metadata.json"
        check(marker.is_file(), f"{folder} is not complete, or not written by Megatron-LM: it has no metadata.json")
        backend = json.loads(marker.read_text(encoding="utf-8")).get("sharded_backend")
        check(backend == "torch_dist", f"{marker} says sharded_backend {backend}; only torch_dist is converted")
        self.reader = FileSystemReader(str(self.folder))
        self.metadata = self.reader.read_metadata()
        self.entries = self.metadata.state_dict_metadata
        self.places = {index.fqn: place for index, place in self.metadata.storage_data.items()}

    def tensors(self):
        return {key: entry for key, entry in self.entries.items() if isinstance(entry, TensorStorageMetadata)}

    def tensor(self, key):
        entry = self.entries[key]
        values = {key: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)}
        dcp.load(values, storage_reader=FileSystemReader(str(self.folder)), no_dist=True)
        return values[key]

    def object(self, key):
        """The value of a sharded object."""
        place = self.places[key]
        with open(self.folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            blob = io.BytesIO(file.read(place.length))
        return torch.load(blob, map_location="cpu", weights_only=False, pickle_module=_OBJECT_PICKLE)

    def common(self):
        """Arguments, iteration, optimizer groups and schedule."""
        old = self.folder / "common.pt"
        if old.is_file():
            return torch.load(old, map_location="cpu", weights_only=False, pickle_module=_OBJECT_PICKLE)
        check("common_state/shard_0_1" in self.places, f"{self.folder} has neither common.pt nor the object common_state")
        return self.object("common_state/shard_0_1")[0]


def find_megatron(path):
    """The iteration's folder that a path means, and whether it is a release."""
    path = pathlib.Path(path)
    if (path / ".metadata").is_file():
        return path, path.name == "release"
    tracker = path / "latest_checkpointed_iteration.txt"
    check(tracker.is_file(), f"{path} is no checkpoint: it has neither .metadata nor {tracker.name}")
    text = tracker.read_text(encoding="utf-8").strip()
    check(text == "release" or text.isdigit(), f"{tracker} holds '{text}', which is neither an iteration nor 'release'")
    return (path / "release", True) if text == "release" else (path / f"iter_{int(text):07d}", False)


# ---- layouts ---------------------------------------------------------------------------------------------------------


class Degrees:
    """How the run that saved cut its weights."""

    def __init__(self, args):
        self.tensor = int(getattr(args, "tensor_model_parallel_size", 1))
        shards = int(getattr(args, "tensor_parallel_num_weight_shards", None) or self.tensor)
        check(shards % self.tensor == 0, f"the checkpoint's tensor_parallel_num_weight_shards {shards} is no multiple of its "
              f"tensor_model_parallel_size {self.tensor}")
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
    check(stored.shape[0] == tensor * padded, f"{name} is stored with {stored.shape[0]} rows; {rows} rows, tensor parallel {tensor} and GTP "
          f"{degrees.gtp} make {tensor * padded}")
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
        self.rows = {"word_embeddings.weight": vocabulary, "output_layer.weight": vocabulary,
                     "linear_qkv.weight": (heads + 2 * groups) * channels, "linear_proj.weight": hidden,
                     "linear_fc1.weight": 2 * ffn if self.gated else ffn, "linear_fc2.weight": hidden}

    def of(self, name):
        """Rows of a tensor that GTP may cut, None for others."""
        return next((rows for end, rows in self.rows.items() if name.endswith(end)), None)


# ---- import ----------------------------------------------------------------------------------------------------------


def argument_text(value):
    """An argument as the argument dump prints it; None when it is no plain value."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value)
    if isinstance(value, (list, tuple)) and all(isinstance(item, (bool, int, float, str)) for item in value):
        return str(list(value))
    return None


def native_arguments(args, vocabulary, padded):
    result = {}
    for name, value in vars(args).items():
        text = argument_text(value)
        if text is not None:
            result[RENAMED.get(name, name)] = text
    result.update(vocab_size=str(vocabulary), padded_vocab_size=str(padded))
    # Facts of the run that the target's own options must decide.
    for name in ("load", "save", "local_rank", "world_size"):
        result.pop(name, None)
    return result


class SafetensorsWriter:
    """Files of whole tensors, a few gigabytes each."""

    LIMIT = 2 << 30

    def __init__(self, folder):
        self.folder, self.pending, self.bytes, self.files = pathlib.Path(folder), [], 0, 0

    def add(self, name, tensor):
        self.pending.append((name, tensor.contiguous()))
        self.bytes += tensor.numel() * tensor.element_size()
        if self.bytes >= self.LIMIT:
            self.flush()

    def flush(self):
        if not self.pending:
            return
        header, offset = {}, 0
        for name, tensor in self.pending:
            size = tensor.numel() * tensor.element_size()
            header[name] = {"dtype": SAFETENSORS_TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(self.folder / f"part_{self.files:05d}.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, tensor in self.pending:
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        self.pending, self.bytes, self.files = [], 0, self.files + 1


def resize_vocabulary(values, rows):
    """The first rows, or zero rows behind them."""
    if values.shape[0] >= rows:
        return values[:rows]
    return torch.cat([values, torch.zeros(rows - values.shape[0], *values.shape[1:], dtype=values.dtype)])


def optimizer_facts(common):
    """(step, groups, gradient scaler or None) of the optimizer's common state."""
    state = common["optimizer"]
    check(isinstance(state, dict), "the optimizer's state is a list of several optimizers; use --weights-only")
    scaler = state.get("grad_scaler")
    state = state.get("optimizer", state)
    check("param_groups" in state, "the optimizer's state has no param_groups; use --weights-only")
    steps = {int(group["step"]) for group in state["param_groups"] if "step" in group}
    check(len(steps) == 1, f"the optimizer's groups are at different steps: {sorted(steps)}; use --weights-only")
    return steps.pop(), state["param_groups"], scaler


def convert_tensors(source, shapes, degrees, writer, weights_only, stored_vocabulary, vocabulary_rows, keep_padding):
    """Writes every tensor under this program's names; True when padding rows were written."""
    any_padding = False
    for key, entry in source.tensors().items():
        optimizer = OPTIMIZER.fullmatch(key)
        if key.startswith("optimizer.") and weights_only:
            continue
        check(optimizer or not key.startswith("optimizer."), f"{key}: the state of a distributed optimizer is stored by buckets, which only "
              "the same layout can read; use --weights-only, or save with --dist-ckpt-optim-fully-reshardable")
        prefix, name = (f"optimizer.state.{optimizer[1]}.", optimizer[2]) if optimizer else ("", key)
        check(".experts." not in name and ".router." not in name and not name.startswith("mtp."), f"{key}: experts and multi-token prediction "
              "are not converted")
        values = source.tensor(key)
        stacked = name.startswith(LAYERS) and not name[len(LAYERS):].split(".")[0].isdigit()
        if stacked:
            check(values.shape[0] == shapes.layers, f"{key} has {values.shape[0]} layers, its arguments say {shapes.layers}")
            parts = [(f"{LAYERS}{i}.{name[len(LAYERS):]}", values[i]) for i in range(shapes.layers)]
        else:
            parts = [(name, values)]
        rows = shapes.of(name)
        fc1 = shapes.gated and name.endswith("linear_fc1.weight")
        if fc1 and degrees.gtp > 1:
            check_fc1_chunks(key, entry, degrees, stacked)
        for part, tensor in parts:
            padding = None
            if rows is not None:
                tensor, padding = logical_rows(part, tensor, rows, degrees, fc1)
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                check(rows == stored_vocabulary, "internal error")
                tensor = resize_vocabulary(tensor, vocabulary_rows)
            elif padding is not None and keep_padding:
                writer.add(f"{prefix}{part}.gtp_padding", padding)
                any_padding = True
            writer.add(prefix + part, tensor)
    return any_padding


def check_fc1_chunks(key, entry, degrees, stacked):
    """The permutation is undone on the evidence of the pieces that were saved: two halves of each shard."""
    rows = entry.size[1 if stacked else 0]
    half = rows // (2 * degrees.tensor * degrees.gtp)
    found = {chunk.sizes[1 if stacked else 0] for chunk in entry.chunks}
    check(found == {half}, f"{key} was saved in pieces of {sorted(found)} rows; tensor parallel {degrees.tensor} and GTP {degrees.gtp} save pieces "
          f"of {half}. Its layout is not known, so its gate and up rows cannot be told apart")


def check_extra_state(source):
    for key in source.entries:
        if "._extra_state" not in key or isinstance(source.entries[key], TensorStorageMetadata):
            continue
        value = source.object(key)
        empty = all(item is None or (isinstance(item, torch.Tensor) and item.numel() == 0) or (isinstance(item, io.BytesIO) and not item.getvalue())
                    for item in (value if isinstance(value, list) else [value]))
        check(empty, f"{key} is not empty: FP8 state is not converted")


def read_megatron(path, folder, weights_only=False, vocab_size=None, padded_vocab_size=None):
    """Reads a Megatron-LM checkpoint and leaves state.json and safetensors files in `folder`, for gpt_tool import --format state."""
    directory, release = find_megatron(path)
    source = MegatronCheckpoint(directory)
    common = source.common()
    args = common.get("args")
    check(isinstance(args, argparse.Namespace), f"{directory} holds no arguments")
    degrees = Degrees(args)
    embedding = source.entries.get("embedding.word_embeddings.weight")
    check(embedding is not None, f"{directory} has no embedding.word_embeddings.weight; it is no GPT model")
    check_extra_state(source)
    stored_vocabulary = int(getattr(args, "padded_vocab_size", None) or embedding.size[0])
    vocabulary = int(vocab_size or getattr(args, "vocab_size", None) or stored_vocabulary)
    rows = int(padded_vocab_size or stored_vocabulary)
    check(vocabulary <= rows, f"a vocabulary of {vocabulary} does not fit into {rows} rows (--vocab-size, --padded-vocab-size)")
    weights_only = weights_only or release or "optimizer" not in common
    shapes = Shapes(args, stored_vocabulary)
    keep_padding = degrees.tensor == 1 and degrees.gtp > 1
    writer = SafetensorsWriter(folder)
    padding = convert_tensors(source, shapes, degrees, writer, weights_only, stored_vocabulary, rows, keep_padding)
    writer.flush()

    iteration = 0 if release else int(common["iteration"])
    state = {"iteration": iteration,
             "consumed_train_samples": int(getattr(args, "consumed_train_samples", None) or iteration * int(args.global_batch_size or 0)),
             "skipped_train_samples": int(getattr(args, "skipped_train_samples", None) or 0),
             "consumed_valid_samples": int(getattr(args, "consumed_valid_samples", None) or 0),
             "num_floating_point_operations_so_far": float(common.get("num_floating_point_operations_so_far") or 0)}
    if not weights_only:
        step, _, scaler = optimizer_facts(common)
        kind = "sgd" if getattr(args, "optimizer", "adam") == "sgd" else "adam"
        check(getattr(args, "optimizer", "adam") in ("adam", "sgd"), f"optimizer {args.optimizer} is not converted; use --weights-only")
        state["optimizer"] = {"kind": kind, "step": step}
        state["opt_param_scheduler"] = dict(common["opt_param_scheduler"])
        if scaler:
            state["loss_scaler"] = {"scale": float(scaler["scale"]), "good_steps": int(scaler.get("growth_tracker", 0)),
                                    "hysteresis": int(scaler.get("hysteresis_tracker", 0))}
    layout = {"world_size": int(getattr(args, "world_size", 1) or 1), "tensor": degrees.tensor,
              "pipeline": int(getattr(args, "pipeline_model_parallel_size", 1)), "context": int(getattr(args, "context_parallel_size", 1)),
              "gtp": degrees.gtp, "replicate_data": int(getattr(args, "data_parallel_size", 1) or 1), "gtp_padding": padding}
    manifest = {"format": "pgpt-checkpoint", "format_version": 1, "program": "convert_megatron_checkpoint.py", "libtorch": torch.__version__,
                "state": state, "layout": layout, "arguments": native_arguments(args, vocabulary, rows), "block_bytes": 4 << 20, "files": {},
                "tensors": {}}
    (pathlib.Path(folder) / "state.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return manifest


# ---- export ----------------------------------------------------------------------------------------------------------


class NativeCheckpoint:
    """A checkpoint of this program, opened for reading; gpt_tool inspect --verify checks its bytes."""

    def __init__(self, path):
        path = pathlib.Path(path)
        if not (path / "manifest.json").is_file():
            tracker = path / "latest_checkpointed_iteration.txt"
            check(tracker.is_file(), f"{path} is no checkpoint of this program: it has neither manifest.json nor {tracker.name}")
            text = tracker.read_text(encoding="utf-8").strip()
            path = path / ("release" if text == "release" else f"iter_{int(text):07d}")
        self.folder = path
        self.manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        self.headers = {}

    def _header(self, file):
        if file not in self.headers:
            with open(self.folder / file, "rb") as opened:
                length = struct.unpack("<Q", opened.read(8))[0]
                self.headers[file] = (json.loads(opened.read(length)), 8 + length)
        return self.headers[file]

    def tensor(self, name):
        entry = self.manifest["tensors"][name]
        whole = torch.empty(entry["shape"], dtype=TORCH_TYPES[entry["dtype"]])
        for piece in entry["pieces"]:
            header, start = self._header(piece["file"])
            begin, end = header[piece["key"]]["data_offsets"]
            with open(self.folder / piece["file"], "rb") as opened:
                opened.seek(start + begin)
                values = torch.frombuffer(bytearray(opened.read(end - begin)), dtype=whole.dtype).reshape(piece["shape"])
            whole[tuple(slice(o, o + n) for o, n in zip(piece["offset"], piece["shape"]))] = values
        return whole


def parsed(text):
    """An argument dump's value as Python has it."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def megatron_args(manifest):
    args = {name: parsed(text) for name, text in manifest["arguments"].items()}
    for theirs, ours in RENAMED.items():
        if ours in args:
            args[theirs] = args.pop(ours)
    state = manifest["state"]
    for name in ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples"):
        args[name] = state[name]
    args.update(iteration=state["iteration"], tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1,
                tensor_parallel_num_weight_shards=1, data_parallel_size=1, use_distributed_optimizer=False, ckpt_format="torch_dist")
    args["params_dtype"] = torch.bfloat16 if args.get("bf16") else torch.float16 if args.get("fp16") else torch.float32
    # Without a world size Megatron-LM takes the sharding for changed and does not look for a state that only it can have.
    args.pop("world_size", None)
    return argparse.Namespace(**args)


def param_groups(args, step, learning_rate):
    shared = {"is_expert_parallel": False, "default_config": True, "lr_mult": 1.0, "is_decoupled_lr": False, "max_lr": args.lr,
              "min_lr": args.min_lr, "lr": learning_rate, "bias_correction": True, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_eps,
              "step": step}
    return [{**shared, "wd_mult": multiplier, "weight_decay": args.weight_decay * multiplier} for multiplier in (1.0, 0.0)]


def stack_layers(names, read):
    """Tensors under Megatron-LM's keys: layers stacked along a leading axis."""
    layered, result = {}, {}
    for name in names:
        optimizer = OPTIMIZER.fullmatch(name)
        prefix, bare = (f"optimizer.state.{optimizer[1]}.", optimizer[2]) if optimizer else ("", name)
        if bare.startswith(LAYERS):
            index, rest = bare[len(LAYERS):].split(".", 1)
            layered.setdefault(prefix + LAYERS + rest, {})[int(index)] = name
        else:
            result[name] = read(name)
    for key, members in layered.items():
        result[key] = torch.stack([read(members[i]) for i in range(len(members))])
    return result


def write_megatron(source_path, target):
    """Writes a Megatron-LM checkpoint of one rank's layout under `target`."""
    source = NativeCheckpoint(source_path)
    manifest = source.manifest
    state = manifest["state"]
    args = megatron_args(manifest)
    check(args.transformer_impl == "transformer_engine", "only --transformer-impl transformer_engine has the stacked layers that are written here")
    release = source.folder.name == "release"
    names = [name for name in manifest["tensors"] if not name.endswith(".gtp_padding")]
    values = stack_layers(names, source.tensor)
    layers = int(args.num_layers)
    extra = [(f"{LAYERS}{module}", i, layers) for i in range(layers) for module in
             ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")]
    if getattr(args, "qk_layernorm", False):
        extra += [(f"{LAYERS}self_attention.{norm}_layernorm", i, layers) for i in range(layers) for norm in "qk"]
    for key, i, count in [*extra, ("decoder.final_layernorm", 0, 1)]:
        values[f"{key}._extra_state/shard_{i}_{count}"] = [torch.empty(0, dtype=torch.uint8)]
    common = {"args": args, "checkpoint_version": 3.0, "iteration": state["iteration"],
              "num_floating_point_operations_so_far": state["num_floating_point_operations_so_far"],
              "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}}
    if "optimizer" in state:
        check(state["optimizer"]["kind"] == "adam", f"the state of optimizer {state['optimizer']['kind']} is not converted; save with --no-save-optim")
        groups = {"param_groups": param_groups(args, state["optimizer"]["step"], state["opt_param_scheduler"]["max_lr"])}
        common["optimizer"] = groups if args.params_dtype == torch.float32 else {"optimizer": groups}
        if "loss_scaler" in state:
            scaler = state["loss_scaler"]
            common["optimizer"]["grad_scaler"] = {"scale": torch.tensor([scaler["scale"]]), "growth_tracker": scaler["good_steps"],
                                                  "hysteresis_tracker": scaler["hysteresis"]}
        common["opt_param_scheduler"] = state["opt_param_scheduler"]
    values["common_state/shard_0_1"] = [common]

    target = pathlib.Path(target)
    check(not (target / "latest_checkpointed_iteration.txt").exists(), f"{target} holds a checkpoint already; give another folder")
    name = "release" if release else f"iter_{state['iteration']:07d}"
    partial = target / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    dcp.save(values, storage_writer=FileSystemWriter(str(partial)), planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    (partial / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}), encoding="utf-8")
    os.rename(partial, target / name)
    (target / "latest_checkpointed_iteration.txt").write_text("release" if release else str(state["iteration"]), encoding="utf-8")
    return target / name


# ---- command line ----------------------------------------------------------------------------------------------------


def find_tool(given):
    """gpt_tool: as given, or the newest that was built."""
    if given:
        return given
    root = pathlib.Path(__file__).resolve().parent.parent
    built = sorted(root.glob("build/*/bin/gpt_tool"), key=lambda path: path.stat().st_mtime)
    check(built, "gpt_tool is not built; run scripts/build.sh, or give --tool PATH")
    return str(built[-1])


def run_tool(tool, *arguments):
    finished = subprocess.run([tool, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    check(finished.returncode == 0, finished.stderr.strip() or f"{tool} ended with {finished.returncode}")
    return finished.stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("direction", choices=("import", "export"))
    parser.add_argument("source", help="a checkpoint folder, or one iteration in it")
    parser.add_argument("target", help="folder of the new checkpoint")
    parser.add_argument("--weights-only", action="store_true", help="leave the optimizer's state (import)")
    parser.add_argument("--vocab-size", type=int, help="true vocabulary, where the checkpoint does not say it (import)")
    parser.add_argument("--padded-vocab-size", type=int, help="embedding rows to keep or fill with zeros; default: all that are stored (import)")
    parser.add_argument("--tool", help="path of gpt_tool")
    options = parser.parse_args()
    try:
        if options.direction == "export":
            check(not (options.weights_only or options.vocab_size or options.padded_vocab_size), "--weights-only, --vocab-size and "
                  "--padded-vocab-size belong to import")
            run_tool(find_tool(options.tool), "inspect", "--verify", options.source)
            print(f"exported {options.source} to {write_megatron(options.source, options.target)}; load it with --no-load-rng")
            return 0
        parent = pathlib.Path(options.target).resolve().parent
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".convert-") as folder:
            manifest = read_megatron(options.source, folder, options.weights_only, options.vocab_size, options.padded_vocab_size)
            run_tool(find_tool(options.tool), "import", "--format", "state", "--input", folder, "--output", options.target)
        arguments = manifest["arguments"]
        print(f"imported {options.source} to {options.target}: iteration {manifest['state']['iteration']}, vocabulary {arguments['vocab_size']} in "
              f"{arguments['padded_vocab_size']} rows (--padded-vocab-size {arguments['padded_vocab_size']})")
        return 0
    except (ConversionError, OSError) as error:
        print(f"convert_megatron_checkpoint.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

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
import re
import shutil
import subprocess
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from checkpoint_files import (
    ConversionError,
    MegatronCheckpoint,
    NativeCheckpoint,
    SafetensorsWriter,
    check,
    find_megatron,
)
from megatron_layouts import Degrees, Shapes, logical_rows

LAYERS = "decoder.layers."
OPTIMIZER = re.compile(r"optimizer\.state\.([a-z0-9_]+)\.(.+)")
# Arguments under the names that the reference's program stores them.
RENAMED = {"layernorm_epsilon": "norm_epsilon", "layernorm_zero_centered_gamma": "apply_layernorm_1p"}


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
        check(
            optimizer or not key.startswith("optimizer."),
            f"{key}: the state of a distributed optimizer is stored by buckets, which only "
            "the same layout can read; use --weights-only, or save with --dist-ckpt-optim-fully-reshardable",
        )
        prefix, name = (f"optimizer.state.{optimizer[1]}.", optimizer[2]) if optimizer else ("", key)
        check(
            ".experts." not in name and ".router." not in name and not name.startswith("mtp."),
            f"{key}: experts and multi-token prediction " "are not converted",
        )
        values = source.tensor(key)
        stacked = name.startswith(LAYERS) and not name[len(LAYERS) :].split(".")[0].isdigit()
        if stacked:
            check(
                values.shape[0] == shapes.layers,
                f"{key} has {values.shape[0]} layers, its arguments say {shapes.layers}",
            )
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
    check(
        found == {half},
        f"{key} was saved in pieces of {sorted(found)} rows; tensor parallel {degrees.tensor} and GTP {degrees.gtp} "
        f"save pieces of {half}. Its layout is not known, so its gate and up rows cannot be told apart",
    )


def check_extra_state(source):
    for key in source.entries:
        if "._extra_state" not in key or isinstance(source.entries[key], TensorStorageMetadata):
            continue
        value = source.object(key)
        empty = all(
            item is None
            or (isinstance(item, torch.Tensor) and item.numel() == 0)
            or (isinstance(item, io.BytesIO) and not item.getvalue())
            for item in (value if isinstance(value, list) else [value])
        )
        check(empty, f"{key} is not empty: FP8 state is not converted")


def read_megatron(path, folder, weights_only=False, vocab_size=None, padded_vocab_size=None):
    """Reads a Megatron-LM checkpoint; leaves in `folder` what gpt_tool import --format state reads."""
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
    check(
        vocabulary <= rows,
        f"a vocabulary of {vocabulary} does not fit into {rows} rows (--vocab-size, --padded-vocab-size)",
    )
    weights_only = weights_only or release or "optimizer" not in common
    shapes = Shapes(args, stored_vocabulary)
    keep_padding = degrees.tensor == 1 and degrees.gtp > 1
    writer = SafetensorsWriter(folder)
    padding = convert_tensors(source, shapes, degrees, writer, weights_only, stored_vocabulary, rows, keep_padding)
    writer.flush()

    iteration = 0 if release else int(common["iteration"])
    state = {
        "iteration": iteration,
        "consumed_train_samples": int(
            getattr(args, "consumed_train_samples", None) or iteration * int(args.global_batch_size or 0)
        ),
        "skipped_train_samples": int(getattr(args, "skipped_train_samples", None) or 0),
        "consumed_valid_samples": int(getattr(args, "consumed_valid_samples", None) or 0),
        "num_floating_point_operations_so_far": float(common.get("num_floating_point_operations_so_far") or 0),
    }
    if not weights_only:
        step, _, scaler = optimizer_facts(common)
        kind = "sgd" if getattr(args, "optimizer", "adam") == "sgd" else "adam"
        check(
            getattr(args, "optimizer", "adam") in ("adam", "sgd"),
            f"optimizer {args.optimizer} is not converted; use --weights-only",
        )
        state["optimizer"] = {"kind": kind, "step": step}
        state["opt_param_scheduler"] = dict(common["opt_param_scheduler"])
        if scaler:
            state["loss_scaler"] = {
                "scale": float(scaler["scale"]),
                "good_steps": int(scaler.get("growth_tracker", 0)),
                "hysteresis": int(scaler.get("hysteresis_tracker", 0)),
            }
    layout = {
        "world_size": int(getattr(args, "world_size", 1) or 1),
        "tensor": degrees.tensor,
        "pipeline": int(getattr(args, "pipeline_model_parallel_size", 1)),
        "context": int(getattr(args, "context_parallel_size", 1)),
        "gtp": degrees.gtp,
        "replicate_data": int(getattr(args, "data_parallel_size", 1) or 1),
        "gtp_padding": padding,
    }
    manifest = {
        "format": "pgpt-checkpoint",
        "format_version": 1,
        "program": "convert_megatron_checkpoint.py",
        "libtorch": torch.__version__,
        "state": state,
        "layout": layout,
        "arguments": native_arguments(args, vocabulary, rows),
        "block_bytes": 4 << 20,
        "files": {},
        "tensors": {},
    }
    (pathlib.Path(folder) / "state.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return manifest


# ---- export ----------------------------------------------------------------------------------------------------------


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
    args.update(
        iteration=state["iteration"],
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        tensor_parallel_num_weight_shards=1,
        data_parallel_size=1,
        use_distributed_optimizer=False,
        ckpt_format="torch_dist",
    )
    args["params_dtype"] = torch.bfloat16 if args.get("bf16") else torch.float16 if args.get("fp16") else torch.float32
    # Without a world size Megatron-LM takes the sharding for changed, and does not look for a state that only it has.
    args.pop("world_size", None)
    return argparse.Namespace(**args)


def param_groups(args, step, learning_rate):
    shared = {
        "is_expert_parallel": False,
        "default_config": True,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": args.lr,
        "min_lr": args.min_lr,
        "lr": learning_rate,
        "bias_correction": True,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_eps,
        "step": step,
    }
    return [
        {**shared, "wd_mult": multiplier, "weight_decay": args.weight_decay * multiplier} for multiplier in (1.0, 0.0)
    ]


def stack_layers(names, read):
    """Tensors under Megatron-LM's keys: layers stacked along a leading axis."""
    layered, result = {}, {}
    for name in names:
        optimizer = OPTIMIZER.fullmatch(name)
        prefix, bare = (f"optimizer.state.{optimizer[1]}.", optimizer[2]) if optimizer else ("", name)
        if bare.startswith(LAYERS):
            index, rest = bare[len(LAYERS) :].split(".", 1)
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
    check(
        args.transformer_impl == "transformer_engine",
        "only --transformer-impl transformer_engine has the stacked layers that are written here",
    )
    release = source.folder.name == "release"
    names = [name for name in manifest["tensors"] if not name.endswith(".gtp_padding")]
    values = stack_layers(names, source.tensor)
    layers = int(args.num_layers)
    extra = [
        (f"{LAYERS}{module}", i, layers)
        for i in range(layers)
        for module in ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
    ]
    if getattr(args, "qk_layernorm", False):
        extra += [(f"{LAYERS}self_attention.{norm}_layernorm", i, layers) for i in range(layers) for norm in "qk"]
    for key, i, count in [*extra, ("decoder.final_layernorm", 0, 1)]:
        values[f"{key}._extra_state/shard_{i}_{count}"] = [torch.empty(0, dtype=torch.uint8)]
    common = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": state["iteration"],
        "num_floating_point_operations_so_far": state["num_floating_point_operations_so_far"],
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
    if "optimizer" in state:
        check(
            state["optimizer"]["kind"] == "adam",
            f"the state of optimizer {state['optimizer']['kind']} is not converted; save with --no-save-optim",
        )
        groups = {
            "param_groups": param_groups(args, state["optimizer"]["step"], state["opt_param_scheduler"]["max_lr"])
        }
        common["optimizer"] = groups if args.params_dtype == torch.float32 else {"optimizer": groups}
        if "loss_scaler" in state:
            scaler = state["loss_scaler"]
            common["optimizer"]["grad_scaler"] = {
                "scale": torch.tensor([scaler["scale"]]),
                "growth_tracker": scaler["good_steps"],
                "hysteresis_tracker": scaler["hysteresis"],
            }
        common["opt_param_scheduler"] = state["opt_param_scheduler"]
    values["common_state/shard_0_1"] = [common]

    target = pathlib.Path(target)
    check(
        not (target / "latest_checkpointed_iteration.txt").exists(),
        f"{target} holds a checkpoint already; give another folder",
    )
    name = "release" if release else f"iter_{state['iteration']:07d}"
    partial = target / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    dcp.save(
        values,
        storage_writer=FileSystemWriter(str(partial)),
        planner=DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )
    (partial / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}), encoding="utf-8"
    )
    os.rename(partial, target / name)
    (target / "latest_checkpointed_iteration.txt").write_text(
        "release" if release else str(state["iteration"]), encoding="utf-8"
    )
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
    finished = subprocess.run(
        [tool, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False
    )
    check(finished.returncode == 0, finished.stderr.strip() or f"{tool} ended with {finished.returncode}")
    return finished.stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("direction", choices=("import", "export"))
    parser.add_argument("source", help="a checkpoint folder, or one iteration in it")
    parser.add_argument("target", help="folder of the new checkpoint")
    parser.add_argument("--weights-only", action="store_true", help="leave the optimizer's state (import)")
    parser.add_argument("--vocab-size", type=int, help="true vocabulary, where the checkpoint does not say it (import)")
    parser.add_argument(
        "--padded-vocab-size",
        type=int,
        help="embedding rows to keep or fill with zeros; default: all that are stored (import)",
    )
    parser.add_argument("--tool", help="path of gpt_tool")
    options = parser.parse_args()
    try:
        if options.direction == "export":
            check(
                not (options.weights_only or options.vocab_size or options.padded_vocab_size),
                "--weights-only, --vocab-size and " "--padded-vocab-size belong to import",
            )
            run_tool(find_tool(options.tool), "inspect", "--verify", options.source)
            written = write_megatron(options.source, options.target)
            print(f"exported {options.source} to {written}; load it with --no-load-rng")
            return 0
        parent = pathlib.Path(options.target).resolve().parent
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".convert-") as folder:
            manifest = read_megatron(
                options.source, folder, options.weights_only, options.vocab_size, options.padded_vocab_size
            )
            run_tool(
                find_tool(options.tool), "import", "--format", "state", "--input", folder, "--output", options.target
            )
        arguments = manifest["arguments"]
        print(
            f"imported {options.source} to {options.target}: iteration {manifest['state']['iteration']}, vocabulary "
            f"{arguments['vocab_size']} in {arguments['padded_vocab_size']} rows (--padded-vocab-size)"
        )
        return 0
    except (ConversionError, OSError) as error:
        print(f"convert_megatron_checkpoint.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""Megatron-LM checkpoints come in with the numbers that the reference printed, and go out in its layout.

tests/data/megatron holds three checkpoints of the reference after five steps (two of them without optimizer state) and,
in reference.json, what it printed: command lines, losses, and sum and norm of every rank's parameters.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest

from conversion_support import TOOL, step_losses, tool, train

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "convert_megatron_checkpoint.py"
sys.path.insert(0, str(SCRIPT.parent))

import torch  # noqa: E402  (found through PGPT_PYTHON)

import convert_megatron_checkpoint as convert  # noqa: E402
import megatron_layouts as layouts  # noqa: E402

DATA = pathlib.Path(os.environ.get("PGPT_TEST_DATA", ROOT / "tests" / "data")) / "megatron"
REFERENCE = json.loads((DATA / "reference.json").read_text(encoding="utf-8"))
FP32, GTP2, TP2_PP2 = "llama.fp32", "gtp2-llama.bf16", "tp2-pp2-llama.bf16"


def flags(name):
    """The reference's command line for this program and any layout."""
    text = REFERENCE[name]["flags"].replace("--save DIR --save-interval 5 --ckpt-format torch_dist", "")
    # A reference with two tensor-parallel ranks pads its vocabulary to 256 rows.
    text = text.replace("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", "--padded-vocab-size 256")
    text = text.replace("--tensor-parallel-num-weight-shards 2", "")
    return text + " --distributed-backend gloo"


class Checkpoints(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        for name, file in (
            (FP32, "llama.fp32.tgz"),
            (GTP2, "gtp2-llama.bf16.weights.tgz"),
            (TP2_PP2, "tp2-pp2-llama.bf16.weights.tgz"),
        ):
            with tarfile.open(DATA / file) as archive:
                archive.extractall(cls.folder / "theirs")
            cls.run_script("import", cls.folder / "theirs" / name, cls.folder / name)

    @staticmethod
    def run_script(*arguments, expected=0):
        finished = subprocess.run(
            [sys.executable, "-B", str(SCRIPT), *map(str, arguments), "--tool", TOOL],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert finished.returncode == expected, finished.stdout + finished.stderr
        return finished.stdout + finished.stderr

    def losses(self, name, *parts, ranks=1):
        metrics = self.folder / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        codes, printed = train(flags(name), "--metrics-file", [metrics], *parts, ranks=ranks)
        self.assertEqual(codes, [0] * ranks, printed)
        return step_losses(metrics)

    def test_parameters_are_those_of_the_reference(self):
        for name, stages, tensor in ((FP32, 1, 1), (GTP2, 1, 1), (TP2_PP2, 2, 2)):
            with self.subTest(name):
                imported = convert.NativeCheckpoint(self.folder / name)
                parts = {}
                for rank, parameters in REFERENCE[name]["final"].items():
                    first_layer = 2 // stages * (int(rank) // tensor if stages > 1 else 0)
                    for parameter, numbers in parameters.items():
                        if parameter.startswith(convert.LAYERS):
                            layer, rest = parameter[len(convert.LAYERS) :].split(".", 1)
                            parameter = f"{convert.LAYERS}{int(layer) + first_layer}.{rest}"
                        parts.setdefault(parameter, []).append(numbers)
                weights = [key for key in imported.manifest["tensors"] if not key.startswith("optimizer.")]
                self.assertEqual(set(weights), set(parts))
                for parameter, ranks in parts.items():
                    values = imported.tensor(parameter).double()
                    ranks = ranks[:1] if values.dim() == 1 else ranks  # norms are held by every rank
                    # Two fp64 sums of the same n <= 65536 numbers differ by at most 2 n 2^-53 sum(|x|).
                    bound = 2 * 65536 * 2.0**-53
                    self.assertLessEqual(
                        abs(sum(numbers[1] for numbers in ranks) - values.sum().item()),
                        bound * values.abs().sum().item(),
                    )
                    squares = sum(numbers[2] ** 2 for numbers in ranks)
                    self.assertLessEqual(abs(squares - values.square().sum().item()), 4 * bound * squares)

    def test_the_loss_continues_in_every_layout(self):
        degrees_and_ranks = (
            ("", 1),
            ("", 2),
            ("--tensor-parallel-num-weight-shards 2", 2),
            ("--tensor-parallel-num-weight-shards 4", 4),
        )
        for name, ours_bound, loading in (
            (FP32, 1e-5, ""),
            (GTP2, 5e-3, "--no-load-optim"),
            (TP2_PP2, None, "--no-load-optim"),
        ):
            with self.subTest(name):
                found = [
                    self.losses(
                        name,
                        "--train-iters 6 --override-opt-param-scheduler --load",
                        [self.folder / name],
                        loading,
                        degrees,
                        ranks=ranks,
                    )[0]
                    for degrees, ranks in degrees_and_ranks
                ]
                # Mean of 256 token losses of size 4, summed in fp32 in another order: some units of 4 * 6e-8.
                self.assertLess(max(found) - min(found), 4e-6)
                # The last step gained between the gain of the step before and nothing.
                before = [step["losses"]["lm loss"] for step in REFERENCE[name]["steps"]][-2:]
                self.assertLess(found[0], before[1])
                self.assertGreater(found[0], before[1] - (before[0] - before[1]))
                if ours_bound is not None:
                    # This program's own run of the same command line, within the reference's bounds for later steps.
                    degrees, ranks = ("--tensor-parallel-num-weight-shards 2", 2) if name == GTP2 else ("", 1)
                    own = self.losses(name, "--train-iters 6", degrees, ranks=ranks)
                    self.assertEqual(len(own), 6)
                    self.assertAlmostEqual(found[0], own[5], delta=ours_bound)

    def test_the_optimizer_continues(self):
        own = self.losses(FP32, "--train-iters 8")
        found = self.losses(FP32, "--train-iters 8 --override-opt-param-scheduler --load", [self.folder / FP32])
        self.assertEqual(len(found), 3)
        for ours, theirs in zip(found, own[5:]):
            self.assertAlmostEqual(ours, theirs, delta=1e-5)
        # With fresh moments the path is another one.
        fresh = self.losses(FP32, "--train-iters 8 --no-load-optim --load", [self.folder / FP32])
        self.assertGreater(abs(fresh[2] - own[7]), 1e-3)

    def test_permuted_gate_and_up_rows_are_worse(self):
        restore = layouts.gather_gate_up
        layouts.gather_gate_up = lambda stored, degrees: stored
        try:
            with tempfile.TemporaryDirectory() as folder:
                convert.read_megatron(self.folder / "theirs" / GTP2, folder)
                finished = tool("import --format state --input", [folder], "--output", [self.folder / "permuted"])
                self.assertEqual(finished.returncode, 0, finished.stderr)
        finally:
            layouts.gather_gate_up = restore
        right = self.losses(GTP2, "--train-iters 6 --no-load-optim --load", [self.folder / GTP2])[0]
        wrong = self.losses(GTP2, "--train-iters 6 --no-load-optim --load", [self.folder / "permuted"])[0]
        self.assertGreater(wrong, right + 0.2)

    def test_export_and_import_give_the_same_checkpoint(self):
        exported = self.folder / "exported"
        self.run_script("export", self.folder / FP32, exported)
        theirs = convert.MegatronCheckpoint(self.folder / "theirs" / FP32 / "iter_0000005")
        ours = convert.MegatronCheckpoint(exported / "iter_0000005")
        # All that Megatron-LM itself wrote is there, in the same shapes and types, except states that only it can have.
        missing = set(theirs.entries) - set(ours.entries)
        self.assertEqual({key.split("/")[0] for key in missing}, {"rng_state", "rerun_state_machine_state"})
        self.assertEqual(set(ours.entries) - set(theirs.entries), set())
        for key, entry in theirs.tensors().items():
            self.assertEqual(
                (entry.size, entry.properties.dtype), (ours.entries[key].size, ours.entries[key].properties.dtype), key
            )
            self.assertTrue(torch.equal(theirs.tensor(key), ours.tensor(key)), key)
        expected, found = theirs.common(), ours.common()
        self.assertEqual(found["iteration"], expected["iteration"])
        self.assertEqual(found["opt_param_scheduler"], expected["opt_param_scheduler"])
        self.assertEqual(
            [set(group) for group in found["optimizer"]["param_groups"]],
            [set(group) for group in expected["optimizer"]["param_groups"]],
        )
        for group, other in zip(found["optimizer"]["param_groups"], expected["optimizer"]["param_groups"]):
            for key in ("step", "betas", "eps", "weight_decay", "wd_mult", "lr_mult", "max_lr", "min_lr"):
                self.assertEqual(group[key], other[key], key)
        for key in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "ffn_hidden_size",
            "layernorm_epsilon",
            "swiglu",
            "consumed_train_samples",
            "padded_vocab_size",
            "params_dtype",
            "normalization",
            "kv_channels",
        ):
            self.assertEqual(getattr(found["args"], key), getattr(expected["args"], key), key)
        self.run_script("import", exported, self.folder / "again")
        finished = tool("diff", [self.folder / FP32, self.folder / "again"])
        self.assertEqual(finished.returncode, 0, finished.stdout)

    def test_a_run_of_ours_continues_exactly_after_the_detour(self):
        saved, theirs, back = (self.folder / name for name in ("saved", "as-theirs", "back"))
        padded = "--ffn-hidden-size 200"  # 400 rows: shards of GTP 2 have padding
        parts = "--bf16 --tensor-parallel-num-weight-shards 2 --weight-init layout-invariant"
        whole = self.losses(FP32, padded, parts, "--train-iters 4 --lr-decay-iters 4", ranks=2)
        self.losses(
            FP32,
            padded,
            parts,
            "--train-iters 4 --lr-decay-iters 4 --exit-interval 2 --save-interval 2 --save",
            [saved],
            ranks=2,
        )
        self.run_script("export", saved, theirs)
        self.run_script("import", theirs, back)
        rest = self.losses(FP32, padded, parts, "--train-iters 4 --lr-decay-iters 4 --load", [back], ranks=2)
        self.assertEqual(rest, whole[2:])

    def test_what_cannot_be_told_is_refused(self):
        damaged = self.folder / "damaged"
        shutil.copytree(self.folder / "theirs" / GTP2, damaged)
        (damaged / "iter_0000005" / "metadata.json").unlink()
        self.assertIn("not complete", self.run_script("import", damaged, self.folder / "never", expected=2))
        self.assertIn(
            "holds a checkpoint already",
            self.run_script("import", self.folder / "theirs" / FP32, self.folder / FP32, expected=2),
        )
        self.assertFalse((self.folder / "never").exists())


class Layouts(unittest.TestCase):
    """Layouts of which no real checkpoint is at hand, put together by the rules of the reference's saving side."""

    @staticmethod
    def stored(whole, tensor, gtp, gated, row_cut):
        """What T x G ranks save of a whole weight: each holds its shard, and a gated one is halved as it lies there."""
        if not row_cut:
            parts = [whole]
        elif gated:
            gates, ups = whole.chunk(2)
            parts = [torch.cat(pair) for pair in zip(gates.chunk(tensor), ups.chunk(tensor))]
        else:
            parts = list(whole.chunk(tensor))
        shards = []
        for part in parts:
            padding = -len(part) % (16 * gtp) if gtp > 1 else 0
            part = torch.cat([part, torch.full((padding, part.shape[1]), -1.0)])
            shards += part.chunk(gtp)
        if not gated:
            return torch.cat(shards)
        saved = torch.empty(sum(map(len, shards)), whole.shape[1])
        half = len(shards[0]) // 2
        for index, shard in enumerate(shards):
            saved[index * half : (index + 1) * half] = shard[:half]
            saved[len(saved) // 2 + index * half : len(saved) // 2 + (index + 1) * half] = shard[half:]
        return saved

    def test_every_layout_is_undone(self):
        for tensor in (1, 2):
            for gtp in (1, 2, 4):
                degrees = convert.Degrees(
                    type(
                        "Args",
                        (),
                        {"tensor_model_parallel_size": tensor, "tensor_parallel_num_weight_shards": tensor * gtp},
                    )
                )
                for rows in (64 * tensor, 40 * tensor, 8 * tensor):
                    whole = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)
                    for name, gated, row_cut in (
                        ("a.linear_fc1.weight", gtp > 1, True),
                        ("a.linear_qkv.weight", False, True),
                        ("a.linear_fc2.weight", False, False),
                    ):
                        with self.subTest(tensor=tensor, gtp=gtp, rows=rows, name=name):
                            saved = self.stored(whole, tensor, gtp, gated, row_cut)
                            found, padding = convert.logical_rows(name, saved, rows, degrees, gated)
                            self.assertTrue(torch.equal(found, whole))
                            # The padding comes along where one rank's tail holds it.
                            padded = len(saved) - rows
                            known = padded > 0 and (tensor == 1 or not row_cut)
                            self.assertEqual(0 if padding is None else len(padding), padded if known else 0)
                            if padding is not None:
                                self.assertTrue(bool((padding == -1).all()))

    def test_a_wrong_number_of_rows_is_refused(self):
        degrees = convert.Degrees(
            type("Args", (), {"tensor_model_parallel_size": 1, "tensor_parallel_num_weight_shards": 2})
        )
        with self.assertRaisesRegex(convert.ConversionError, "is stored with 48 rows"):
            convert.logical_rows("a.linear_qkv.weight", torch.zeros(48, 3), 40, degrees, False)


if __name__ == "__main__":
    unittest.main()

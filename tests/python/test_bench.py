"""The parts of scripts/bench that need no GPU: the corpus writer, the phases of a trace, the table."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
sys.path.insert(0, str(ROOT / "scripts" / "bench"))

import corpus  # noqa: E402
import disk  # noqa: E402
import models  # noqa: E402
import phases  # noqa: E402
import report  # noqa: E402

PROGRAM = os.environ["PGPT_PROGRAM"]


def run(*arguments):
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=120, check=False)


class Corpus(unittest.TestCase):
    """The program reads what the benchmark's corpus writer wrote, and its loss shows the distribution of the tokens."""

    def first_loss(self, folder, kind, vocab_options=()):
        prefix = pathlib.Path(folder) / kind
        corpus.write_corpus(str(prefix), 20_000, 256, kind)
        metrics = pathlib.Path(folder) / f"{kind}.jsonl"
        recipe = ["--config", str(CONFIGS / "tiny-cpu.json"), "--data-path", str(prefix), "--split", "1,0,0"]
        result = run(*recipe, "--eval-iters", "0", "--metrics-file", str(metrics), *vocab_options)
        self.assertEqual(result.returncode, 0, result.stderr)
        steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        return steps[-1]["lm_loss"]

    def test_uniform_tokens_cannot_be_learned_and_zipf_tokens_can(self):
        with tempfile.TemporaryDirectory() as folder:
            # ln 256 = 5.545 is the entropy of uniform tokens. 50 steps of 512 tokens revisit the corpus at most twice,
            # too little to learn it by heart; the loss of one step strays by about sqrt(1 / 512) = 0.044 or less.
            uniform = self.first_loss(folder, "uniform")
            self.assertGreater(uniform, 5.545 - 0.15)
            # The entropy of 1 / (1 + id) over 256 ids is 4.29; learning frequencies alone goes most of the way.
            zipf = self.first_loss(folder, "zipf")
            self.assertLess(zipf, 5.0)

    def test_sizes_of_the_files_follow_the_format(self):
        with tempfile.TemporaryDirectory() as folder:
            for vocab, size in ((256, 2), (70_000, 4)):
                prefix = pathlib.Path(folder) / str(vocab)
                self.assertEqual(corpus.write_corpus(str(prefix), 5000, vocab, "uniform"), 5000 * size)
                self.assertEqual(prefix.with_suffix(".bin").stat().st_size, 5000 * size)
                index = prefix.with_suffix(".idx").read_bytes()
                sequences = int.from_bytes(index[18:26], "little")
                self.assertEqual(len(index), 34 + 12 * sequences + 8 * (sequences + 1))
                lengths = [int.from_bytes(index[34 + 4 * i : 38 + 4 * i], "little") for i in range(sequences)]
                self.assertEqual(sum(lengths), 5000)


class Checkpoints(unittest.TestCase):
    def test_the_disk_is_measured_and_left_clean(self):
        with tempfile.TemporaryDirectory() as folder:
            found = disk.rates(folder, 2, 16 << 20, 8 << 20)
            self.assertEqual(list(pathlib.Path(folder).iterdir()), [])
        for what in ("write", "read"):
            self.assertGreater(found[what], 0)
            self.assertIn(found[what + "_mode"], found[what + "_probe"])

    def test_a_small_model_is_saved_and_loaded(self):
        with tempfile.TemporaryDirectory() as folder:
            output = pathlib.Path(folder) / "results.json"
            script = ROOT / "scripts" / "bench_checkpoint.sh"
            command = [script, "--program", PROGRAM, "--model", "tiny-cpu", "--folder", folder, "--probe-gb", "0.01"]
            command += ["--async", "--output", output]
            result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            found = json.loads(output.read_text(encoding="utf-8"))
            self.assertEqual([path.name for path in pathlib.Path(folder).iterdir()], ["results.json"])
        # 115,008 parameters with two moments in fp32: table 256 x 64; in each of two layers qkv 128 x 64, proj
        # 64 x 64, fc1 384 x 64, fc2 64 x 192 and two norms; the last norm. Then a header of some pages.
        self.assertGreater(found["bytes"], 12 * 115_008)
        self.assertLess(found["bytes"], 12 * 115_008 + 16_384)
        self.assertEqual(set(found["runs"]), {"train", "save", "load", "async"})
        self.assertEqual(len(found["async_stalls_s"]), 2)
        for run in found["runs"].values():
            self.assertGreater(run["host_bytes"], 10 << 20)
        self.assertIn("| save |", result.stdout)


@unittest.skipUnless(importlib.util.find_spec("torch"), "needs torch")
class Cpu(unittest.TestCase):
    def test_the_comparison_on_the_cpu_trains_the_same_model_with_every_contestant(self):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(ROOT / "scripts" / "bench" / "cpu.py"), "--program", PROGRAM]
            command += ["--models", "tiny-cpu", "--threads", "1", "--precisions", "fp32,bf16", "--rounds", "2"]
            command += ["--warm-up", "1", "--steps", "3", "--output", folder]
            result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            self.assertEqual(result.returncode, 0, result.stderr)
            document = json.loads((pathlib.Path(folder) / "cpu.json").read_text(encoding="utf-8"))
            rows = document["results"]
            self.assertEqual([row["precision"] for row in rows], ["fp32"] * 3 + ["bf16"] * 3)
            for row in rows:
                self.assertEqual(len(row["step_ms"]), 2 * 3)
                # ln 256 = 5.545 for uniform tokens and an untrained model; a few steps at 1e-3 stray by less than 0.3.
                self.assertLess(abs(row["loss"] - 5.545), 0.3)
            for ours, *peers in (rows[:3], rows[3:]):
                self.assertAlmostEqual(ours["ratio"], min(peer["ms"] for peer in peers) / ours["ms"])
            table = (pathlib.Path(folder) / "cpu.md").read_text(encoding="utf-8")
            self.assertIn("| tiny-cpu | fp32 | 1 | pretrain_gpt |", table)


class Report(unittest.TestCase):
    @staticmethod
    def result(kind, step_ms, gpus=1, **more):
        base = {"name": kind, "kind": kind, "model": "llama-1.3b", "micro_batch": 8, "seq": 2048, "gpus": gpus}
        return {**base, "step_ms": step_ms, **more}

    def test_ratios_compare_runs_of_the_same_invocation(self):
        model = models.load("llama-1.3b")
        floor = {**self.result("floor", None), "ms": 200.0, "parts_ms": {"optimizer": 10.0}}
        slowest = {**self.result("floor", None, gpus=2), "ms": 205.0, "parts_ms": {"optimizer": 12.0}}
        results = [
            floor,
            slowest,
            self.result("replay", [205.0], gtp=1),
            self.result("replay", [198.0], gpus=2, gtp=2),
            self.result("replay", [209.0], gpus=2, gtp=1),
            self.result("peer", [300.0]),
            self.result("peer", [330.0], gpus=2),
            self.result("sketch", [260.0]),
            self.result("ours", [240.0, 260.0, 250.0]),
            self.result("ours", [220.0], gpus=2, gtp=2),
        ]
        for entry in results:
            report.derive(entry, model)
        report.compare(results)
        ours, gtp = results[-2:]
        self.assertEqual((ours["median_ms"], ours["min_ms"], ours["max_ms"]), (250.0, 240.0, 260.0))
        self.assertAlmostEqual(ours["tokens_per_s"], 8 * 2048 / 0.25)
        self.assertAlmostEqual(ours["of_floor"], 200 / 250)
        self.assertAlmostEqual(ours["of_peer"], 300 / 250)
        self.assertAlmostEqual(ours["of_sketch"], 260 / 250)
        self.assertAlmostEqual(ours["of_replay"], 205 / 250)
        # Half the optimizer at GTP 2, and the references that ran on two GPUs.
        self.assertAlmostEqual(gtp["of_floor"], (205 - 6) / 220)
        self.assertAlmostEqual(gtp["of_replay"], 198 / 220)
        self.assertAlmostEqual(gtp["of_peer"], 330 / 220)

    def test_a_run_that_failed_shows_its_reason(self):
        results = [{**self.result("ours", None), "error": "exit code 4: out of memory"}]
        del results[0]["step_ms"]
        report.compare(results)
        self.assertIn("exit code 4: out of memory", report.text_tables(results))


class Phases(unittest.TestCase):
    """A made-up trace of one layer: four steps of 16 ms products, 0.5 ms attention, 0.1 ms norm and 1 ms optimizer."""

    PRODUCT, NORM = "nvjet_sm90_hsh_128x256", "_ZN4pgpt12_GLOBAL__N__9bbc_7_norm_cu_e817_14forward_kernelIffE"
    ADAM = "_ZN4pgpt12_GLOBAL__N__1ae9_12_optimizer_cu_394b_11step_kernelIffNS2_4AdamEE"

    def events(self):
        events, now = [], 0
        for _ in range(4):
            for name, count, length in (
                (self.PRODUCT, 4, 1_000_000),
                (self.PRODUCT, 1, 2_000_000),
                ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 1, 500_000),
                (self.PRODUCT, 10, 1_000_000),
            ):
                for _ in range(count):
                    events.append((name, now, now + length))
                    now += length
            # 0.3 ms of the collective run beside a product and 0.2 ms alone; then nothing for 0.2 ms.
            events.append(("ncclDevKernel_AllGather_RING_LL", now - 300_000, now + 200_000))
            now += 400_000
            events.append((self.NORM, now, now + 100_000))
            events.append((self.ADAM, now + 100_000, now + 1_100_000))
            now += 1_100_000
        return sorted(events, key=lambda event: event[1])

    def test_a_trace_is_divided_into_phases(self):
        model = dataclasses.replace(models.load("llama-1.3b"), layers=1)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "trace.0"
            events = self.events()
            names = sorted({name for name, _, _ in events})
            lines = [f"N {index} {name}" for index, name in enumerate(names)]
            lines += [f"E {names.index(name)} {start} {end - start} 7" for name, start, end in events]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            read = phases.read_trace(path)
        self.assertEqual(read, events)
        found = phases.summarise(read, model, 2)
        self.assertAlmostEqual(found["step_ms"], 18.0)
        expected = {"products": 16, "attention": 0.5, "communication": 0.5, "norm and residual": 0.1, "optimizer": 1}
        self.assertEqual(found["phases_ms"].keys(), expected.keys())
        for phase, milliseconds in expected.items():
            self.assertAlmostEqual(found["phases_ms"][phase], milliseconds)
        self.assertAlmostEqual(found["gaps_ms"], 0.2)
        self.assertAlmostEqual(found["exposed_communication_ms"], 0.2)
        self.assertAlmostEqual(found["products_ms"]["output forward"], 2)
        self.assertAlmostEqual(found["products_ms"]["qkv wgrad"], 1)
        # 2 tokens rows columns operations in 1 ms.
        self.assertAlmostEqual(found["products_tflops"]["proj dgrad"], 2 * 16384 * 2048 * 2048 / 1e9)
        self.assertIsNone(phases.summarise(read, model, 4))

    def test_product_kinds_follow_the_step(self):
        kinds = phases.product_kinds(2)
        self.assertEqual(len(kinds), 12 * 2 + 3)
        self.assertEqual(kinds[8:12], ["output forward", "output dgrad", "output wgrad", "fc2 dgrad"])


if __name__ == "__main__":
    unittest.main()

"""The recipes of configs/ parse, have the sizes of the models they are named for, and fit the model table of the
benchmark; gpt_tool estimates them."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
sys.path.insert(0, str(ROOT / "scripts" / "bench"))

import models  # noqa: E402

PROGRAM = os.environ["PGPT_PROGRAM"]
TOOL = os.environ["PGPT_TOOL"]

# Parameters of each model, counted by hand: V the padded vocabulary, h the width, f that of the feed-forward block.
# GPT-2: V h + s h + L (12 h^2 + 13 h) + 2 h; Llama: 2 V h + L (4 h^2 + 3 h f + 2 h) + h.
EXPECTED = {
    "gpt2-124m": 50304 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768,
    "gpt2-1558m": 50304 * 1600 + 1024 * 1600 + 48 * (12 * 1600**2 + 13 * 1600) + 2 * 1600,
    "llama-1.3b": 2 * 32000 * 2048 + 24 * (4 * 2048**2 + 3 * 2048 * 5504 + 2 * 2048) + 2048,
    "llama-3b": 2 * 32000 * 3072 + 28 * (4 * 3072**2 + 3 * 3072 * 8192 + 2 * 3072) + 3072,
    "llama-7b": 2 * 32000 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096,
    "gpt2-10m": 16384 * 256 + 512 * 256 + 8 * (12 * 256**2 + 13 * 256) + 2 * 256,
    "llama-10m": 2 * 8192 * 256 + 8 * (4 * 256**2 + 3 * 256 * 704 + 2 * 256) + 256,
    # Two layers of grouped queries (4 heads and 2 groups of 16), tied.
    "tiny-cpu": 256 * 64 + 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 192 + 2 * 64) + 64,
}


def run(*arguments):
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=120, check=False)


class Recipes(unittest.TestCase):
    def test_every_recipe_is_listed_here(self):
        self.assertEqual(sorted(path.stem for path in CONFIGS.glob("*.json")), sorted(EXPECTED))

    def test_every_recipe_has_the_parameters_of_its_model(self):
        for name, parameters in EXPECTED.items():
            with self.subTest(name):
                result = run("--config", str(CONFIGS / f"{name}.json"), "--mock-data", "--dry-run", "--world-size", "1")
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertNotIn("WARNING", result.stdout + result.stderr)
                found = re.search(r"parameters of the model: (\d+)", result.stdout)
                self.assertEqual(int(found.group(1)), parameters)

    def test_every_recipe_runs_on_two_ranks_with_gtp(self):
        for name in EXPECTED:
            with self.subTest(name):
                recipe = ["--config", str(CONFIGS / f"{name}.json"), "--mock-data", "--dry-run", "--world-size", "2"]
                result = run(*recipe, "--tensor-parallel-num-weight-shards", "2")
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertIn("data parallel 1 x GTP 2", result.stdout)

    def test_the_table_of_the_benchmark_counts_the_same_parameters(self):
        for name, parameters in EXPECTED.items():
            with self.subTest(name):
                model = models.load(name)
                norms = (2 * model.layers + 1) * model.hidden * (1 if model.gated else 2)
                biases = model.layers * sum(rows for rows, _ in model.matrices) if model.biases else 0
                self.assertEqual(model.parameters + norms + biases, parameters)

    def test_operations_follow_the_formula(self):
        # gpt2-124m: N = L 12 h^2 + V h, a token costs 6 N + 6 L s h.
        matmul = 12 * 12 * 768**2 + 50304 * 768
        self.assertEqual(models.load("gpt2-124m").flops, 64 * 1024 * (6 * matmul + 6 * 12 * 1024 * 768))

    def test_a_recipe_trains(self):
        with tempfile.TemporaryDirectory() as folder:
            metrics = pathlib.Path(folder) / "run.jsonl"
            recipe = ["--config", str(CONFIGS / "tiny-cpu.json"), "--mock-data", "--metrics-file", str(metrics)]
            result = run(*recipe)
            self.assertEqual(result.returncode, 0, result.stderr)
            steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
            losses = [step["lm_loss"] for step in steps if step["kind"] == "step"]
            self.assertEqual(len(losses), 50)
            self.assertLess(losses[-1], losses[0])


class Estimate(unittest.TestCase):
    def test_gpt_tool_estimates_a_recipe_for_any_layout(self):
        recipe = ["--config", str(CONFIGS / "llama-7b.json"), "--micro-batch-size", "2", "--world-size", "2"]
        found = {}
        for shards in (1, 2):
            command = [TOOL, "estimate", "--json", *recipe, "--tensor-parallel-num-weight-shards", str(shards)]
            result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            self.assertEqual(result.returncode, 0, result.stderr)
            found[shards] = json.loads(result.stdout)
        for sizes in found.values():
            self.assertEqual(sizes["parameters"], EXPECTED["llama-7b"])
            rank = sizes["pipeline_ranks"][0]
            self.assertEqual(rank["weight_bytes"], 2 * rank["parameters"])
            self.assertEqual(rank["moment_bytes"], 8 * rank["parameters"])
            fullest = max(m["activation_bytes"] + m["logit_bytes"] + m["work_bytes"] for m in rank["moments"])
            self.assertEqual(rank["peak_bytes"], rank["resident_bytes"] + fullest)
            self.assertEqual(sizes["recompute"][0]["peak_bytes"], rank["peak_bytes"])
        # Norm gains stay whole: 65 of 4096.
        whole, half = (found[shards]["pipeline_ranks"][0]["parameters"] for shards in (1, 2))
        self.assertEqual(half, (whole - 65 * 4096) // 2 + 65 * 4096)

    def test_gpt_tool_says_what_is_wrong(self):
        command = [TOOL, "estimate", "--config", str(CONFIGS / "llama-7b.json"), "--num-layer", "3"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(result.returncode, 2)
        self.assertIn("--num-layer", result.stderr)


if __name__ == "__main__":
    unittest.main()

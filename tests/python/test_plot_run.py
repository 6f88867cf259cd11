"""scripts/plot_run.py draws what a run writes with --metrics-file, and says what there is when a key does not exist.

Drawing needs matplotlib; without it that test is skipped. Everything before the drawing is tested without it.
"""

import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

from conversion_support import TRAINING, train

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "plot_run.py"
MODEL = (
    "--vocab-size 64 --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --train-iters 3"
)


def load_script():
    specification = importlib.util.spec_from_file_location("plot_run", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class PlotRun(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = pathlib.Path(temporary.name)
        cls.metrics = cls.folder / "run.jsonl"
        codes, printed = train(TRAINING, MODEL, ["--metrics-file", cls.metrics])
        assert codes == [0], printed

    def plot(self, *arguments):
        return subprocess.run(
            [sys.executable, str(SCRIPT), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=self.folder,
        )

    def test_every_default_key_is_in_a_real_metrics_file(self):
        script = load_script()
        records = script.read_records(self.metrics)
        steps = [record for record in records if record["kind"] == "step"]
        panels = script.choose_panels([("run", records)], "iteration", None)
        self.assertEqual([key for key, _ in panels], list(script.DEFAULT_KEYS))
        for key, curves in panels:
            self.assertEqual(curves, [("run", [1, 2, 3], [record[key] for record in steps])])

    def test_default_keys_that_are_absent_are_skipped(self):
        script = load_script()
        with_loss = [{"iteration": 1, "lm_loss": 2.5, "grad_norm": None}]
        without = [{"iteration": 1, "other": 1}]
        panels = script.choose_panels([("a", with_loss), ("b", without)], "iteration", None)
        self.assertEqual(panels, [("lm_loss", [("a", [1], [2.5])])])

    def test_a_key_that_does_not_exist_is_refused_with_those_that_do(self):
        done = self.plot(self.metrics, "--keys", "lm_loss,learning_rate")
        self.assertEqual(done.returncode, 1)
        self.assertIn("'learning_rate'", done.stderr)
        for key in ("lm_loss", "grad_norm", "learning_rate_applied", "learning_rate_printed"):
            self.assertIn(f"{key}, ", done.stderr.split("it has: ")[1])
        other = self.folder / "other.jsonl"
        other.write_text(json.dumps({"iteration": 1, "other": 1}) + "\n", encoding="utf-8")
        done = self.plot(other)
        self.assertEqual(done.returncode, 1)
        self.assertIn("has: iteration, other", done.stderr)
        other.write_text("[1]\n", encoding="utf-8")
        self.assertIn("line 1 is no JSON object", self.plot(other).stderr)
        self.assertIn("missing.jsonl", self.plot("missing.jsonl").stderr)

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
    def test_the_default_keys_are_drawn(self):
        done = self.plot(self.metrics, "--output", "drawn.png")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((self.folder / "drawn.png").read_bytes()[:8], b"\x89PNG\r\n\x1a\n")


if __name__ == "__main__":
    unittest.main()

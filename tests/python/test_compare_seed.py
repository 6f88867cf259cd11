"""scripts/compare_seed.py must accept runs inside the tolerances and reject every kind of run outside them."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "compare_seed.py"

# A CPU run of the reference's re-execution with fused-form attention.
GOOD = [
    {"iteration": 1, "consumed_samples": 2, "lm_loss": 4.8604941, "grad_norm": 2.1261091, "learning_rate_printed": 3e-4},
    {"iteration": 2, "consumed_samples": 4, "lm_loss": 4.8272734, "grad_norm": 2.4799, "learning_rate_printed": 1.65e-4},
    {"iteration": 3, "consumed_samples": 6, "lm_loss": 4.7820041, "grad_norm": 2.4129, "learning_rate_printed": 3e-5},
]
GTP_LOG = ("> initialized gtp weight remat with size 2\n"
           " > number of parameters on (tensor, gtp_remat, pipeline) model parallel rank (0, 0, 0): 156928\n")


class CompareSeed(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def write(self, name, records):
        path = pathlib.Path(self.folder.name) / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    def changed(self, step, **values):
        return [dict(record, **values) if index == step else record for index, record in enumerate(GOOD)]

    def run_script(self, *arguments):
        return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60, check=False)

    def status_of(self, records, device="cpu"):
        return self.run_script("--gtp", self.write("gtp.jsonl", records), "--device", device).returncode

    def test_a_run_inside_the_tolerances_agrees(self):
        log = pathlib.Path(self.folder.name) / "gtp.log"
        log.write_text(GTP_LOG)
        finished = self.run_script("--gtp", self.write("gtp.jsonl", GOOD), "--control", self.write("dp.jsonl", GOOD),
                                   "--gtp-log", str(log))
        self.assertEqual(finished.returncode, 0, finished.stdout + finished.stderr)
        self.assertIn("agrees with the published runs", finished.stdout)
        self.assertIn("156928", finished.stdout)

    def test_each_figure_outside_its_tolerance_is_noticed(self):
        for step, values in ((0, {"lm_loss": 4.860444 + 1.1e-4}), (1, {"lm_loss": 4.827285 - 1.1e-4}),
                             (2, {"lm_loss": 4.781815 + 6.1e-4}), (1, {"grad_norm": 2.480 + 3.1e-3}),
                             (0, {"learning_rate_printed": 3.00001e-4}), (2, {"consumed_samples": 5}),
                             (1, {"lm_loss": None}), (1, {"grad_norm": float("nan")})):
            with self.subTest(step=step, values=values):
                self.assertEqual(self.status_of(self.changed(step, **values)), 1)

    def test_the_gpu_tolerance_is_tighter(self):
        records = self.changed(0, lm_loss=4.860444 + 7e-5)
        self.assertEqual(self.status_of(records, "cpu"), 0)
        self.assertEqual(self.status_of(records, "gpu"), 1)

    def test_a_missing_or_extra_step_is_an_error(self):
        for records in (GOOD[:2], [], GOOD + [dict(GOOD[2], iteration=4)]):
            self.assertEqual(self.status_of(records), 2)

    def test_a_control_that_is_not_finite_is_noticed(self):
        finished = self.run_script("--gtp", self.write("gtp.jsonl", GOOD),
                                   "--control", self.write("dp.jsonl", self.changed(1, lm_loss=float("inf"))))
        self.assertEqual(finished.returncode, 1)

    def test_a_log_with_another_gtp_size_is_noticed(self):
        log = pathlib.Path(self.folder.name) / "control.log"
        log.write_text(GTP_LOG)
        metrics = self.write("gtp.jsonl", GOOD)
        finished = self.run_script("--gtp", metrics, "--control", metrics, "--control-log", str(log))
        self.assertEqual(finished.returncode, 1)
        self.assertIn("expected 1", finished.stdout)


if __name__ == "__main__":
    unittest.main()

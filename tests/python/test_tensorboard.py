"""TensorBoard's own reader must read the event files that the program writes.

Needs the `tensorboard` package; without it these tests are skipped (the C++ tests decode the files too).
"""

import math
import os
import pathlib
import struct
import subprocess
import tempfile
import unittest

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError:
    EventAccumulator = None

BINARIES = pathlib.Path(os.environ.get("PGPT_PROGRAM", "bin/pretrain_gpt")).parent


def float32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


@unittest.skipUnless(EventAccumulator, "the tensorboard package is not installed")
class SampleRun(unittest.TestCase):
    """The numbers are those of write_sample() in tests/test_metrics.cpp."""

    @classmethod
    def setUpClass(cls):
        program = BINARIES / "test_io"
        if not program.exists():
            raise unittest.SkipTest(f"{program} is not built")
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        environment = dict(os.environ, PGPT_TENSORBOARD_SAMPLE=folder.name)
        subprocess.run([program, "a TensorBoard folder holds the sample run"], env=environment, check=True, timeout=60,
                       stdout=subprocess.DEVNULL)
        cls.events = EventAccumulator(folder.name, size_guidance={"scalars": 0, "tensors": 0})
        cls.events.Reload()

    def points(self, tag):
        return [(event.step, event.value) for event in self.events.Scalars(tag)]

    def test_scalars(self):
        self.assertEqual(self.points("lm loss"), [(1, float32(4.860444069)), (2, float32(4.860444069))])
        self.assertEqual(self.points("lm loss vs samples"), [(2, float32(4.860444069)), (4, float32(4.860444069))])
        self.assertEqual(self.points("learning-rate"), [(1, float32(1.65e-4)), (2, float32(1.65e-4))])
        self.assertEqual(self.points("grad-norm"), [(1, float32(2.126123456789012)), (2, float32(2.126123456789012))])
        self.assertEqual(self.points("mem-allocated-bytes"), [(1, float(2**40)), (2, float(2**40))])
        self.assertEqual(self.points("iteration-time"), [(2, 0.25)])
        self.assertEqual(self.points("optimizer-time"), [(2, 0.125)])
        self.assertEqual(self.points("lm loss validation"), [(2, 2.0)])
        self.assertEqual(self.points("lm loss validation ppl"), [(2, float32(math.exp(2)))])
        self.assertEqual(self.points("lm loss test vs samples"), [(4, 3.0)])
        self.assertEqual({event.wall_time for event in self.events.Scalars("lm loss")}, {1.5e9})
        # 6 curves of every step, 4 of memory, 2 of the second step, all but memory also over samples; 2 evaluations with
        # 2 curves each, also over samples; skipped samples, iteration time, throughput, one timer.
        self.assertEqual(len(self.events.Tags()["scalars"]), 2 * (6 + 2) + 4 + 2 * 2 * 2 + 4)

    def test_texts(self):
        self.assertEqual(self.events.Tags()["tensors"], ["bf16/text_summary", "data_path/text_summary"])
        texts = [self.events.Tensors(tag)[0] for tag in self.events.Tags()["tensors"]]
        self.assertEqual([t.tensor_proto.string_val[0] for t in texts], [b"True", b"['a b', \"c\"]"])
        self.assertEqual([t.step for t in texts], [0, 0])
        metadata = self.events.SummaryMetadata("bf16/text_summary")
        self.assertEqual(metadata.plugin_data.plugin_name, "text")


@unittest.skipUnless(EventAccumulator, "the tensorboard package is not installed")
class RealRun(unittest.TestCase):
    """A run of the program on one CPU rank, read back."""

    COMMAND = (
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 128 --num-layers 1 --hidden-size 32 --num-attention-heads 2 "
        "--seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2 --train-iters 3 "
        "--eval-interval 2 --eval-iters 1 --lr 3e-4 --min-lr 3e-5 --log-interval 1 --num-workers 0 "
        "--disable-bias-linear --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion "
        "--distributed-backend gloo"
    ).split()

    def test_curves(self):
        program = BINARIES / "pretrain_gpt"
        if not program.exists():
            self.skipTest(f"{program} is not built")
        with tempfile.TemporaryDirectory() as folder:
            command = [program, *self.COMMAND, "--tensorboard-dir", folder]
            environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
            done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=environment)
            self.assertEqual(done.returncode, 0, done.stdout[-2000:] + done.stderr[-2000:])
            events = EventAccumulator(folder, size_guidance={"scalars": 0, "tensors": 0})
            events.Reload()
            self.assertEqual([e.step for e in events.Scalars("lm loss")], [1, 2, 3])
            self.assertEqual([e.step for e in events.Scalars("lm loss vs samples")], [2, 4, 6])
            self.assertEqual([e.step for e in events.Scalars("lm loss validation")][0], 2)
            self.assertTrue(all(math.isfinite(e.value) for e in events.Scalars("grad-norm")))
            self.assertIn("num_layers/text_summary", events.Tags()["tensors"])


if __name__ == "__main__":
    unittest.main()

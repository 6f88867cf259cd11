"""What the conversion tests share: starting the programs on one or several ranks, and reading what they write."""

import json
import os
import pathlib
import socket
import subprocess

PROGRAM = os.environ.get("PGPT_PROGRAM", "")
TOOL = os.environ.get("PGPT_TOOL", "")
TRAINING = (
    "--mock-data --tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 2 --eval-interval 1000 "
    "--eval-iters 0 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 0 --lr-decay-style cosine --lr-decay-iters 8 "
    "--clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0 --seed 1234 --log-interval 1 --dataloader-type single "
    "--num-workers 0 --distributed-backend gloo"
)
TIMEOUT_SECONDS = 120


def words(*parts):
    """Flags as text or as lists, joined to one list of words."""
    result = []
    for part in parts:
        result += part.split() if isinstance(part, str) else [str(word) for word in part]
    return result


def tool(*parts):
    """Runs gpt_tool; the finished process."""
    return subprocess.run([TOOL, *words(*parts)], capture_output=True, text=True, timeout=TIMEOUT_SECONDS)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train(*parts, ranks=1):
    """Runs pretrain_gpt on ranks of this machine: (exit codes, what was printed after the arguments)."""
    environment = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
    )
    command = [PROGRAM, *words(*parts)]
    running = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(environment, RANK=str(rank), LOCAL_RANK=str(rank)),
        )
        for rank in range(ranks)
    ]
    try:
        printed = "".join(process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in running)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [process.returncode for process in running], printed.partition("end of arguments")[2] or printed


def step_losses(metrics_file):
    """The loss of each step, from --metrics-file."""
    losses = []
    for line in pathlib.Path(metrics_file).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            losses.append(record["lm_loss"])
    return losses

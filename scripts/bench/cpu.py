#!/usr/bin/env python3
"""Measures training speed on the CPU: pretrain_gpt beside PyTorch eager on the same model, tokens, cores and threads.

    scripts/bench.sh --cpu [--models llama-10m,gpt2-10m] [--threads 2,1] [--precisions fp32] [--output FOLDER] [...]

The two take turns for --rounds rounds, each turn a process of its own that trains --warm-up and then --steps steps of
one micro-batch, with gradient clipping and AdamW. PyTorch runs the modules of peer_fsdp2.py without torch.compile:
torch.nn layers, F.scaled_dot_product_attention, fp32 weights, torch.autocast for bf16, and AdamW twice, "foreach" (its
default) and "fused". Prints one table; the ratio is the fastest PyTorch median divided by ours, above 1 means that we
are faster. Writes cpu.md and cpu.json into the output folder.
"""

import argparse
import array
import contextlib
import datetime
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import corpus
import machine
import models

PARTS = ("ours", "foreach", "fused")
NAMES = {"ours": "pretrain_gpt", "foreach": "PyTorch, AdamW foreach", "fused": "PyTorch, AdamW fused"}
PRECISIONS = ("fp32", "bf16")
TIME_LIMIT = 600  # seconds of one turn


def say(text):
    print(text, flush=True)


# ---- PyTorch, in a process of its own ----


def read_samples(prefix, model, count):
    """`count` micro-batches [b, s+1] of the corpus, from its beginning and again when it ends."""
    import torch

    tokens = array.array("H" if model.vocab < 65500 else "i")
    data = pathlib.Path(prefix + ".bin").read_bytes()
    tokens.frombytes(data)
    flat = torch.tensor(tokens, dtype=torch.long)
    starts = torch.arange(count * model.micro_batch) * model.seq % (len(flat) - model.seq - 1)
    return flat[starts[:, None] + torch.arange(model.seq + 1)].view(count, model.micro_batch, model.seq + 1)


def train_with_torch(arguments):
    """One turn of PyTorch: prints a RESULT line."""
    import torch
    from peer_fsdp2 import Gpt
    from torch import nn

    threads = int(arguments.threads)
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    model = models.from_arguments(arguments)
    gpt = Gpt(model).float()
    for parameter in gpt.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, 0.02)
    choice = {arguments.turn: True}
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **choice)
    samples = read_samples(arguments.corpus, model, arguments.warm_up + arguments.steps)
    bf16 = arguments.precisions == "bf16"
    step_ms, losses = [], []
    for sample in samples:
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
            loss = gpt(sample[:, :-1], sample[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step_ms.append((time.perf_counter() - begin) * 1e3)
    models.print_result(step_ms=step_ms[arguments.warm_up :], loss=losses[-1])


# ---- the comparison ----


class Bench:
    def __init__(self, arguments, scratch):
        self.arguments, self.scratch = arguments, scratch

    def prefix(self, model):
        tokens = (self.arguments.warm_up + self.arguments.steps) * model.tokens + model.seq + 1
        prefix = self.scratch / f"uniform-{model.vocab}-{tokens}"
        if not prefix.with_suffix(".bin").exists():
            corpus.write_corpus(str(prefix), tokens, model.vocab, "uniform")
        return prefix

    def options(self, model, precision, metrics):
        """Options of our run."""
        batch, steps = str(model.micro_batch), self.arguments.warm_up + self.arguments.steps
        options = ["--config", str(models.CONFIGS / f"{model.name}.json"), "--distributed-backend", "gloo"]
        options += ["--micro-batch-size", batch, "--global-batch-size", batch, "--train-iters", str(steps)]
        options += ["--eval-iters", "0", "--log-interval", "1", "--no-log-progress-line"]
        options += ["--metrics-file", str(metrics), "--data-path", str(self.prefix(model)), "--split", "1,0,0"]
        options += ["--data-cache-path", str(self.scratch / "cache")]
        return options + (["--bf16"] if precision == "bf16" else []) + shlex.split(self.arguments.options)

    def turn(self, part, model, precision, threads):
        """Step times of one turn and the last loss."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
        metrics = self.scratch / "run.jsonl"
        if part == "ours":
            metrics.unlink(missing_ok=True)
            command = [self.arguments.program, *self.options(model, precision, metrics)]
        else:
            command = [sys.executable, __file__, "--turn", part, "--model", model.name]
            command += ["--micro-batch-size", str(model.micro_batch), "--threads", str(threads)]
            command += ["--precisions", precision, "--corpus", str(self.prefix(model))]
            command += ["--warm-up", str(self.arguments.warm_up), "--steps", str(self.arguments.steps)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
        if done.returncode != 0:
            raise SystemExit(f"error: exit code {done.returncode} from {shlex.join(command)}\n{done.stderr[-2000:]}")
        if part != "ours":
            line = next(text for text in done.stdout.splitlines() if text.startswith("RESULT "))
            result = json.loads(line.removeprefix("RESULT "))
            return result["step_ms"], result["loss"]
        steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        steps = [step for step in steps if step["kind"] == "step"][-self.arguments.steps :]
        return [step["step_time_ms"] for step in steps], steps[-1]["lm_loss"]

    def compare(self, model, precision, threads):
        """One row a contestant; they take turns, so that other load on the machine meets all of them."""
        times, losses = {part: [] for part in PARTS}, {}
        for _ in range(self.arguments.rounds):
            for part in PARTS:
                step_ms, losses[part] = self.turn(part, model, precision, threads)
                times[part] += step_ms
        peer = min(statistics.median(times[part]) for part in PARTS if part != "ours")
        rows = []
        for part in PARTS:
            median = statistics.median(times[part])
            row = {"name": NAMES[part], "model": model.name, "precision": precision, "threads": threads}
            row.update(step_ms=times[part], ms=median, low=min(times[part]), high=max(times[part]), loss=losses[part])
            row.update(tokens_per_s=model.tokens / median * 1e3, gflops=model.flops / median / 1e6)
            if part == "ours":
                row["ratio"] = peer / median
            rows.append(row)
        return rows


def table(rows):
    head = "| model | precision | threads | run | tokens/s | ms | min | max | GFLOP/s | ratio | loss |"
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for row in rows:
        ratio = f"{row['ratio']:.3f}" if "ratio" in row else "-"
        lines.append(
            f"| {row['model']} | {row['precision']} | {row['threads']} | {row['name']} | {row['tokens_per_s']:,.0f} "
            f"| {row['ms']:.1f} | {row['low']:.1f} | {row['high']:.1f} | {row['gflops']:.0f} | {ratio} "
            f"| {row['loss']:.3f} |"
        )
    return "\n".join(lines)


def facts():
    """Processor, usable cores, torch's version and the load when the run began."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        listing = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
        found = re.search(r"model name\s*:\s*(.+)", listing)
        name = found.group(1) if found else name
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))
    return {
        "processor": name,
        "cores": len(usable(0)),
        "torch": machine.facts()["versions"].get("torch", ""),
        "load": os.getloadavg()[0],
    }


def parse():
    parser = argparse.ArgumentParser(
        prog="scripts/bench.sh --cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--program", help="pretrain_gpt to measure; default: the newest under build/")
    add("--models", default="llama-10m,gpt2-10m", help="recipes, separated by commas")
    add("--micro-batch-size", type=int, default=0, help="instead of the recipe's")
    add("--threads", default="2,1", help="numbers of threads, separated by commas")
    add("--precisions", default="fp32", help="separated by commas: " + ", ".join(PRECISIONS))
    add("--rounds", type=int, default=3, help="turns of each contestant")
    add("--warm-up", type=int, default=2, help="steps before the measured ones in each turn")
    add("--steps", type=int, default=5, help="measured steps of each turn")
    add("--options", default="", help="more options for pretrain_gpt, in one word: --options='--a 1 --b'")
    add("--output", default="bench-results", help="folder for cpu.md and cpu.json")
    # What the parent passes to a turn of PyTorch.
    for name in ("--turn", "--model", "--corpus"):
        add(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = set(arguments.precisions.split(",")) - set(PRECISIONS)
    if unknown:
        parser.error(f"--precisions knows {', '.join(PRECISIONS)}, not {', '.join(sorted(unknown))}")
    if arguments.turn:
        return arguments
    machine.check_program(parser, arguments)
    return arguments


def main():
    arguments = parse()
    if arguments.turn:
        train_with_torch(arguments)
        return
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="bench-cpu-"))
    found = facts()
    heading = "{processor}, {cores} cores, torch {torch}, load {load:.1f} at the start".format(**found)
    say(heading)
    rows = []
    try:
        bench = Bench(arguments, scratch)
        for name in arguments.models.split(","):
            model = models.load(name).with_micro_batch(arguments.micro_batch_size)
            for precision in arguments.precisions.split(","):
                for threads in map(int, arguments.threads.split(",")):
                    rows += bench.compare(model, precision, threads)
                    ours = next(row for row in reversed(rows) if "ratio" in row)
                    say(f"  {name} {precision}, {threads} threads: {ours['ms']:.1f} ms, ratio {ours['ratio']:.3f}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say("\n" + table(rows))
    output = pathlib.Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    command = "scripts/bench.sh --cpu " + shlex.join(sys.argv[1:])
    date = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    text = f"`{command}`, {date}\n\n{heading}\n\n{table(rows)}\n"
    (output / "cpu.md").write_text(text, encoding="utf-8")
    document = {"command": command, "date": date, "machine": found, "results": rows}
    (output / "cpu.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    say(f"\nresults in {output}/cpu.md and cpu.json")


if __name__ == "__main__":
    main()

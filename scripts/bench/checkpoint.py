#!/usr/bin/env python3
"""Measures saving and loading of a checkpoint (weights and optimizer state) against the disk's own rate.

    scripts/bench_checkpoint.sh [--program PATH] [--model llama-1.3b] [--folder FOLDER] [--async] [...]

In one folder: parallel writes (until synced) and reads of as many bytes by as many threads as the program uses, through
the page cache or past it, whichever is faster; then three short runs of a recipe of configs/: one that only trains, one
that saves, one that loads and takes a step. The times are the program's own timers. Peak host memory is that of the
process (VmHWM), peak device memory that of the allocator. With --async a fourth run saves twice in the background.
"""

import argparse
import json
import os
import pathlib
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import disk
import machine

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 3
GB, GIB = 1e9, 2**30


def say(text):
    print(text, flush=True)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Bench:
    def __init__(self, arguments, scratch):
        self.arguments, self.scratch = arguments, scratch
        self.gpus = bool(machine.facts()["gpus"])

    def run(self, name, *options):
        """Runs all ranks: printed text, peak host memory of the largest rank, what the metrics say of each step."""
        ranks = self.arguments.ranks
        metrics = self.scratch / f"{name}.jsonl"
        recipe = ROOT / "configs" / f"{self.arguments.model}.json"
        command = [self.arguments.program, "--config", str(recipe), "--mock-data", "--eval-iters", "0"]
        command += ["--global-batch-size", str(self.arguments.micro_batch_size * ranks), "--log-interval", "1"]
        command += ["--micro-batch-size", str(self.arguments.micro_batch_size), "--no-log-progress-line"]
        command += ["--metrics-file", str(metrics), *map(str, options)]
        if ranks > 1 and self.arguments.gtp > 1:
            command += ["--tensor-parallel-num-weight-shards", str(self.arguments.gtp)]
        if not self.gpus:
            command += ["--distributed-backend", "gloo"]
        command += shlex.split(self.arguments.options)
        port = free_port()
        began = time.monotonic()
        running = []
        for rank in range(ranks):
            environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
            environment.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
            environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            log = open(self.scratch / f"{name}.{rank}.log", "wb+")
            running.append((subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment), log))
        peak, text, codes = 0, "", []
        for process, log in running:
            # wait4 also tells the peak of the resident memory, VmHWM.
            _, status, usage = os.wait4(process.pid, 0)
            codes.append(os.waitstatus_to_exitcode(status))
            process.returncode = codes[-1]
            peak = max(peak, usage.ru_maxrss * 1024)
            log.seek(0)
            text += log.read().decode(errors="replace")
            log.close()
        say(f"  {name}: {time.monotonic() - began:.0f} s")
        if any(codes):
            raise SystemExit(f"error: {shlex.join(command)}: exit codes {codes}\n" + text[-3000:])
        steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        steps = [step for step in steps if step["kind"] == "step"]
        return {
            "text": text,
            "host_bytes": peak,
            "device_bytes": steps[-1].get("memory_max_allocated_bytes", 0),
            "step_s": min(step["step_time_ms"] for step in steps) / 1e3,
            "command": shlex.join(command),
        }

    @staticmethod
    def timers(run, name):
        """Seconds of every time that a timer was printed, of the slowest rank."""
        found = re.findall(rf"{name} \.+: \([0-9.]+, ([0-9.]+)\)", run["text"])
        if not found:
            raise SystemExit(f"error: the run printed no timer {name}:\n" + run["text"][-3000:])
        return [float(milliseconds) / 1e3 for milliseconds in found]

    def measure(self):
        folder = self.scratch / "checkpoints"
        trained = self.run("train", "--train-iters", STEPS)
        saved = self.run("save", "--train-iters", STEPS, "--save", folder, "--save-interval", STEPS)
        size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        # The disk right beside the save: rates of shared and virtual disks drift.
        threads = self.arguments.threads or min(8, max(1, 4 * os.cpu_count() // min(8, self.arguments.ranks)))
        rates = disk.rates(self.scratch, threads * self.arguments.ranks, size, int(self.arguments.probe_gb * GB))
        dropped = disk.drop_page_cache()
        # One step more than planned when it was saved: the schedule is a longer one.
        options = ["--load", folder, "--override-opt-param-scheduler"]
        loaded = self.run("load", "--train-iters", STEPS + 1, *options)
        writers = threads * self.arguments.ranks
        result = {"bytes": size, "writers": writers, "disk": rates, "page_cache_dropped": dropped}
        result["runs"] = {"train": trained, "save": saved, "load": loaded}
        result["save_s"] = self.timers(saved, "save-checkpoint")[0]
        result["load_s"] = self.timers(loaded, "load-checkpoint")[0]
        result["save"], result["load"] = size / result["save_s"], size / result["load_s"]
        if self.arguments.use_async:
            shutil.rmtree(folder)
            # So many steps between the two saves that the first is done before the second begins.
            steps = max(STEPS, int(1.5 * result["save_s"] / trained["step_s"]) + 1)
            options = ["--async-save", "--use-persistent-ckpt-worker", "--save-retain-interval", 2 * steps]
            run = self.run("async", "--train-iters", 2 * steps, "--save", folder, "--save-interval", steps, *options)
            result["runs"]["async"] = run
            result["async_stalls_s"] = self.timers(run, "save-checkpoint")
        for run in result["runs"].values():
            del run["text"]
        return result


def table(result, gpus):
    rates, runs = result["disk"], result["runs"]
    lines = [f"checkpoint: {result['bytes'] / GB:.2f} GB, {result['writers']} threads"]
    lines += ["", "| | disk GB/s | program GB/s | seconds | of the disk |", "|---|---|---|---|---|"]
    for what, name in (("write", "save"), ("read", "load")):
        lines.append(
            f"| {name} | {rates[what] / GB:.2f} ({rates[what + '_mode']}) | {result[name] / GB:.2f} | "
            f"{result[name + '_s']:.2f} | {result[name] / rates[what]:.2f} |"
        )
    lines += ["", "| run | peak host GiB | peak device GiB |", "|---|---|---|"]
    for name, run in runs.items():
        device = f"{run['device_bytes'] / GIB:.3f}" if gpus else "-"
        lines.append(f"| {name} | {run['host_bytes'] / GIB:.2f} | {device} |")
    if "async_stalls_s" in result:
        stalls = ", ".join(f"{stall:.2f}" for stall in result["async_stalls_s"])
        lines += ["", f"asynchronous saves stall training for {stalls} s"]
    if not result["page_cache_dropped"]:
        lines += ["", "the page cache could not be dropped (needs root)"]
    return "\n".join(lines)


def parse():
    parser = argparse.ArgumentParser(
        prog="scripts/bench_checkpoint.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--program", help="pretrain_gpt to measure; default: the newest under build/")
    add("--model", default="llama-1.3b", help="recipe of configs/")
    add("--micro-batch-size", type=int, default=1)
    add("--ranks", type=int, default=1, help="processes, one a GPU")
    add("--gtp", type=int, default=1, help="GTP degree, at most the ranks")
    add("--folder", help="where to write; default: the folder for temporary files")
    add("--threads", type=int, default=0, help="of the disk's rate, a rank; default: as many as the program takes")
    add("--probe-gb", type=float, default=2.0, help="size of the probe that chooses how the disk is used")
    add("--async", dest="use_async", action="store_true", help="also measure asynchronous saves")
    add("--options", default="", help="more options for pretrain_gpt, in one word: --options='--a 1 --b'")
    add("--output", help="JSON file for the results")
    arguments = parser.parse_args()
    machine.check_program(parser, arguments)
    if not (ROOT / "configs" / f"{arguments.model}.json").exists():
        parser.error(f"--model {arguments.model}: no such recipe in configs/")
    return arguments


def main():
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=arguments.folder) as scratch:
        bench = Bench(arguments, pathlib.Path(scratch))
        result = bench.measure()
    say("\n" + table(result, bench.gpus))
    if arguments.output:
        pathlib.Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    device = {name: run["device_bytes"] for name, run in result["runs"].items()}
    if bench.gpus and device["load"] > device["train"]:
        say(f"error: a resumed run needs {device['load'] - device['train']} bytes of device memory more than training")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

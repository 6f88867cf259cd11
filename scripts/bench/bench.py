#!/usr/bin/env python3
"""Measures training speed of pretrain_gpt and, in the same invocation, of its references: the speed floor (floor.py),
its calls in the order of a step (replay.py), the sketch of the design (sketch_step.py, Llama shapes) and PyTorch FSDP2
with torch.compile (peer_fsdp2.py).

    scripts/bench.sh [--program PATH] [--models llama-1.3b,gpt2-124m] [--gpus 1] [--output FOLDER] [...]

One run trains a recipe of configs/ on random tokens (uniform and Zipf), one micro-batch a step, with optimizer,
clipping and logging on, no recompute. Steps before the measured ones last at least --warm-seconds, so that clocks are
those of a long run. A short run more notes every kernel and shows where the time of a step goes. Prints one table;
writes results.md, results.json and the logs into the output folder.

With --gpus above 1 every entry of --runs is MODEL:LAYOUT[:MICRO-BATCH], where LAYOUT is dp (data parallel), gtpK (GTP
over K ranks, data parallel over the rest), with variants behind it: -noprefetch, -copy or -nccl (--gtp-transport),
-split (--gtp-weight-gradients split), -one (--gtp-communicators 1), -kept (--gtp-keep-gathered-layers for all layers),
-bf16 (gradients scattered in bf16), -tuned (--gemm-algorithms), -settled (with --gemm-tuning-ms 50 too), -graph
(--cuda-graph-impl full_iteration). The default list is that of docs/benchmarks.md. On one GPU --variants names them.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import corpus
import machine
import models
import phases
import report

HERE = pathlib.Path(__file__).resolve().parent
PARTS = ("floor", "replay", "zipf", "phases", "sketch", "peer")  # what --skip can leave out
# Longest time of each part, seconds: start-up, compilation and measurement, about twice what an H200 needs.
TIMEOUTS = {"floor": 90, "replay": 90, "sketch": 120, "ours": 120, "phases": 120, "peer": 240}
REFERENCES = {  # script and name in the table
    "floor": ("floor.py", "floor"),
    "replay": ("replay.py", "floor's calls in order"),
    "sketch": ("sketch_step.py", "sketch (graph)"),
    "peer": ("peer_fsdp2.py", "FSDP2 + compile"),
}
RUNS_ON_SEVERAL_GPUS = (
    "llama-7b:gtp{n}:2,llama-7b:gtp{n}-noprefetch:2,llama-1.3b:dp,llama-1.3b:gtp{n},llama-1.3b:gtp{n}-noprefetch,"
    "gpt2-124m:dp"
)
# FSDP2 holds 16 bytes a parameter before activations; above this on one GPU it cannot run.
PEER_STATE_LIMIT = 100e9
FASTEST = 600e12  # FLOP/s
ALGORITHMS = "{scratch}/algorithms.json"  # chosen in the warm-up of the first run that asks for them
SETTLED_ALGORITHMS = "{scratch}/settled.json"  # the same, each timed for long enough that the clock settles
TRACED_STEPS = 5


def say(text):
    print(text, flush=True)


class Layout:
    """How ranks share a run: one, dp or gtpK, and variants: "gtp2-copy-tuned"."""

    VARIANTS = {
        "noprefetch": ["--no-gtp-prefetch"],
        "copy": ["--gtp-transport", "copy-engine"],
        "split": ["--gtp-weight-gradients", "split"],
        "one": ["--gtp-communicators", "1"],
        "kept": ["--gtp-keep-gathered-layers", "{layers}"],
        "nccl": ["--gtp-transport", "nccl"],
        "bf16": ["--no-gradient-accumulation-fusion"],
        "tuned": ["--gemm-algorithms", ALGORITHMS],
        "settled": ["--gemm-algorithms", SETTLED_ALGORITHMS, "--gemm-tuning-ms", "50"],
        "graph": ["--cuda-graph-impl", "full_iteration"],
    }

    def __init__(self, text, gpus):
        layout, *self.variants = text.split("-")
        match = re.fullmatch(r"one|dp|gtp(\d+)", layout)
        if not match or not set(self.variants) <= set(self.VARIANTS):
            raise SystemExit(f"error: layout {text}: give dp or gtpK, with any of -{', -'.join(self.VARIANTS)}")
        self.text, self.gpus = text, gpus
        self.gtp = int(match.group(1) or 1)
        if gpus % self.gtp:
            raise SystemExit(f"error: layout {text}: {gpus} GPUs are no multiple of {self.gtp}")

    def options(self):
        options = []
        if self.gtp > 1:
            options += ["--tensor-parallel-num-weight-shards", str(self.gtp)]
        for variant in self.variants:
            options += self.VARIANTS[variant]
        if self.gpus > self.gtp:  # data parallel over the rest
            options += ["--overlap-grad-reduce"]
        return options


class Bench:
    def __init__(self, arguments, output, scratch):
        self.arguments, self.output, self.scratch = arguments, output, scratch
        self.deadline = time.time() + arguments.budget
        self.sampler = machine.Sampler()
        self.failed = False
        self.began = 0.0  # when the last command started
        self.tracer = None  # (library, error) once it has been built
        version = machine.run_text([arguments.program, "--version"]).strip()
        self.document = {
            "date": datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
            "command": "scripts/bench.sh " + shlex.join(sys.argv[1:]),
            "program_version": version.removeprefix("pretrain_gpt "),
            "warm_up": f"at least 10 warm-up steps and {arguments.warm_seconds:g} s",
            "steps": arguments.steps,
            "machine": machine.facts(),
            "results": [],
        }

    def warm_up_steps(self, model):
        """At least 10, and as many as take --warm-seconds at a rate that no run has reached; small models need no more
        than a thousand."""
        return min(1000, max(10, math.ceil(self.arguments.warm_seconds * FASTEST / model.flops)))

    def execute(self, name, part, command, extra_environment=None):
        """Runs a command with a time limit; returns (output, error), one of them None."""
        limit = min(TIMEOUTS[part] * self.arguments.patience, self.deadline - time.time())
        if limit < 10:
            return None, "not run: the time budget is used up"
        log = self.output / (re.sub(r"[^a-z0-9.]+", "-", name.lower()) + ".log")
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
        environment.update(extra_environment or {})
        self.began = began = time.time()
        with open(log, "w", encoding="utf-8") as file:
            file.write("$ " + shlex.join(command) + "\n")
            file.flush()
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return None, f"stopped after {limit:.0f} s (see {log.name})"
        text = log.read_text(encoding="utf-8", errors="replace")
        say(f"  {name}: {time.time() - began:.0f} s")
        if process.returncode != 0:
            reasons = [line.strip() for line in text.splitlines()[1:] if re.search(r"error:|Error:", line)]
            reason = re.sub(r"^\[[^]]*\] ", "", reasons[0]) if reasons else f"see {log.name}"
            return None, f"exit code {process.returncode}: {reason[:160]}"
        return text, None

    def add(self, name, kind, model, gpus, measured, error, **more):
        result = {"name": name, "kind": kind, "model": model.name, "micro_batch": model.micro_batch, "seq": model.seq}
        result.update(gpus=gpus, **more)
        if error:
            result["error"] = error
        else:
            result.update(measured)
            report.derive(result, model)
            if result.get("peak_bytes"):
                result["peak_gib"] = result["peak_bytes"] / 2**30
            result.update(self.sampler.between(result["started"], result["ended"]) or {})
        self.document["results"].append(result)
        report.compare(self.document["results"])
        report.write(self.output, self.document)
        return result

    # ---- references ----

    def reference(self, part, model, gpus=1, gtp=1):
        """Runs a reference. Floor and replay on several GPUs are measured on all at once, and the slowest counts: ranks
        that wait for each other are as fast as that one."""
        script, name = REFERENCES[part]
        launcher = [sys.executable]
        if part == "peer" or gpus > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        command = [*launcher, str(HERE / script), "--model", model.name, "--micro-batch-size", str(model.micro_batch)]
        if part != "floor":
            command += ["--warm-up", str(self.warm_up_steps(model)), "--steps", str(self.arguments.steps)]
        if part == "replay":
            command += ["--optimizer-share", str(1 / gtp)]
        if part == "peer":
            command += ["--compile"]
        if gtp > 1:
            name += f", 1/{gtp} of the optimizer"
        if gpus > 1:
            name += f", {'' if part == 'peer' else 'slowest of '}{gpus} GPUs"
        text, error = self.execute(f"{model.name} {part} {gpus}", part, command)
        measured = None
        if text is not None:
            found = [json.loads(line.removeprefix("RESULT ")) for line in text.splitlines() if line.startswith("RESULT ")]
            if found:
                measured = max(found, key=report.median_ms)
            else:
                error = "printed no result"
        return self.add(name, part, model, gpus, measured, error, gtp=gtp)

    # ---- pretrain_gpt ----

    def corpus(self, model, kind, tokens):
        prefix = self.scratch / f"{kind}-{model.vocab}-{tokens}"
        if not prefix.with_suffix(".bin").exists():
            corpus.write_corpus(str(prefix), tokens, model.vocab, kind)
        return prefix

    def command(self, model, kind, gpus, layout, steps, metrics):
        """(launcher and program, options) of a run of `steps` steps."""
        batch = model.micro_batch * gpus
        most = (self.warm_up_steps(model) + self.arguments.steps) * batch * model.seq + model.seq + 1
        prefix = self.corpus(model, kind, min(most, self.arguments.corpus_tokens))
        program = [self.arguments.program]
        if gpus > 1:
            program = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
            program += ["--no-python", self.arguments.program]
        options = ["--config", str(models.CONFIGS / f"{model.name}.json")]
        options += ["--micro-batch-size", str(model.micro_batch), "--global-batch-size", str(batch)]
        options += ["--train-iters", str(steps), "--eval-iters", "0", "--log-interval", "1", "--no-log-progress-line"]
        options += ["--metrics-file", str(metrics), "--data-path", str(prefix), "--split", "1,0,0"]
        options += ["--data-cache-path", str(self.scratch / "cache"), *(layout.options() if layout else [])]
        options = [o.replace("{scratch}", str(self.scratch)).replace("{layers}", str(model.layers)) for o in options]
        return program, options + shlex.split(self.arguments.options)

    def ours(self, model, kind, gpus=1, layout=None):
        name = f"pretrain_gpt, {kind} tokens"
        tag = f"{model.name} ours {kind} {gpus}"
        if layout is not None and gpus == 1:
            name, tag = f"pretrain_gpt, {', '.join(layout.variants)}", f"{model.name} ours {layout.text}"
        elif layout is not None:
            name, tag = f"pretrain_gpt {layout.text}", f"{model.name} ours {layout.text} {model.micro_batch}"
        metrics = self.scratch / (tag.replace(" ", "-") + ".jsonl")
        steps = self.warm_up_steps(model) + self.arguments.steps
        program, options = self.command(model, kind, gpus, layout, steps, metrics)
        text, error = self.execute(tag, "ours", [*program, *options])
        measured = None
        if text is not None:
            measured = self.read_metrics(metrics, [self.arguments.program, *options], gpus)
            measured["first_step_s"] = self.seconds_to_first_step(text)
            if measured["first_step_s"]:
                say(f"    first step after {measured['first_step_s']:.1f} s")
        else:
            self.failed = True
        more = {"tokens": kind, "layout": layout.text if layout else "one GPU", "gtp": layout.gtp if layout else 1}
        result = self.add(name, "ours", model, gpus, measured, error, **more)
        if text is not None and kind == "uniform" and (layout is None or gpus > 1) and "phases" not in self.arguments.skip:
            self.trace(result, tag, model, gpus, layout)
        return result

    def trace(self, result, tag, model, gpus, layout):
        """A short run with a note of every kernel; adds result["phases"], or result["phases_error"]."""
        if not self.document["machine"]["gpus"]:
            return
        if self.tracer is None:
            self.tracer = phases.compile_tracer(self.scratch)
        library, error = self.tracer
        if error is None:
            steps, target = 10 + TRACED_STEPS, self.scratch / "trace"
            program, options = self.command(model, "uniform", gpus, layout, steps, self.scratch / "traced.jsonl")
            environment = {"CUDA_INJECTION64_PATH": str(library), "KERNEL_TRACE": str(target)}
            _, error = self.execute(tag + " phases", "phases", [*program, *options], environment)
            traces = [target.with_suffix(f".{rank}") for rank in range(gpus)]
            if error is None and not all(trace.exists() for trace in traces):
                error = "the run left no trace"
            if error is None:
                ranks = [phases.summarise(phases.read_trace(trace), model, TRACED_STEPS) for trace in traces]
                for trace in traces:
                    trace.unlink()
                error = None if all(ranks) else "the trace shows no optimizer kernel of this program"
                if error is None:
                    result["phases"] = {**ranks[0], "computing_ms": [rank["computing_ms"] for rank in ranks]}
        if error:
            result["phases_error"] = error
            say(f"  no phases: {error}")
        else:
            say("\n".join(phases.lines(result["phases"])))
        report.write(self.output, self.document)

    def seconds_to_first_step(self, text):
        """From the start of the process to the log line of step 1; None without such a line."""
        line = re.search(r"\[([0-9-]+ [0-9:.]+)\] iteration +1/", text)
        if not line:
            return None
        return datetime.datetime.strptime(line.group(1), "%Y-%m-%d %H:%M:%S.%f").timestamp() - self.began

    def read_metrics(self, metrics, command, gpus):
        steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        measured = [step for step in steps if step["kind"] == "step"][-self.arguments.steps :]
        step_ms = [step["step_time_ms"] for step in measured]
        ended = metrics.stat().st_mtime  # the last step's line is written when the step is over
        result = {
            "step_ms": step_ms,
            "peak_bytes": measured[-1]["memory_max_allocated_bytes"],
            "resident_bytes": measured[-1]["memory_allocated_bytes"],
            "loss": measured[-1]["lm_loss"],
            "started": ended - sum(step_ms) / 1e3,
            "ended": ended,
            "command": shlex.join(command[1:]),
        }
        # The program's own estimate, which needs no GPU.
        plan = machine.run_text([*command, "--dry-run", "--world-size", str(gpus)])
        peak = re.search(r"peak ([0-9.]+) MiB", plan)
        if peak and self.document["machine"]["gpus"]:
            result["estimated_peak_bytes"] = float(peak.group(1)) * 2**20
            result["peak_of_estimate"] = result["peak_bytes"] / result["estimated_peak_bytes"]
        return result

    # ---- the lists of runs ----

    def one_gpu(self):
        skip = self.arguments.skip
        for name in self.arguments.models:
            model = models.load(name).with_micro_batch(self.arguments.micro_batch_size)
            say(f"{name}:")
            if "floor" not in skip:
                self.reference("floor", model)
            if "replay" not in skip:
                self.reference("replay", model)
            self.ours(model, "uniform")
            for variant in self.arguments.variants:
                self.ours(model, "uniform", layout=Layout("one-" + variant, 1))
            if "zipf" not in skip:
                self.ours(model, "zipf")
            if "sketch" not in skip and model.gated and not model.tied:
                self.reference("sketch", model)
            if "peer" not in skip:
                if 16 * model.parameters > PEER_STATE_LIMIT:
                    say("  FSDP2 + compile: not run, 16 bytes a parameter leave no room for activations")
                else:
                    self.reference("peer", model)

    def several_gpus(self):
        gpus, skip = self.arguments.gpus, self.arguments.skip
        runs = self.arguments.runs or RUNS_ON_SEVERAL_GPUS.format(n=gpus)
        referenced = set()
        for text in runs.split(","):
            name, layout_text, *batch = text.split(":")
            layout = Layout(layout_text, gpus)
            model = models.load(name).with_micro_batch(int(batch[0]) if batch else 0)
            say(f"{text}:")
            if (model, 0) not in referenced:
                referenced.add((model, 0))
                if "floor" not in skip:
                    self.reference("floor", model, gpus)
                if "peer" not in skip:
                    self.reference("peer", model, gpus)
            if (model, layout.gtp) not in referenced:
                referenced.add((model, layout.gtp))
                if "replay" not in skip:
                    self.reference("replay", model, gpus, layout.gtp)
            self.ours(model, "uniform", gpus, layout)


def parse():
    parser = argparse.ArgumentParser(
        prog="scripts/bench.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--program", help="pretrain_gpt to measure; default: the newest under build/")
    add("--models", default="llama-1.3b", help="recipes, separated by commas (one GPU)")
    add("--variants", default="tuned,tuned-graph", help="more runs of each recipe on one GPU, separated by commas")
    add("--gpus", type=int, default=1)
    add("--runs", default="", help="MODEL:LAYOUT[:MICRO-BATCH], separated by commas (several GPUs)")
    add("--micro-batch-size", type=int, default=0, help="instead of the recipe's (one GPU)")
    add("--skip", default="", help="parts to leave out, separated by commas: " + ", ".join(PARTS))
    add("--steps", type=int, default=20, help="measured steps")
    add("--warm-seconds", type=float, default=4.0, help="least duration of the steps before them")
    add("--options", default="", help="more options for pretrain_gpt, in one word: --options='--a 1 --b'")
    add("--budget", type=float, default=540.0, help="seconds for everything; runs beyond it are left out")
    add("--patience", type=float, default=1.0, help="factor on the time limit of each part")
    add("--corpus-tokens", type=int, default=8_000_000, help="most tokens in a corpus; longer runs start another epoch")
    add("--output", default="bench-results", help="folder for results.md, results.json and logs")
    arguments = parser.parse_args()
    arguments.models = [name for name in arguments.models.split(",") if name]
    arguments.variants = [name for name in arguments.variants.split(",") if name]
    arguments.skip = {part for part in arguments.skip.split(",") if part}
    unknown = arguments.skip - set(PARTS)
    if unknown:
        parser.error(f"--skip knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    machine.check_program(parser, arguments)
    return arguments


def main():
    arguments = parse()
    output = pathlib.Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="bench-"))
    bench = Bench(arguments, output, scratch)
    try:
        if arguments.gpus > 1:
            bench.several_gpus()
        else:
            bench.one_gpu()
    finally:
        bench.sampler.close()
        shutil.rmtree(scratch, ignore_errors=True)
    say("\n" + report.text_tables(bench.document["results"]))
    say(f"\nresults in {output}/results.md and results.json")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())

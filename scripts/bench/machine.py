"""What the benchmark notes about the machine: versions, limits, and power and clocks while something runs."""

import importlib.metadata
import os
import pathlib
import re
import statistics
import subprocess
import threading
import time


def run_text(command):
    """Output of a command, empty when it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def facts():
    """GPU names, driver, limits and library versions; empty lists and strings where there is no GPU or no torch."""
    query = "name,driver_version,power.limit,clocks.max.sm,memory.total"
    listing = run_text(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"])
    link = re.search(r"GPU0\s+X\s+(\S+)", run_text(["nvidia-smi", "topo", "-m"]))
    versions = {}
    for name in ("torch", "triton", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "nvidia-cublas"):
        try:
            versions[name.removeprefix("nvidia-").removesuffix("-cu13")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "gpus": [line.strip() for line in listing.splitlines()],
        "gpu_fields": query,
        "link": link.group(1) if link else "",
        "versions": versions,
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", ""),
        "cpus": os.cpu_count(),
    }


def check_program(parser, arguments):
    """Makes --program an absolute path; ends with a usage error when there is no such program."""
    if not arguments.program or not os.access(arguments.program, os.X_OK):
        parser.error(f"--program {arguments.program}: no such program; build one with scripts/build.sh")
    arguments.program = str(pathlib.Path(arguments.program).resolve())


class Sampler:
    """Reads power, SM clock and used memory of the visible GPUs five times a second, in a thread, until closed."""

    QUERY = "index,power.draw,clocks.sm,memory.used"

    def __init__(self):
        self.samples = []  # (time, gpu, watts, MHz, MiB)
        command = ["nvidia-smi", f"--query-gpu={self.QUERY}", "--format=csv,noheader,nounits", "-lms", "200"]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if re.fullmatch(r"\d+(,\d+)*", visible):
            command.append(f"--id={visible}")
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            self.process = None
            return
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self):
        for line in self.process.stdout:
            fields = line.split(",")
            try:
                self.samples.append((time.time(), int(fields[0]), *(float(field) for field in fields[1:4])))
            except (ValueError, IndexError):
                continue  # "[N/A]", or a line cut off at the end

    def between(self, begin, end):
        """Medians over the GPUs in use in a stretch of time; None without samples."""
        inside = [s for s in self.samples if begin <= s[0] <= end]
        if not inside:
            return None
        # GPUs that idle beside a smaller run do not count.
        highest = max(s[4] for s in inside)
        busy = [s for s in inside if s[4] > highest / 2]
        return {
            "watts": statistics.median(s[2] for s in busy),
            "mhz": statistics.median(s[3] for s in busy),
            "device_mib": max(s[4] for s in busy),
            "samples": len(busy),
        }

    def close(self):
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.thread.join(timeout=5)

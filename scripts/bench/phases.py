"""Where the time of a step goes on the GPU: kernels of a traced run, sorted into phases.

A traced run is slower by a few percent (CUPTI notes every kernel), so it is a run of its own and its shares matter, not
its sum. kernel_trace.cpp is compiled against the CUPTI that the torch wheel brings.
"""

import importlib.util
import pathlib
import re
import subprocess

# First match wins. Names are mangled; kernels of this project carry the name of their source file (norm_cu).
PHASES = (
    ("communication", r"nccl|copy between GPUs|copy_engine_cu"),
    ("attention", r"cudnn|fmha|flash"),
    ("optimizer", r"optimizer_cu"),
    ("gradient norm", r"flat_reduce_cu"),
    ("loss", r"cross_entropy_cu"),
    ("norm and residual", r"norm_cu|dropout_cu"),
    ("rotary positions and packing", r"rope_cu"),
    ("activation", r"activation_cu"),
    ("bias gradients", r"column_sum_cu"),
    ("embedding", r"embedding_cu|RadixSort|DeviceScan"),
    ("products", r"nvjet|gemm|cutlass|splitK|cublas"),
    ("copies and fills", r"^\[copy\]|^\[fill\]"),
)
STEP_END = r"optimizer_cu.*step_kernel"  # the last kernel of a step
PRODUCT = r"nvjet|gemm|cutlass"  # one a matrix product; reductions of split sums are not counted


def compile_tracer(folder):
    """Builds the tracer; returns its path, or an error text."""
    spec = importlib.util.find_spec("nvidia")
    for root in [pathlib.Path(p) for p in (spec.submodule_search_locations if spec else [])]:
        include, libraries = root / "cu13" / "include", sorted((root / "cu13" / "lib").glob("libcupti.so*"))
        if not (include / "cupti.h").exists() or not libraries:
            continue
        target = pathlib.Path(folder) / "kernel_trace.so"
        source = pathlib.Path(__file__).with_name("kernel_trace.cpp")
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{include}", "-I/usr/local/cuda/include",
                   str(source), "-o", str(target)]  # some wheels lack crt/, which an installed toolkit has
        command += [str(libraries[0]), f"-Wl,-rpath,{libraries[0].parent}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return (target, None) if done.returncode == 0 else (None, "tracer: " + done.stderr.strip()[-300:])
    return None, "tracer: no CUPTI in this Python (nvidia/cu13/include/cupti.h)"


def read_trace(path):
    """Events (name, start, end) in nanoseconds, by start."""
    names, events = {}, []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            kind, number, rest = line.rstrip("\n").split(" ", 2)
            if kind == "N":
                names[int(number)] = rest
            else:
                start, duration, _ = rest.split(" ")
                events.append((int(number), int(start), int(start) + int(duration)))
    return sorted(((names[number], start, end) for number, start, end in events), key=lambda event: event[1])


def covered(intervals):
    """Length of the union of (start, end) intervals."""
    total, reach = 0, None
    for start, end in sorted(intervals):
        begin = start if reach is None else max(start, reach)
        total += max(0, end - begin)
        reach = end if reach is None else max(reach, end)
    return total


def phase_of(name):
    return next((phase for phase, pattern in PHASES if re.search(pattern, name)), "other")


def product_kinds(layers):
    """Names of the matrix products of one step, in the order of the program's forward and backward."""
    forward = [f"{matrix} forward" for _ in range(layers) for matrix in ("qkv", "proj", "fc1", "fc2")]
    backward = ["output dgrad", "output wgrad"]
    for _ in range(layers):
        backward += [f"{matrix} {kind}" for matrix in ("fc2", "fc1", "proj", "qkv") for kind in ("dgrad", "wgrad")]
    return [*forward, "output forward", *backward]


def product_flops(model):
    """Floating-point operations of one step by matrix; forward, dgrad and wgrad have the same."""
    flops = {
        name: 2 * model.tokens * rows * columns * model.layers
        for name, (rows, columns) in zip(("qkv", "proj", "fc1", "fc2"), model.matrices)
    }
    return {**flops, "output": 2 * model.tokens * model.padded_vocab * model.hidden}


def summarise(events, model, steps):
    """Milliseconds of a step of one rank by phase over the last `steps` steps; None when fewer are in the trace."""
    ends = [end for name, _, end in events if re.search(STEP_END, name)]
    if len(ends) <= steps:
        return None
    begin, end = ends[-1 - steps], ends[-1]
    inside = [event for event in events if begin <= event[1] < end]
    scale = 1e6 * steps
    result = {"step_ms": (end - begin) / scale, "phases_ms": {}, "products_ms": {}, "other_kernels_ms": {}}
    for name, first, last in inside:
        phase = phase_of(name)
        result["phases_ms"][phase] = result["phases_ms"].get(phase, 0) + (last - first) / scale
        if phase == "other":
            short = name[:120]
            result["other_kernels_ms"][short] = result["other_kernels_ms"].get(short, 0) + (last - first) / scale
    busy = covered((first, last) for _, first, last in inside)
    computing = covered((first, last) for name, first, last in inside if phase_of(name) != "communication")
    result["gaps_ms"] = (end - begin - busy) / scale
    result["computing_ms"] = computing / scale
    # Communication during which nothing else ran.
    result["exposed_communication_ms"] = (busy - computing) / scale
    kinds = product_kinds(model.layers)
    products = [event for event in inside if phase_of(event[0]) == "products" and re.search(PRODUCT, event[0])]
    if len(products) == steps * len(kinds):
        for kind, (_, first, last) in zip(kinds * steps, products):
            result["products_ms"][kind] = result["products_ms"].get(kind, 0) + (last - first) / scale
        flops = product_flops(model)
        result["products_tflops"] = {k: flops[k.split()[0]] / ms / 1e9 for k, ms in result["products_ms"].items()}
    return result


def lines(summary):
    """The summary for a terminal, longest first."""
    step = summary["step_ms"]
    text = [f"{name} {ms:.2f} ({100 * ms / step:.1f} %)" for name, ms in rows(summary)]
    out = [f"  traced step {step:.2f} ms: " + ", ".join(text)]
    ranks = summary["computing_ms"]
    if isinstance(ranks, list) and len(ranks) > 1:  # the rank that computes longest has the slowest GPU
        out.append("  computing, ms by rank: " + ", ".join(f"{ms:.1f}" for ms in ranks))
    if summary["products_ms"]:
        products = sorted(summary["products_ms"].items(), key=lambda item: -item[1])
        rates = summary["products_tflops"]
        text = [f"{name} {ms:.2f} ({rates[name]:.0f})" for name, ms in products]
        out.append("  products, ms (TFLOP/s): " + ", ".join(text))
    return out


def rows(summary):
    """(name, ms) of phases, gaps and exposed communication, longest first."""
    parts = {**summary["phases_ms"], "gaps": summary["gaps_ms"]}
    if summary["exposed_communication_ms"] > 0:
        parts["communication not hidden"] = summary["exposed_communication_ms"]
    return sorted(parts.items(), key=lambda item: -item[1])

"""The table of a benchmark: derived figures, text for the terminal, Markdown and JSON."""

import json
import statistics

import phases

HEADINGS = "run,tokens/s,ms,min,max,TFLOP/s,of floor,of replay,x peer,x sketch,peak GiB,W,MHz".split(",")


def median_ms(result):
    """Of a result that has step_ms, or ms for the floor."""
    return statistics.median(result["step_ms"]) if result.get("step_ms") else result["ms"]


def derive(result, model):
    """Adds speed figures of one GPU to a result that has step_ms, or ms for the floor (one micro-batch a step)."""
    step_ms = result.get("step_ms")
    result["median_ms"] = median_ms(result)
    if step_ms:
        result["min_ms"], result["max_ms"] = min(step_ms), max(step_ms)
    seconds = result["median_ms"] / 1e3
    result["tokens_per_s"] = model.tokens / seconds
    result["tflops"] = model.flops / seconds / 1e12
    return result


def find(results, **wanted):
    """The first successful result with these fields."""
    for result in results:
        if "median_ms" in result and all(result.get(key) == value for key, value in wanted.items()):
            return result
    return None


def compare(results):
    """Adds to each run of ours its ratios to the references of the same model, batch and number of GPUs."""
    for result in results:
        if result["kind"] != "ours" or "median_ms" not in result:
            continue
        same = {key: result[key] for key in ("model", "micro_batch", "gpus")}
        floor, peer = find(results, kind="floor", **same), find(results, kind="peer", **same)
        sketch = find(results, kind="sketch", **{**same, "gpus": 1})
        replay = find(results, kind="replay", gtp=result.get("gtp", 1), **same)
        if floor:
            # A GTP rank updates its share of the weights only.
            saved = floor["parts_ms"]["optimizer"] * (1 - 1 / result.get("gtp", 1))
            result["of_floor"] = (floor["median_ms"] - saved) / result["median_ms"]
        if replay:
            result["of_replay"] = replay["median_ms"] / result["median_ms"]
        if peer:
            result["of_peer"] = peer["median_ms"] / result["median_ms"]
        if sketch:
            result["of_sketch"] = sketch["median_ms"] / result["median_ms"]


def cells(result):
    """One row as text; a run that failed says why."""
    if "median_ms" not in result:
        return [result["name"], result.get("error", "failed")]

    def number(key, form):
        return form.format(result[key]) if result.get(key) is not None else "-"

    peak = number("peak_gib", "{:.2f}")
    if result.get("peak_of_estimate"):
        peak += f" ({(result['peak_of_estimate'] - 1) * 100:+.1f} %)"
    return [
        result["name"],
        number("tokens_per_s", "{:,.0f}"),
        number("median_ms", "{:.2f}"),
        number("min_ms", "{:.2f}"),
        number("max_ms", "{:.2f}"),
        number("tflops", "{:.0f}"),
        number("of_floor", "{:.3f}"),
        number("of_replay", "{:.3f}"),
        number("of_peer", "{:.3f}"),
        number("of_sketch", "{:.3f}"),
        peak,
        number("watts", "{:.0f}"),
        number("mhz", "{:.0f}"),
    ]


def tables(results):
    """(title, rows) of each model and batch, in the order of the runs."""
    groups = {}
    for result in results:
        title = f"{result['model']}, micro-batch {result['micro_batch']} x {result['seq']}"
        groups.setdefault(title, []).append(cells(result))
    return list(groups.items())


def text_tables(results):
    lines = []
    for heading, rows in tables(results):
        widths = [max([len(HEADINGS[i])] + [len(row[i]) for row in rows if len(row) > 2]) for i in range(len(HEADINGS))]
        widths[0] = max([widths[0]] + [len(row[0]) for row in rows])
        lines += ["", heading]
        for row in [HEADINGS, *rows]:
            padded = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines).lstrip("\n")


def markdown(document):
    machine = document["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items())
    lines = [
        f"Measured {document['date']} with `{document['command']}`.",
        "",
        f"GPUs ({machine['gpu_fields']}): {'; '.join(machine['gpus']) or 'none'}.",
        f"Link: {machine['link'] or '-'}; NCCL_NVLS_ENABLE={machine['NCCL_NVLS_ENABLE'] or '(unset)'}; {versions}.",
        f"pretrain_gpt {document['program_version']}; {document['warm_up']}; {document['steps']} measured steps.",
    ]
    for heading, rows in tables(document["results"]):
        lines += ["", f"### {heading}", "", "| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|"]
        for row in rows:
            lines.append("| " + " | ".join(row + [""] * (len(HEADINGS) - len(row))) + " |")
    for result in document["results"]:
        if result.get("phases"):
            lines += phase_lines(result)
    return "\n".join(lines) + "\n"


def phase_lines(result):
    """Markdown of a traced run."""
    summary = result["phases"]
    step = summary["step_ms"]
    lines = ["", f"### Where the time goes: {result['model']}, {result['name']}", ""]
    lines += [f"One traced step takes {step:.2f} ms.", "", "| phase | ms | share |", "|---|---|---|"]
    lines += [f"| {name} | {ms:.3f} | {100 * ms / step:.1f} % |" for name, ms in phases.rows(summary)]
    if summary["products_ms"]:
        lines += ["", "| product | ms | TFLOP/s |", "|---|---|---|"]
        for name, ms in sorted(summary["products_ms"].items(), key=lambda item: -item[1]):
            lines.append(f"| {name} | {ms:.3f} | {summary['products_tflops'][name]:.0f} |")
    return lines


def write(folder, document):
    """results.json and results.md, complete after every run so that a cut-off benchmark loses nothing."""
    (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / "results.md").write_text(markdown(document), encoding="utf-8")

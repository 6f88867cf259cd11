#!/usr/bin/env python3
"""Draws metrics files of pretrain_gpt (--metrics-file) into one PNG: one curve a file, one panel a key. Needs
matplotlib.

    .venv/bin/python scripts/plot_run.py run.jsonl [other.jsonl ...] [--keys lm_loss,grad_norm,tokens_per_second]
        [--x iteration] [--output run.png]

docs/metrics.md has the keys.
"""

import argparse
import json
import os
import sys


DEFAULT_KEYS = ("lm_loss", "grad_norm", "learning_rate_applied")


def fail(message):
    sys.exit(f"plot_run: error: {message}")


def read_records(path):
    """The objects of a metrics file."""
    records = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    records.append(json.loads(line))
                except ValueError as error:
                    fail(f"{path}, line {number}: {error}")
                if not isinstance(records[-1], dict):
                    fail(f"{path}, line {number} is no JSON object; give files of --metrics-file")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{path}: {error}")
    return records


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def existing_keys(records):
    """The keys with a number in some record, in the order of the file."""
    return list(dict.fromkeys(key for record in records for key, value in record.items() if is_number(value)))


def series(records, x_key, key):
    """The (x, y) lists of one key, without the records that lack it; of records written twice the last one counts."""
    points = {}
    for record in records:
        if is_number(record.get(x_key)) and is_number(record.get(key)):
            points[record[x_key]] = record[key]
    return sorted(points), [points[x] for x in sorted(points)]


def choose_panels(files, x_key, keys):
    """[(key, [(path, xs, ys)])] to draw; of the default keys (keys is None) those that exist."""
    panels = []
    for key in DEFAULT_KEYS if keys is None else keys:
        curves = [(path, *series(records, x_key, key)) for path, records in files]
        missing = [(path, records) for (path, records), (_, xs, _) in zip(files, curves) if not xs]
        if missing and keys is not None:
            path, records = missing[0]
            fail(f"{path} has no record with numbers for both '{x_key}' and '{key}'; it has: "
                 + (", ".join(existing_keys(records)) or "none"))
        curves = [curve for curve in curves if curve[1]]
        if curves:
            panels.append((key, curves))
    if not panels:
        path, records = files[0]
        fail(f"no file has '{x_key}' with one of {', '.join(DEFAULT_KEYS)}; name others with --keys. {path} has: "
             + (", ".join(existing_keys(records)) or "none"))
    return panels


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--keys", help="comma-separated keys, one panel each; default: " + ", ".join(DEFAULT_KEYS)
                        + ", as far as the files have them")
    parser.add_argument("--x", default="iteration", help="key of the horizontal axis, e.g. consumed_samples")
    parser.add_argument("--output", default="run.png")
    arguments = parser.parse_args()
    keys = None if arguments.keys is None else arguments.keys.split(",")
    panels = choose_panels([(path, read_records(path)) for path in arguments.files], arguments.x, keys)
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        fail("matplotlib is missing. Install it: .venv/bin/pip install matplotlib (then run this with "
             ".venv/bin/python), or apt-get install python3-matplotlib")

    figure, axes = pyplot.subplots(len(panels), 1, sharex=True, squeeze=False, figsize=(9, 3 * len(panels)),
                                   layout="constrained")
    for panel, (key, curves) in zip(axes[:, 0], panels):
        for path, xs, ys in curves:
            panel.plot(xs, ys, label=os.path.basename(path), linewidth=1)
        panel.set_ylabel(key)
        panel.grid(True, alpha=0.3)
        panel.legend()
    axes[-1, 0].set_xlabel(arguments.x)
    try:
        figure.savefig(arguments.output, dpi=120)
    except (OSError, ValueError) as error:
        fail(f"--output {arguments.output}: {error}")
    print(arguments.output)


if __name__ == "__main__":
    main()

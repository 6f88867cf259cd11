#!/usr/bin/env python3
"""Draws metrics files of pretrain_gpt (--metrics-file) into one PNG: one curve a file, one panel a key. Needs matplotlib.

    scripts/plot_run.py run.jsonl [other.jsonl ...] [--keys lm_loss,grad_norm,tokens_per_second] [--x iteration] [--output run.png]
"""

import argparse
import json
import os
import sys


def read_series(path, x_key, key):
    """Returns the (x, y) lists of one key; records without it are left out, of records written twice the last one counts."""
    points = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                sys.exit(f"plot_run: error: {path}, line {number}: {error}")
            if record.get(x_key) is not None and record.get(key) is not None:
                points[record[x_key]] = record[key]
    return sorted(points), [points[x] for x in sorted(points)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--keys", default="lm_loss,grad_norm,learning_rate", help="comma-separated keys, one panel each")
    parser.add_argument("--x", default="iteration", help="key of the horizontal axis, e.g. consumed_samples")
    parser.add_argument("--output", default="run.png")
    arguments = parser.parse_args()
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        sys.exit("plot_run: error: matplotlib is missing. Install it: .venv/bin/pip install matplotlib (then run this with "
                 ".venv/bin/python), or apt-get install python3-matplotlib")

    keys = arguments.keys.split(",")
    figure, axes = pyplot.subplots(len(keys), 1, sharex=True, squeeze=False, figsize=(9, 3 * len(keys)), layout="constrained")
    for panel, key in zip(axes[:, 0], keys):
        for path in arguments.files:
            try:
                steps, values = read_series(path, arguments.x, key)
            except OSError as error:
                sys.exit(f"plot_run: error: {error}")
            if not steps:
                sys.exit(f"plot_run: error: {path} has no record with both '{arguments.x}' and '{key}'")
            panel.plot(steps, values, label=os.path.basename(path), linewidth=1)
        panel.set_ylabel(key)
        panel.grid(True, alpha=0.3)
    axes[0, 0].legend()
    axes[-1, 0].set_xlabel(arguments.x)
    figure.savefig(arguments.output, dpi=120)
    print(arguments.output)


if __name__ == "__main__":
    main()

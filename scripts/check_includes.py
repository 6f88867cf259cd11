#!/usr/bin/env python3
"""Checks which module may include what: the table of docs/decisions.md ("Modules"), enforced. Standard library only.

    scripts/check_includes.py [ROOT]      exit status 1 and one line a violation, 0 when there is none
"""

import pathlib
import re
import sys

# Modules that each module's headers and sources may include, itself aside.
ALLOWED = {
    "base": set(),
    "mesh": {"base"},
    "config": {"base", "mesh"},
    "data": {"base", "config"},
    "comm": {"base"},
    "kernels": {"base"},
    "parameter": {"base", "mesh", "comm", "kernels"},
    "gtp": {"base", "mesh", "comm", "kernels", "parameter"},
    "model": {"base", "config", "mesh", "comm", "kernels", "parameter", "gtp"},
    "pipeline": {"base", "comm"},
    "optim": {"base", "config", "mesh", "comm", "kernels", "parameter"},
    "checkpoint": {"base", "config", "mesh", "comm", "kernels", "parameter"},
    "training": {"base", "config", "mesh", "data", "comm", "kernels", "parameter", "gtp", "model", "pipeline", "optim",
                 "checkpoint"},
}
TORCH_FREE = {"base", "mesh", "config", "data"}
TORCH = re.compile(r"^(ATen|c10|torch)/")

# Headers that only these files may include: (pattern, the files or folders, at most how many files, why).
CONFINED = [
    (re.compile(r"^spdlog/"), ["src/base/log.cpp"], 1, "its fmt clashes with the one of torch: use pgpt/base/log.h"),
    (re.compile(r"^cxxopts"), ["src/config/"], 1, "the option table is the only user of the parser"),
    (re.compile(r"^nccl\.h$"), ["src/comm/"], None, "nothing above comm sees a backend"),
    (re.compile(r"ProcessGroup(NCCL|Gloo)|NCCLUtils|^gloo/"), ["src/comm/", "cmake/gloo_stubs/"], None,
     "nothing above comm sees a backend"),
]

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


def source_files(root, folders):
    for folder in folders:
        yield from sorted(path for path in (root / folder).rglob("*") if path.suffix in SUFFIXES)


def includes(path):
    return INCLUDE.findall(path.read_text(encoding="utf-8"))


def module_of(relative):
    """The module that a file belongs to, None for apps and tests."""
    parts = relative.parts
    if parts[0] == "src":
        return parts[1]
    if parts[:2] == ("include", "pgpt"):
        return parts[2]
    return None


def check(root):
    """Returns one line for each include that breaks a rule."""
    problems = []
    confined_users = {index: [] for index in range(len(CONFINED))}
    for path in source_files(root, ("include", "src", "apps", "tests", "cmake")):
        relative = path.relative_to(root)
        module = module_of(relative)
        if module is not None and module not in ALLOWED:
            problems.append(f"{relative}: module '{module}' is not in the table of scripts/check_includes.py")
            continue
        for included in includes(path):
            target = included.split("/")[1] if included.startswith("pgpt/") else None
            if module is not None and target is not None and target != module and target not in ALLOWED[module]:
                problems.append(f"{relative}: {module} may not include {included}")
            if module in TORCH_FREE and TORCH.match(included):
                problems.append(f"{relative}: {module} is free of torch, but includes {included}")
            if relative.parts[0] == "include" and included.startswith("pgpt/") and not (root / "include" / included).exists():
                problems.append(f"{relative}: includes {included}, which does not exist")
            for index, (pattern, places, _, reason) in enumerate(CONFINED):
                if not pattern.search(included):
                    continue
                if not any(relative.as_posix().startswith(place) for place in places):
                    problems.append(f"{relative}: {included} belongs in {' or '.join(places)} only ({reason})")
                elif relative.as_posix() not in confined_users[index]:
                    confined_users[index].append(relative.as_posix())
    for index, (pattern, _, limit, reason) in enumerate(CONFINED):
        if limit is not None and len(confined_users[index]) > limit:
            problems.append(f"{pattern.pattern} is included by {', '.join(confined_users[index])}: one file only ({reason})")
    return problems


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    problems = check(root)
    print("\n".join(problems) if problems else "include rules: ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

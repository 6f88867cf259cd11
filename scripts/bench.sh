#!/usr/bin/env bash
# Measures training speed beside the speed floor, a sketch of the design and PyTorch FSDP2; docs/benchmarks.md explains it.
#
#   scripts/bench.sh [--program PATH] [--models llama-1.3b,gpt2-124m] [--gpus N] [--output FOLDER] [...]    (--help: all)
#   scripts/bench.sh --cpu [--threads 2,1] [--models llama-10m,gpt2-10m] [...]       beside PyTorch eager on the CPU
#
# Without --program the newest build/*/bin/pretrain_gpt runs. Needs a Python with torch, and triton unless --cpu; PGPT_PYTHON
# chooses it.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python=$(find_python) || die "no Python with torch >= $min_torch found; run scripts/setup.sh or set PGPT_PYTHON"
find_program "$@"
tool=bench.py
if [ "${1:-}" = --cpu ]; then
  tool=cpu.py
  shift
fi
exec "$python" "$project_root/scripts/bench/$tool" "${program_option[@]}" "$@"

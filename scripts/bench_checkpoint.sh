#!/usr/bin/env bash
# Measures how fast pretrain_gpt saves and loads beside the disk's own rate; docs/benchmarks.md explains it.
#
#   scripts/bench_checkpoint.sh [--program PATH] [--model llama-1.3b] [--folder FOLDER] [--async] [...]    (--help: all)
#
# Without --program the newest build/*/bin/pretrain_gpt runs. Needs free space for two checkpoints in the folder.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

find_program "$@"
exec python3 "$project_root/scripts/bench/checkpoint.py" "${program_option[@]}" "$@"

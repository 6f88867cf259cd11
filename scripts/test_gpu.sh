#!/usr/bin/env bash
# Builds with CUDA and runs every test tagged [gpu]: kernels against the CPU path, communicators, the published comparison on one GPU.
#
#   scripts/test_gpu.sh [BUILD_FOLDER]   (default build/release)
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[ "$(count_gpus)" -gt 0 ] || die "no GPU is visible; scripts/test.sh runs the CPU tests"
"$project_root/scripts/setup.sh" --with-cuda
build_dir=${1:-$project_root/build/release}
if [ $# -eq 0 ]; then
  configure_and_build release -DPGPT_TESTS=ON -- pretrain_gpt test_kernels test_comm test_program
fi
status=0
for program in test_kernels test_comm test_program; do
  say "test_gpu: $program [gpu]"
  OMP_NUM_THREADS=4 "$build_dir/bin/$program" "[gpu]" --durations yes || status=1
done
exit "$status"

#!/usr/bin/env bash
# Starts pretrain_gpt with torchrun, one rank a GPU; arguments go to pretrain_gpt.
#
#   scripts/launch_torchrun.sh --num-layers 12 ...                        all GPUs of this machine; without any, two ranks
#   NPROC=2 scripts/launch_torchrun.sh ...                                two ranks
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 scripts/launch_torchrun.sh ... on each of four machines, NODE_RANK 0 to 3
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

build_dir=$(find_build) || die "nothing built yet: run scripts/build.sh"
torchrun=$(dirname "$(find_python)")/torchrun
[ -x "$torchrun" ] || torchrun=$(command -v torchrun) || die "no torchrun found; scripts/launch_mpirun.sh does without"
num_gpus=$(count_gpus)
exec "$torchrun" \
  --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
  --nproc-per-node "${NPROC:-$((num_gpus > 0 ? num_gpus : 2))}" \
  --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
  --no-python "$build_dir/bin/pretrain_gpt" "$@"

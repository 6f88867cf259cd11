#!/usr/bin/env bash
# Starts pretrain_gpt with Open MPI's mpirun, one rank a GPU; arguments go to pretrain_gpt. MPI only starts the processes.
#
#   scripts/launch_mpirun.sh --num-layers 12 ...                              all GPUs of this machine
#   NPROC=2 scripts/launch_mpirun.sh ...                                      two ranks
#   NPROC=16 HOSTS=node0:8,node1:8 MASTER_ADDR=node0 scripts/launch_mpirun.sh ...  two machines with eight GPUs each
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

build_dir=$(find_build) || die "nothing built yet: run scripts/build.sh"
command -v mpirun >/dev/null || die "no mpirun found: apt-get install openmpi-bin"
num_gpus=$(count_gpus)
# mpirun binds each rank to a core by default, which would leave the other cores of the rank's share idle.
options=(-np "${NPROC:-$((num_gpus > 0 ? num_gpus : 2))}" --bind-to none)
[ "$(id -u)" != 0 ] || options+=(--allow-run-as-root)
if [ -n "${HOSTS:-}" ]; then
  [ -n "${MASTER_ADDR:-}" ] || die "several machines need MASTER_ADDR, the name of the first one"
  options+=(--host "$HOSTS" -x "MASTER_ADDR=$MASTER_ADDR" -x "MASTER_PORT=${MASTER_PORT:-29500}")
fi
exec mpirun "${options[@]}" "$build_dir/bin/pretrain_gpt" "$@"

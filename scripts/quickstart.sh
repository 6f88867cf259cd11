#!/usr/bin/env bash
# Installs, builds and runs the published two-rank comparison: GTP 2, then plain data parallel as the control, and
# prints both beside the published figures. Fails when they do not agree.
#
#   scripts/quickstart.sh             two CPU ranks; where a GPU is visible, two GPU ranks as well
#   scripts/quickstart.sh --cpu-only  never builds for or runs on a GPU
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

num_gpus=$(count_gpus)
for argument in "$@"; do
  case $argument in
    --cpu-only) num_gpus=0 ;;
    -h | --help)
      sed -n '2,6s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    *) die "unknown argument '$argument' (known: --cpu-only)" ;;
  esac
done

if [ "$num_gpus" -gt 0 ]; then
  preset=release
  "$project_root/scripts/setup.sh" --with-cuda
else
  preset=cpu-only
  "$project_root/scripts/setup.sh" --without-cuda
fi
configure_and_build "$preset" -DPGPT_TESTS=OFF -- pretrain_gpt gpt_tool
build_dir=$project_root/build/$preset
results=$build_dir/quickstart
mkdir -p "$results"

# The published command, without --tensor-parallel-num-weight-shards.
seed_arguments=(
  --mock-data --tokenizer-type NullTokenizer --vocab-size 128
  --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4
  --seq-length 64 --max-position-embeddings 64
  --micro-batch-size 1 --global-batch-size 2 --train-iters 3 --eval-interval 100 --eval-iters 0
  --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 1 --lr-decay-iters 3 --lr-decay-style cosine
  --weight-decay 0.01 --weight-decay-incr-style constant --clip-grad 1.0
  --bf16 --disable-bias-linear --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion
  --attention-dropout 0 --hidden-dropout 0 --attention-softmax-in-fp32
  --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
  --seed 1234 --log-interval 1 --dataloader-type single --num-workers 0
)

free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# run_two_ranks COMMAND...: under torchrun, else as two processes with torchrun's environment.
run_two_ranks() {
  local torchrun port rank status=0 pids=()
  torchrun=$(dirname "$(find_python)")/torchrun
  if [ ! -x "$torchrun" ]; then torchrun=$(command -v torchrun || true); fi
  port=$(free_port)
  if [ -n "$torchrun" ]; then
    "$torchrun" --nnodes 1 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port "$port" --no-python "$@"
    return
  fi
  for rank in 0 1; do
    RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$@" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
  return "$status"
}

# train NAME [options...]: leaves NAME.jsonl (metrics) and NAME.log (output of both ranks) in the results folder.
train() {
  local name=$1
  shift
  rm -f "$results/$name.jsonl" "$results/$name.log"
  say "quickstart: running $name on two ranks"
  if ! run_two_ranks "$build_dir/bin/pretrain_gpt" "${seed_arguments[@]}" --loss-window step \
    --metrics-file "$results/$name.jsonl" "$@" >"$results/$name.log" 2>&1; then
    tail -n 30 "$results/$name.log" >&2
    die "the run failed; its output is in $results/$name.log"
  fi
}

# compare NAME DEVICE: prints the table of NAME and of its control.
compare() {
  python3 "$project_root/scripts/compare_seed.py" --device "$2" \
    --gtp "$results/$1-gtp2.jsonl" --gtp-log "$results/$1-gtp2.log" \
    --control "$results/$1-dp2.jsonl" --control-log "$results/$1-dp2.log"
}

(
  export CUDA_VISIBLE_DEVICES=""
  train cpu-gtp2 --distributed-backend gloo --tensor-parallel-num-weight-shards 2
  train cpu-dp2 --distributed-backend gloo
)
status=0
compare cpu cpu || status=1

if [ "$num_gpus" -gt 0 ]; then
  # Two ranks on one GPU cannot use NCCL; gloo carries their data through host memory.
  backend=nccl
  if [ "$num_gpus" -lt 2 ]; then backend=gloo; fi
  train gpu-gtp2 --distributed-backend "$backend" --tensor-parallel-num-weight-shards 2
  train gpu-dp2 --distributed-backend "$backend"
  compare gpu gpu || status=1
fi
exit "$status"

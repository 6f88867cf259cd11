# Shared by the scripts of this folder: where things are and which tools to use. Source it, do not run it.
# shellcheck shell=bash disable=SC2034

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv_dir="$project_root/.venv"
torch_version=2.11.0
cudnn_frontend_version=1.18.0
transformers_version=5.24.0
tensorboard_version=2.21.0
safetensors_version=0.8.0
min_torch=2.11
min_cmake=3.29

say() { printf '%s\n' "$*"; }
warn() { printf '%s\n' "$*" >&2; }
die() {
  printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# version_at_least FOUND WANTED
version_at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

# has_torch PYTHON: true when it offers a torch that is new enough. Reads the version file only; importing torch takes seconds.
has_torch() {
  local version
  version=$("$1" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null) || return 1
  version_at_least "${version%%+*}" "$min_torch"
}

# Prints the Python whose torch is built against: PGPT_PYTHON, then .venv, then python3. Fails when none has torch.
find_python() {
  local candidate
  for candidate in "${PGPT_PYTHON:-}" "$venv_dir/bin/python" "$(command -v python3 || true)"; do
    if [ -n "$candidate" ] && [ -x "$candidate" ] && has_torch "$candidate"; then
      printf '%s\n' "$candidate"
      return 0
    fi
  done
  return 1
}

# Prints a cmake that is new enough, from PATH or .venv. Fails when there is none.
find_cmake() {
  local candidate version
  for candidate in "$(command -v cmake || true)" "$venv_dir/bin/cmake"; do
    version=$("${candidate:-false}" --version 2>/dev/null | sed -n 's/^cmake version //p')
    if [ -n "$version" ] && version_at_least "$version" "$min_cmake"; then
      printf '%s\n' "$candidate"
      return 0
    fi
  done
  return 1
}

# find_tool NAME: prints the path of NAME in PATH or .venv.
find_tool() {
  command -v "$1" && return 0
  [ -x "$venv_dir/bin/$1" ] && printf '%s\n' "$venv_dir/bin/$1"
}

# Prints an nvcc of CUDA 13, installed or from the wheels. Fails when there is none.
find_nvcc() {
  local candidate
  for candidate in "${CUDACXX:-}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc \
    "$venv_dir"/lib/python3*/site-packages/nvidia/cu13/bin/nvcc; do
    if [ -n "$candidate" ] && [ -x "$candidate" ] && "$candidate" --version 2>/dev/null | grep -q 'release 13\.'; then
      printf '%s\n' "$candidate"
      return 0
    fi
  done
  return 1
}

# Prints how many GPUs the driver shows, 0 without a driver.
count_gpus() {
  local listing
  listing=$(nvidia-smi -L 2>/dev/null) || listing=""
  printf '%s\n' "$listing" | grep -c '^GPU ' || true
}

# Prints how many compile jobs fit: one per core, at most one per 1.5 GB of free memory. PGPT_JOBS overrides it.
count_jobs() {
  if [ -n "${PGPT_JOBS:-}" ]; then
    printf '%s\n' "$PGPT_JOBS"
    return
  fi
  local cores memory_kb by_memory
  cores=$(nproc)
  memory_kb=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)
  by_memory=$((memory_kb / 1500000))
  [ "$by_memory" -ge 1 ] || by_memory=1
  printf '%s\n' $((cores < by_memory ? cores : by_memory))
}

# Prints the folder of the newest built program, fails when nothing is built.
find_build() {
  local program newest=""
  for program in "$project_root"/build/*/bin/pretrain_gpt; do
    if [ -x "$program" ] && { [ -z "$newest" ] || [ "$program" -nt "$newest" ]; }; then newest=$program; fi
  done
  [ -n "$newest" ] && dirname "$(dirname "$newest")"
}

# find_program ARGUMENTS: sets the array `program_option` to the option that names the newest build, empty when the arguments
# name a program themselves or ask for help.
find_program() {
  local build
  program_option=()
  case " $* " in
    *" --program "* | *" --program="* | *" --help "* | *" -h "*) ;;
    *)
      build=$(find_build) || die "nothing is built: run scripts/build.sh, or give --program PATH"
      program_option=(--program "$build/bin/pretrain_gpt")
      ;;
  esac
}

# configure_and_build PRESET [cmake -D options...] [-- targets...]: leaves the result in build/PRESET.
configure_and_build() {
  local preset=$1 python cmake ninja
  shift
  python=$(find_python) || die "no torch >= $min_torch found; run scripts/setup.sh"
  cmake=$(find_cmake) || die "no cmake >= $min_cmake found; run scripts/setup.sh"
  ninja=$(find_tool ninja) || die "no ninja found; run scripts/setup.sh"
  local options=() targets=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    options+=("$1")
    shift
  done
  if [ $# -gt 1 ]; then
    targets=(--target "${@:2}")
  fi
  (
    cd "$project_root" || exit 1
    "$cmake" --preset "$preset" "-DPGPT_PYTHON=$python" "-DCMAKE_MAKE_PROGRAM=$ninja" "${options[@]}" &&
      "$cmake" --build "build/$preset" --parallel "$(count_jobs)" "${targets[@]}"
  )
}

#!/usr/bin/env bash
# Installs what the build needs, for Debian 12 and Ubuntu 24.04. Asks nothing, may be run again, and changes nothing
# (and needs no network) where everything is there already.
#
#   scripts/setup.sh                 everything, with a CUDA compiler for the GPU kernels (needs no GPU)
#   scripts/setup.sh --without-cuda  enough for a CPU-only build (-DPGPT_CUDA=OFF)
#   scripts/setup.sh --with-tests    also the Python packages that conversion tests compare with (they skip without)
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

with_cuda=1
with_tests=0
for argument in "$@"; do
  case $argument in
    --with-cuda) with_cuda=1 ;;
    --without-cuda) with_cuda=0 ;;
    --with-tests) with_tests=1 ;;
    -h | --help)
      sed -n '2,7s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    *) die "unknown argument '$argument' (known: --with-cuda, --without-cuda, --with-tests)" ;;
  esac
done

# ---- system packages ------------------------------------------------------------------------------------------------

has_command() { command -v "$1" >/dev/null; }
# Looks where the compiler would look, so that libraries installed by other means than apt count too.
has_header() { has_command g++ && printf '#include <%s>\n' "$1" | g++ -std=c++20 -E -x c++ - >/dev/null 2>&1; }

needed=()
has_command g++ || needed+=(g++)
has_command git || needed+=(git)
has_command python3 || needed+=(python3)
has_header spdlog/spdlog.h || needed+=(libspdlog-dev)
has_header nlohmann/json.hpp || needed+=(nlohmann-json3-dev)
has_header cxxopts.hpp || needed+=(libcxxopts-dev)
has_header catch2/catch.hpp || has_header catch2/catch_all.hpp || needed+=(catch2)

optional=()
has_command ccache || optional+=(ccache)       # rebuilds take seconds instead of minutes
has_command mpirun || optional+=(openmpi-bin)  # the tests that start ranks with mpirun

# What pip has to bring, decided here because making .venv takes an apt package.
wheels=()
find_python >/dev/null || wheels+=("torch==$torch_version" numpy)
find_cmake >/dev/null || wheels+=("cmake>=$min_cmake")
find_tool ninja >/dev/null || wheels+=(ninja)
if [ "$with_cuda" = 1 ] && ! find_nvcc >/dev/null; then
  # The newest nvvm does not fit nvcc 13.0: its PTX is refused by ptxas.
  wheels+=("cuda-toolkit[nvcc,cccl,crt]==13.0.2" "nvidia-nvvm==13.0.*")
fi
if [ ${#wheels[@]} -gt 0 ] && [ ! -x "$venv_dir/bin/pip" ]; then
  python3 -c 'import ensurepip, venv' 2>/dev/null || needed+=(python3-venv)
fi

apt_install() { DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; }
# Without a network apt may wait for a long time; what is optional is not worth that.
install_optional() {
  DEBIAN_FRONTEND=noninteractive timeout 60 apt-get -o Acquire::Retries=0 install -y --no-install-recommends \
    "${optional[@]}" </dev/null >/dev/null 2>&1
}

if [ ${#needed[@]} -gt 0 ]; then
  has_command apt-get || die "missing: ${needed[*]} (names of Debian packages); install them with this system's package manager"
  [ "$(id -u)" = 0 ] || die "run as root: apt-get install -y ${needed[*]} ${optional[*]}"
  say "setup: installing ${needed[*]} ${optional[*]}"
  apt-get update -q
  apt_install "${needed[@]}" "${optional[@]}"
elif [ ${#optional[@]} -gt 0 ]; then
  if ! { [ "$(id -u)" = 0 ] && has_command apt-get && install_optional; }; then
    say "setup: not found, and not necessary: ${optional[*]}"
  fi
fi

# ---- Python packages ------------------------------------------------------------------------------------------------

if [ ${#wheels[@]} -gt 0 ]; then
  if [ ! -x "$venv_dir/bin/pip" ]; then
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
      die "torch $torch_version needs Python 3.10 or newer, python3 is $(python3 --version)"
    say "setup: making $venv_dir"
    python3 -m venv "$venv_dir"
  fi
  say "setup: installing ${wheels[*]}"
  "$venv_dir/bin/pip" install --disable-pip-version-check --no-input --quiet "${wheels[@]}"
fi

# Optional: headers with which attention inside documents runs in cuDNN instead of libtorch's flash kernel.
has_cudnn_frontend() {
  [ -n "${PGPT_CUDNN_FRONTEND_DIR:-}" ] || has_header cudnn_frontend_version.h ||
    compgen -G "$venv_dir/lib/python3*/site-packages/include/cudnn_frontend.h" >/dev/null
}
if [ "$with_cuda" = 1 ] && ! has_cudnn_frontend; then
  if [ ! -x "$venv_dir/bin/pip" ] ||
    ! timeout 180 "$venv_dir/bin/pip" install --disable-pip-version-check --no-input --quiet --retries 1 --timeout 15 \
      --no-deps "nvidia-cudnn-frontend==$cudnn_frontend_version"; then
    say "setup: without the headers of nvidia-cudnn-frontend, so attention inside documents will use libtorch's kernel"
  fi
fi

# Optional: a system's own Python is left alone, and a machine without network does without.
if [ "$with_tests" = 1 ] && ! "$(find_python)" -c 'import transformers, safetensors, tensorboard' 2>/dev/null; then
  if [ "$(find_python)" != "$venv_dir/bin/python" ] ||
    ! timeout 180 "$venv_dir/bin/pip" install --disable-pip-version-check --no-input --quiet --retries 1 --timeout 15 \
      "transformers==$transformers_version" "safetensors==$safetensors_version" "tensorboard==$tensorboard_version"; then
    say "setup: without the transformers and tensorboard packages, so tests that compare with them will be skipped"
  fi
fi

# ---- what is there now ----------------------------------------------------------------------------------------------

python=$(find_python) || die "no Python with torch >= $min_torch after the installation"
cmake=$(find_cmake) || die "no cmake >= $min_cmake after the installation"
ninja=$(find_tool ninja) || die "no ninja after the installation"
say "setup: torch $("$python" -c 'import importlib.metadata as m; print(m.version("torch"))') of $python"
say "setup: cmake $cmake, ninja $ninja"
if [ "$with_cuda" = 1 ]; then
  nvcc=$(find_nvcc) || die "no nvcc of CUDA 13 after the installation; scripts/setup.sh --without-cuda does without"
  say "setup: nvcc $nvcc"
fi
say "setup: done"

#!/usr/bin/env bash
# Configures and builds one preset of CMakePresets.json into build/PRESET; the programs are in build/PRESET/bin.
#
#   scripts/build.sh [PRESET] [-DNAME=VALUE ...] [-- TARGET ...]     PRESET: release (default), cpu-only, dev, asan, tsan
#
# release and dev need a CUDA compiler, but no GPU; the others do without.
# PGPT_JOBS sets the number of compile jobs, PGPT_PYTHON the Python whose torch is used.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
  -h | --help)
    sed -n '2,7s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac
preset=release
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  preset=$1
  shift
fi
# The quick start configures without tests; a build asked for by name has them unless told otherwise.
configure_and_build "$preset" -DPGPT_TESTS=ON "$@" || {
  status=$?
  case $preset in
    release | dev)
      find_nvcc >/dev/null || warn "build.sh: no CUDA compiler here; scripts/build.sh cpu-only does without one"
      ;;
  esac
  exit "$status"
}

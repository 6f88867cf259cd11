#!/usr/bin/env bash
# Installs what is missing, builds everything (GPU kernels too, no GPU needed) and runs all tests; ends with ctest's
# summary. Arguments go to ctest: scripts/test.sh -R gtp
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

"$project_root/scripts/setup.sh" --with-cuda --with-tests
configure_and_build release -DPGPT_TESTS=ON -DPGPT_CUDA=ON
ctest=$(dirname "$(find_cmake)")/ctest
exec "$ctest" --test-dir "$project_root/build/release" --output-on-failure --no-tests=error \
  --parallel "$(nproc)" "$@"

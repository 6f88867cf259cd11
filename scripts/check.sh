#!/usr/bin/env bash
# Checks everything that is not a test: format, include rules, shell scripts, machine paths, long files, generated pages.
# Prints what is wrong, all of it, and fails when anything is.
#
#   scripts/check.sh              the quick checks (docs/options.md is compared with a built pretrain_gpt)
#   scripts/check.sh --fix        formats the sources and rewrites docs/options.md first
#   scripts/check.sh --full       also compiles every public header by itself
#   scripts/check.sh --tidy       also runs clang-tidy on the .cpp files that differ from HEAD (--tidy=COMMIT: from COMMIT)
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$project_root"

clang_format_version=20.1.8
clang_tidy_version=20.1.0
fix=0 full=0 tidy_base=""
for argument in "$@"; do
  case $argument in
    --fix) fix=1 ;;
    --full) full=1 ;;
    --tidy) tidy_base=HEAD ;;
    --tidy=*) tidy_base=${argument#--tidy=} ;;
    -h | --help)
      sed -n '2,8s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    *) die "unknown argument '$argument' (known: --fix, --full, --tidy[=COMMIT])" ;;
  esac
done

status=0
# result NAME [OUTPUT]: reports one check; output means that it failed.
result() {
  if [ -z "${2:-}" ]; then
    say "check: $1: ok"
  else
    say "check: $1: FAILED"
    printf '%s\n' "$2" | sed 's/^/  /'
    status=1
  fi
}

# wheel_tool NAME VERSION: prints the path of a pinned tool in .venv, installing it when it is not there.
wheel_tool() {
  local program=$venv_dir/bin/$1
  if ! "$program" --version 2>/dev/null | grep -qF "version $2"; then
    [ -x "$venv_dir/bin/pip" ] || python3 -m venv "$venv_dir" >&2
    "$venv_dir/bin/pip" install --disable-pip-version-check --no-input --quiet "$1==$2" >&2 || return 1
  fi
  printf '%s\n' "$program"
}

mapfile -t sources < <(find apps include src tests cmake -type f \
  \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) | sort)

# ---- format ---------------------------------------------------------------------------------------------------------
if clang_format=$(wheel_tool clang-format "$clang_format_version"); then
  if [ "$fix" = 1 ]; then "$clang_format" -i "${sources[@]}"; fi
  unformatted=$("$clang_format" --dry-run -Werror "${sources[@]}" 2>&1 |
    sed -nE 's/^([^: ]+):[0-9]+:[0-9]+: (error|warning):.*/\1/p' | sort | uniq -c || true)
  result "format (repair with scripts/check.sh --fix)" "$unformatted"
else
  result "format" "clang-format $clang_format_version is not in .venv and could not be installed"
fi

# ---- rules ----------------------------------------------------------------------------------------------------------
if ! output=$(python3 scripts/check_includes.py "$project_root" 2>&1); then result "include rules" "$output"; else result "include rules"; fi

missing_pragma=$(printf '%s\n' "${sources[@]}" | grep -E '\.(h|cuh)$' | xargs grep -L '^#pragma once' || true)
result "#pragma once in every header" "$missing_pragma"

scripts=(scripts/*.sh scripts/*.sbatch .ci/run)
output=$(for script in "${scripts[@]}"; do bash -n "$script" 2>&1 || true; done)
if command -v shellcheck >/dev/null; then output+=$(shellcheck -x -P scripts "${scripts[@]}" 2>&1 || true); fi
result "shell scripts" "$output"

output=$(for script in scripts/*.py scripts/bench/*.py tests/python/*.py; do
  python3 -c 'import ast, sys; ast.parse(open(sys.argv[1], encoding="utf-8").read(), sys.argv[1])' "$script" 2>&1 || true
done)
result "Python scripts" "$output"

checked=(apps include src tests cmake scripts docs configs .ci .github README.md CMakeLists.txt CMakePresets.json)
result "no path of one machine" "$(grep -rnIE --exclude-dir=data --exclude-dir=__pycache__ '/(work|root|home)/[a-z]' "${checked[@]}" || true)"
result "no unfinished work" "$(grep -rnIE --exclude-dir=data --exclude-dir=__pycache__ --exclude=check.sh '\b(TODO|FIXME|XXX)\b' "${checked[@]}" || true)"

# Not a failure: a long file may have a reason.
long_files=$(wc -l "${sources[@]}" | awk '$2 != "total" && $1 > 500 {print $1, $2}' | sort -rn)
[ -z "$long_files" ] || say "check: note: files over 500 lines:"$'\n'"$(printf '%s\n' "$long_files" | sed 's/^/  /')"

# ---- generated pages ------------------------------------------------------------------------------------------------
build_dir=$(find_build || true)
if [ -z "$build_dir" ]; then
  result "docs/options.md" "no built pretrain_gpt to compare with: run scripts/build.sh first"
elif ! generated=$("$build_dir/bin/pretrain_gpt" --help-markdown 2>&1); then
  result "docs/options.md" "$build_dir/bin/pretrain_gpt --help-markdown failed: $generated"
else
  if [ "$fix" = 1 ]; then printf '%s\n' "$generated" >docs/options.md; fi
  if [ ! -f docs/options.md ]; then
    result "docs/options.md" "missing: write it with scripts/check.sh --fix"
  elif ! printf '%s\n' "$generated" | cmp -s - docs/options.md; then
    result "docs/options.md" "differs from the output of ${build_dir#"$project_root"/}/bin/pretrain_gpt --help-markdown: build, then scripts/check.sh --fix"
  else
    result "docs/options.md"
  fi
fi

# Broken links between the Markdown pages.
result "links of README and docs" "$(python3 - <<'PYTHON'
import pathlib, re
for page in [pathlib.Path("README.md"), *sorted(pathlib.Path("docs").rglob("*.md"))]:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target and not (page.parent / target).exists():
            print(f"{page}: {target} does not exist")
PYTHON
)"

# ---- slow checks ----------------------------------------------------------------------------------------------------
if [ "$full" = 1 ]; then
  preset=cpu-only
  if find_nvcc >/dev/null; then preset=release; fi
  if output=$(configure_and_build "$preset" -- check_headers 2>&1); then
    result "every public header compiles by itself"
  else
    result "every public header compiles by itself" "$(printf '%s\n' "$output" | grep -E 'error|Error' | head -n 30)"
  fi
fi

if [ -n "$tidy_base" ]; then
  mapfile -t changed < <({
    git diff --name-only --diff-filter=d "$tidy_base" -- 'apps/*.cpp' 'src/*.cpp' 'tests/*.cpp'
    git ls-files --others --exclude-standard -- 'apps/*.cpp' 'src/*.cpp' 'tests/*.cpp'
  } | sort -u)
  if [ ${#changed[@]} -eq 0 ]; then
    result "clang-tidy (no changed file)"
  elif [ -z "$build_dir" ]; then
    result "clang-tidy" "no build folder with compile_commands.json: run scripts/build.sh first"
  elif ! clang_tidy=$(wheel_tool clang-tidy "$clang_tidy_version"); then
    result "clang-tidy" "clang-tidy $clang_tidy_version is not in .venv and could not be installed"
  else
    # gcc's precompiled header means nothing to clang.
    commands=$(mktemp -d)
    trap 'rm -rf "$commands"' EXIT
    sed -E 's/-Winvalid-pch//g; s/-include [^ ]*cmake_pch\.hxx//g' "$build_dir/compile_commands.json" >"$commands/compile_commands.json"
    output=$(printf '%s\0' "${changed[@]}" |
      xargs -0 -n 1 -P "$(count_jobs)" "$clang_tidy" -p "$commands" --quiet 2>/dev/null || true)
    result "clang-tidy on ${#changed[@]} changed files" "$(printf '%s\n' "$output" | grep -E '(warning|error):' | sort -u || true)"
  fi
fi

if [ "$status" = 0 ]; then say "check: all good"; else say "check: something is wrong, see above"; fi
exit "$status"

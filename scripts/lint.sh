#!/usr/bin/env bash
# Formatting, C++ diagnostics, Python diagnostics. usage: lint.sh <python> <build folder>
set -euo pipefail
python=$1 build=$2
"$python" -m pip install --quiet clang-format==16.0.6 clang-tidy==16.0.4
bin=$(dirname "$python")
mapfile -t sources < <(git ls-files '*.cpp' '*.h')
"$bin/clang-format" --dry-run --Werror "${sources[@]}"
cmake -S . -B "$build" -G Ninja -DTIDEGATE_BENCH=OFF >/dev/null
mapfile -t units < <(git ls-files 'src/base/*.cpp' 'src/ep/*.cpp' 'src/ops/*.cpp' | grep -vE 'test.cpp$|bench.cpp$|kernel.cpp$')
# The program inside the package: its Python entry needs pkg_resources, which newer setuptools no longer have.
tidy=$("$python" -c 'import importlib.util as u; print(u.find_spec("clang_tidy").submodule_search_locations[0])')/data/bin/clang-tidy
# Errors are on its standard output; the other one counts warnings of system headers.
"$tidy" -p "$build" --quiet --warnings-as-errors='*' "${units[@]}" 2>"$build/tidy.log" || { cat "$build/tidy.log" >&2; exit 1; }
"$bin/ruff" check python tests bench examples scripts torch
"$bin/ruff" format --check python tests bench examples torch
echo "lint: clean"

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
"$bin/clang-tidy" -p "$build" --quiet --warnings-as-errors='*' "${units[@]}" 2>/dev/null
"$bin/ruff" check python tests bench examples scripts torch
"$bin/ruff" format --check python tests bench examples torch
echo "lint: clean"

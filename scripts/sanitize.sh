#!/usr/bin/env bash
# C++ tests in a sanitizer build. usage: sanitize.sh <build folder> <sanitizers> <jobs>
set -euo pipefail
cmake -S . -B "$1" -G Ninja -DTIDEGATE_SANITIZE="$2" -DTIDEGATE_BENCH=OFF >/dev/null
cmake --build "$1" -j "$3"
ctest --test-dir "$1" --output-on-failure -j "$3" | tail -n 25

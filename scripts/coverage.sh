#!/usr/bin/env bash
# Lines and branches of the C++ core that its tests run. usage: coverage.sh <build folder> <jobs> [--summary-only]
# Needs clang with llvm-profdata and llvm-cov. Writes <build folder>/coverage.txt and lines.txt (what is not covered).
set -euo pipefail
build=$1 jobs=$2
version=$(ls /usr/bin/clang++-* 2>/dev/null | sed -nE 's/.*clang\+\+-([0-9]+)$/\1/p' | sort -n | tail -n 1)
suffix=${version:+-$version}
for tool in clang++ llvm-profdata llvm-cov; do
  command -v "$tool$suffix" >/dev/null || { echo "missing $tool$suffix; run:  sudo apt-get install clang llvm" >&2; exit 3; }
done
# Calls of kernels are not inlined away, and a test takes seconds: -O1 without the optimiser's merging of branches.
flags="-fprofile-instr-generate -fcoverage-mapping -g0"
cmake -S . -B "$build" -G Ninja -DCMAKE_CXX_COMPILER="clang++$suffix" -DCMAKE_BUILD_TYPE=Coverage -DCMAKE_CXX_FLAGS="$flags" \
  -DTIDEGATE_OPTIMISE=-O1 -DTIDEGATE_BENCH=OFF >/dev/null
cmake --build "$build" -j "$jobs" --target tidegate_tests tidegate_fuzz tidegate_allocation_test
rm -rf "$build/profiles" && mkdir -p "$build/profiles"
export LLVM_PROFILE_FILE="$PWD/$build/profiles/%4m.raw"  # four files that all test processes add to
ctest --test-dir "$build" -j "$jobs" -E '^(objects|install|simd.*exhaustive)' --output-on-failure | tail -n 3
"llvm-profdata$suffix" merge -sparse "$build"/profiles/*.raw -o "$build/core.profile"
# Not part of the core, or not runnable here: tests, timings, the vocabulary of an instruction set that this CPU lacks.
ignore='(_test|/test|/bench)\.cpp$|test_case\.h$|update_case\.h$|/tests/|bench_data\.h|chunk_bench\.h|plain_chunk\.h|gtest|/usr/|simd/probe|emulate_avx512|simd/scalar_half'
grep -qw avx512f /proc/cpuinfo || ignore="$ignore|simd/avx512\.h"
report() { "llvm-cov$suffix" "$@" -instr-profile="$build/core.profile" -ignore-filename-regex="$ignore" "$build/tests/tidegate_tests" -object "$build/tests/fuzz/tidegate_fuzz" -object "$build/tests/fuzz/tidegate_allocation_test"; }
report report > "$build/coverage.txt"
report show -show-line-counts-or-regions=false -line-coverage-lt=100 > "$build/lines.txt" 2>/dev/null || true
awk 'NR <= 2 || /^TOTAL/' "$build/coverage.txt"
# Columns of TOTAL: regions 3, functions 3, lines 3, branches 3.
awk '/^TOTAL/ { print "lines " $10 ", branches " $13 }' "$build/coverage.txt"

#!/usr/bin/env bash
# Lines and branches of the C++ core that its tests run. usage: coverage.sh <build folder> <folder for coverage> <jobs>
# Needs clang 16 or later with llvm-profdata and llvm-cov. The core is compiled once more, with counters, and linked before the
# library of an ordinary build: tests and the kernels of other instruction sets are taken from there as they are.
set -euo pipefail
build=$1 out=$2 jobs=$3
version=$(ls /usr/bin/clang++-* 2>/dev/null | sed -nE 's/.*clang\+\+-([0-9]+)$/\1/p' | sort -n | tail -n 1)
suffix=${version:+-$version}
for tool in clang++ llvm-profdata llvm-cov; do
  command -v "$tool$suffix" >/dev/null && [ "${version:-0}" -ge 16 ] ||
    { echo "missing $tool 16 or later; run:  sudo apt-get install clang-16 llvm-16" >&2; exit 3; }
done
programs="tidegate_tests tidegate_fuzz tidegate_allocation_test"
cmake -S . -B "$build" -G Ninja -DTIDEGATE_BENCH=OFF >/dev/null
# shellcheck disable=SC2086  # one word a program
cmake --build "$build" -j "$jobs" --target $programs | tail -n 1
python3 scripts/coverage.py build "$build" "$out" "clang++$suffix" "$jobs" $programs
rm -rf "$out/profiles" && mkdir -p "$out/profiles"
export LLVM_PROFILE_FILE="$PWD/$out/profiles/%4m.raw"  # four files that all processes add to
# One process a share of the tests, not one a test: writing the counters takes longer than most tests. The tests of the
# vocabulary (all 2^32 conversions) run probes that have no counters. Repetitions of
# fuzz lines run no line that the first time does not.
pids=() failed=0
for ((i = 0; i < jobs; ++i)); do
  GTEST_TOTAL_SHARDS=$jobs GTEST_SHARD_INDEX=$i "$out/tidegate_tests" --gtest_brief=1 --gtest_filter='-*Simd*' >"$out/tests.$i.log" 2>&1 &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
grep -hE '^\[  (PASSED|FAILED)' "$out"/tests.*.log || true
"$out/tidegate_fuzz" --file tests/fuzz/lines.txt --count 1500 --seed 1 || failed=1
"$out/tidegate_allocation_test" || failed=1
"llvm-profdata$suffix" merge -sparse "$out"/profiles/*.raw -o "$out/core.profile"
"llvm-cov$suffix" export "$out/tidegate_tests" -instr-profile="$out/core.profile" -skip-expansions >"$out/coverage.json"
python3 scripts/coverage.py report "$out/coverage.json" >"$out/coverage.txt"
tail -n 1 "$out/coverage.txt"
exit $failed

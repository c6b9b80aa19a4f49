#!/usr/bin/env bash
# CTest, pytest, and the tests that build models in an older Transformers and beside flash-linear-attention; closes with
# one count over all of them. usage: run_tests.sh <build folder> <python>
set -uo pipefail
build=$1 python=$2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
ctest --test-dir "$build" --output-on-failure -j "$(nproc)" 2>&1 | tee "$log" | grep -vE '^ *[0-9]+/[0-9]+ Test +#[0-9]+: .* Passed|^ +Start +[0-9]+:'
[ "${PIPESTATUS[0]}" -eq 0 ] || status=1
cpp=$(sed -nE 's/.*tests passed, ([0-9]+) tests? failed out of ([0-9]+).*/\1 \2/p' "$log" | tail -n 1)
read -r cpp_failed cpp_total <<<"${cpp:-1 1}"
./scripts/pytest.sh "$python" 2>&1 | tee "$log"
[ "${PIPESTATUS[0]}" -eq 0 ] || status=1
./scripts/test_transformers.sh "$python" 5.14.1+quick newest+fla 2>&1 | tee -a "$log"
[ "${PIPESTATUS[0]}" -eq 0 ] || status=1
# Every run of pytest ends in a line "3 failed, 20 passed in 1.23s".
count() { grep -E '^[0-9]+ [a-z].* in [0-9.]+s' "$log" | grep -oE "[0-9]+ $1" | awk '{ sum += $1 } END { print sum + 0 }'; }
failed=$((cpp_failed + $(count failed) + $(count 'errors?')))
echo "$((cpp_total - cpp_failed + $(count passed))) passed, $failed failed, $(count skipped) skipped"
exit $status

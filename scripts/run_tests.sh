#!/usr/bin/env bash
# CTest, then pytest; closes with one count over both. usage: run_tests.sh <build folder> <python>
set -uo pipefail
build=$1 python=$2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
ctest --test-dir "$build" --output-on-failure -j "$(nproc)" 2>&1 | tee "$log" | grep -vE '^ *[0-9]+/[0-9]+ Test +#[0-9]+: .* Passed|^ +Start +[0-9]+:'
[ "${PIPESTATUS[0]}" -eq 0 ] || status=1
cpp=$(sed -nE 's/.*tests passed, ([0-9]+) tests? failed out of ([0-9]+).*/\1 \2/p' "$log" | tail -n 1)
read -r cpp_failed cpp_total <<<"${cpp:-1 1}"
"$python" -m pytest -q 2>&1 | tee "$log"
[ "${PIPESTATUS[0]}" -eq 0 ] || status=1
count() { grep -oE "[0-9]+ $1" "$log" | tail -n 1 | grep -oE '^[0-9]+'; }
passed=$(count passed) failed=$(count failed) errors=$(count 'errors?') skipped=$(count skipped)
echo "$((cpp_total - cpp_failed + ${passed:-0})) passed, $((cpp_failed + ${failed:-0} + ${errors:-0})) failed, ${skipped:-0} skipped"
exit $status

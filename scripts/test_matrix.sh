#!/usr/bin/env bash
# One wheel, built against the oldest torch, tested in every torch named.
# usage: test_matrix.sh <python> <libtidegate.a> <oldest> <version|newest>...
set -euo pipefail
python=$1 core=$(realpath "$2")
shift 2
oldest=$1
dist=$(mktemp -d)
trap 'rm -rf "$dist"' EXIT
status=0
for version in "$@"; do
  venv=.venv-torch-$version
  torch=torch==$version
  [ "$version" = newest ] && torch=torch
  [ -e "$venv/.ready" ] || ./scripts/venv.sh "$venv" "$python" "$torch"
  if [ "$version" = "$oldest" ]; then
    "$venv/bin/python" -m pip wheel --quiet --no-deps -w "$dist" -C build-dir="$dist/build" -C "cmake.define.TIDEGATE_CORE=$core" .
  fi
  "$venv/bin/python" -m pip install --quiet --no-deps --force-reinstall "$dist"/*.whl
  echo "== torch $("$venv/bin/python" -c 'import torch; print(torch.__version__)'), wheel built against $oldest"
  ./scripts/pytest.sh "$venv/bin/python" tests || status=1
done
exit $status

#!/usr/bin/env bash
# A virtual environment with torch and what the tests need.
# usage: venv.sh <folder> <python> <torch requirement> [requirement]...
set -euo pipefail
folder=$1 python=$2 torch=$3
shift 3
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
echo "preparing $folder (torch is large: a few minutes the first time)"
"$folder/bin/python" -m pip install --quiet "$torch" numpy pytest pytest-xdist setuptools ruff==0.17.4 "$@"
touch "$folder/.ready"

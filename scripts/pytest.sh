#!/usr/bin/env bash
# pytest, a worker per core but at most four: most tests are too small for a worker's own threads to help.
# usage: pytest.sh <python> [argument of pytest]...
set -euo pipefail
python=$1
shift
export OMP_WAIT_POLICY=passive # threads of different workers share the cores: one that waits must not spin
workers=$(nproc)
exec "$python" -m pytest -q -n $((workers < 4 ? workers : 4)) --dist worksteal "$@"

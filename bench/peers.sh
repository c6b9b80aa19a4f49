#!/bin/sh
# Makes a virtual environment with torch, the peers and Tidegate, and runs the side-by-side benchmark in it.
#
#   bench/peers.sh [venv] [torch version] [arguments of bench/run.py, starting with --]
#   bench/peers.sh [venv] [torch version] --setup       makes the environment and runs nothing
#
# TIDEGATE_WHEEL names a wheel to install instead of this repository. Packages come from wherever pip is configured to
# look. The peers are installed once: delete the folder to install them anew. Tidegate is installed at every call.
set -eu

bench=$(cd "$(dirname "$0")" && pwd)
repo=$(dirname "$bench")
venv=.venv-peers
torch=2.15.0
case ${1:-} in '' | --*) ;; *) venv=$1 && shift ;; esac
case ${1:-} in '' | --*) ;; *) torch=$1 && shift ;; esac

pip() { "$venv/bin/python" -m pip "$@"; }

if [ ! -e "$venv/ready" ]; then
  python3 -m venv "$venv"
  packages=$bench/requirements-peers.txt
  pip install --quiet --upgrade pip
  echo "installing torch and the peers into $venv (several minutes)"
  # shellcheck disable=SC2046  # one word a package is what is wanted
  pip install --quiet "torch==$torch" $(awk '/^[a-z]/ && !/# no-deps$/ { print $1 }' "$packages")
  # One by one: a peer without a wheel for this Python is reported as absent by the driver, the others still run.
  awk '/^[a-z]/ && /# no-deps$/ { print $1 }' "$packages" | while read -r package; do
    pip install --quiet --no-deps "$package" </dev/null || echo "$package: not installed" >&2
  done
  touch "$venv/ready"
fi

# The machine's limits are worth a compiler; without one the driver says that they are missing. The library that they
# are linked with then serves the wheel too.
limits=$venv/limits/bench/tidegate_limits
if command -v cmake >/dev/null; then
  if ! { cmake -S "$repo" -B "$venv/limits" -DTIDEGATE_TESTS=OFF -DTIDEGATE_BENCH=ON &&
    cmake --build "$venv/limits" --target tidegate_limits --parallel "$(nproc)"; } >"$venv/limits.log" 2>&1; then
    echo "tidegate_limits: not built, see $venv/limits.log" >&2
  fi
fi
if [ -n "${TIDEGATE_WHEEL:-}" ]; then
  pip install --quiet --no-deps "$TIDEGATE_WHEEL"
elif [ -x "$limits" ]; then
  whole=$(realpath "$venv")
  pip install --quiet --no-deps -C "build-dir=$whole/wheel" -C "cmake.define.TIDEGATE_CORE=$whole/limits/libtidegate.a" "$repo"
else
  pip install --quiet --no-deps "$repo"
fi
[ "${1:-}" != --setup ] || exit 0
if [ -x "$limits" ]; then
  exec "$venv/bin/python" "$bench/run.py" --limits "$limits" "$@"
fi
exec "$venv/bin/python" "$bench/run.py" "$@"

#!/bin/sh
# The installed library serves another project: install, find_package, build, run.
# usage: check_install.sh <cmake> <build folder> <example folder> <C++ compiler>
set -eu
prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT
"$1" --install "$2" --prefix "$prefix/installed" >/dev/null
"$1" -S "$3" -B "$prefix/build" -DCMAKE_PREFIX_PATH="$prefix/installed" -DCMAKE_CXX_COMPILER="$4" -DCMAKE_BUILD_TYPE=Release >/dev/null
"$1" --build "$prefix/build" >/dev/null
"$prefix/build/packed_conv"
"$prefix/build/prefill_decode"

#!/usr/bin/env bash
# The tests that build models, in several releases of Transformers, with and without flash-linear-attention.
# usage: test_transformers.sh <python> <release|newest>[+fla]...
# Every release has a folder of its own that goes before the environment; newest is the environment's. An environment
# without Transformers is no error: nothing is run.
set -uo pipefail
python=$1
shift
folder=.venv-transformers
before=${PYTHONPATH:-}
models=$(grep -l tiny_models tests/test_*.py)
# What can depend on flash-linear-attention being importable, and twinkle's bridge, which needs its package too.
beside_fla="tests/test_matrix_cell.py tests/test_patch_models.py tests/test_registration.py tests/test_fla_backend.py"
beside_fla="$beside_fla tests/test_contrib_twinkle.py"
status=0

# unmet <folder>: what the packages in a folder require and the environment has in another version
unmet() {
  "$python" - "$1" <<'EOF'
import importlib.metadata as metadata, sys
from packaging.requirements import Requirement
for package in metadata.distributions(path=[sys.argv[1]]):
    for wanted in map(Requirement, package.requires or ()):
        try:
            fits = wanted.specifier.contains(metadata.version(wanted.name), prereleases=True)
        except metadata.PackageNotFoundError:
            fits = True  # optional, or not needed by what is tested
        if not fits and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            print(f"{wanted.name}{wanted.specifier}")
EOF
}

# fetch <name> <requirement>...: into a folder, once
fetch() {
  local target=$folder/$1
  shift
  [ -e "$target/.ready" ] && return
  "$python" -m pip install --quiet --no-deps --upgrade --target "$target" "$@" || return
  mapfile -t more < <(unmet "$target")
  [ ${#more[@]} -eq 0 ] || "$python" -m pip install --quiet --no-deps --upgrade --target "$target" "${more[@]}" || return
  touch "$target/.ready"
}

if ! "$python" -c 'import transformers' 2>/dev/null; then
  echo "== no Transformers in this environment: its releases are not tested"
  exit 0
fi
for cell in "$@"; do
  release=${cell%+fla} path='' files=$models
  if [ "$release" != newest ]; then
    fetch "$release" "transformers==$release" || { status=1; continue; }
    path=$PWD/$folder/$release
  fi
  if [ "$cell" != "$release" ]; then
    # The release whose functions and registry we serve; its kernels need Triton only to be imported.
    fetch fla flash-linear-attention==0.6.0 fla-core==0.6.0 einops || { status=1; continue; }
    fetch twinkle twinkle-kit==0.5.1 || { status=1; continue; }
    path=$path:$PWD/$folder/fla:$PWD/$folder/twinkle files=$beside_fla
  fi
  export PYTHONPATH=${path#:}${before:+:$before}
  echo "== Transformers $("$python" -c 'import transformers; print(transformers.__version__)'), flash-linear-attention" \
    "$("$python" -W ignore -c 'import fla; print("importable")' 2>/dev/null || echo absent)"
  # shellcheck disable=SC2086
  "$python" -m pytest -q -W ignore $files || status=1
done
exit $status

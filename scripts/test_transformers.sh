#!/usr/bin/env bash
# The tests that build models, in several releases of Transformers, with and without flash-linear-attention.
# usage: test_transformers.sh <python> <release|newest>[+fla|+quick]...        +quick: without tests marked slow
# Every release has a folder of its own that goes before the environment; newest is the environment's. An environment
# without Transformers is no error: nothing is run.
set -uo pipefail
python=$1
shift
folder=.venv-transformers
before=${PYTHONPATH:-}
models=$(grep -lE 'tiny_models|sequence_case' tests/test_*.py)
# What can depend on flash-linear-attention being importable, and twinkle's bridge, which needs its package too.
beside_fla="tests/test_matrix_cell.py tests/test_patch_models.py tests/test_registration.py tests/test_fla_backend.py"
beside_fla="$beside_fla tests/test_contrib_twinkle.py"
status=0

# unmet <folder> <missing>: what the packages in a folder require and neither it nor the environment has in that version;
# missing = count: also what is not there at all. Where `kernels` is installed, each release needs the one it was made for.
unmet() {
  "$python" - "$1" "$2" <<'EOF'
import importlib.metadata as metadata, sys
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
packages = list(metadata.distributions(path=[sys.argv[1]]))
extras = ["", "kernels"] if any(metadata.distributions(name="kernels")) else [""]
here = {canonicalize_name(package.metadata["Name"]): package.version for package in packages}
wanted_by = [Requirement(text) for package in packages for text in package.requires or ()]
for wanted in wanted_by:
    if wanted.marker is not None and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
        continue
    try:
        version = here.get(canonicalize_name(wanted.name)) or metadata.version(wanted.name)
        fits = wanted.specifier.contains(version, prereleases=True)
    except metadata.PackageNotFoundError:
        fits = sys.argv[2] != "count"
    if not fits:
        print(f"{wanted.name}{wanted.specifier}")
EOF
}

# fetch <name> <requirement>...: into a folder, once, and what is then unmet. A release of Transformers needs all that it
# requires; of the other packages only what the tests import, which the environment has.
fetch() {
  local target=$folder/$1 missing=ignore
  [[ $1 == [0-9]* ]] && missing=count
  shift
  [ -e "$target/.ready" ] && return
  local more=("$@")
  while [ ${#more[@]} -gt 0 ]; do
    "$python" -m pip install --quiet --no-deps --upgrade --target "$target" "${more[@]}" || return
    local before_last=${more[*]}
    mapfile -t more < <(unmet "$target" $missing | sort -u)
    [ "${more[*]}" != "$before_last" ] || return 1
  done
  touch "$target/.ready"
}

if ! "$python" -c 'import transformers' 2>/dev/null; then
  echo "== no Transformers in this environment: its releases are not tested"
  exit 0
fi
for cell in "$@"; do
  release=${cell%+*} path='' files=$models marks=''
  export PYTHONPATH=$before  # what the last cell brought does not count for this one
  [ "$cell" != "$release+quick" ] || marks='not slow'
  if [ "$release" != newest ]; then
    # Older releases import httpx, which the newest huggingface-hub that they accept no longer brings.
    fetch "$release" "transformers==$release" httpx || { status=1; continue; }
    path=$PWD/$folder/$release
  fi
  if [ "$cell" = "$release+fla" ]; then
    # The release whose functions and registry we serve; its kernels need Triton only to be imported.
    fetch fla flash-linear-attention==0.6.0 fla-core==0.6.0 einops || { status=1; continue; }
    fetch twinkle twinkle-kit==0.5.1 || { status=1; continue; }
    path=$path:$PWD/$folder/fla:$PWD/$folder/twinkle files=$beside_fla
  fi
  export PYTHONPATH=${path#:}${before:+:$before}
  "$python" -W ignore -c 'import transformers' || { status=1; continue; }  # else its tests would only be skipped
  echo "== Transformers $("$python" -c 'import transformers; print(transformers.__version__)'), flash-linear-attention" \
    "$("$python" -W ignore -c 'import fla; print("importable")' 2>/dev/null || echo absent)"
  # shellcheck disable=SC2086
  ./scripts/pytest.sh "$python" -W ignore -m "$marks" $files || status=1
done
exit $status

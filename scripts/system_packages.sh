#!/usr/bin/env bash
# Installs the named Debian packages if they are missing: by apt when root, otherwise prints the line to run.
set -euo pipefail
missing=()
for package in "$@"; do
  # A tool or library that came another way (conda, Homebrew, a module) counts as present.
  case $package in
    cmake) command -v cmake >/dev/null && cmake -P "$(dirname "$0")/cmake_version.cmake" 2>/dev/null && continue ;;
    g++) command -v c++ >/dev/null && continue ;;
    make) continue ;;
    ninja-build) command -v ninja >/dev/null && continue ;;
    python3-venv) python3 -c 'import ensurepip' 2>/dev/null && continue ;;
  esac
  dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing ${missing[*]}"
  apt-get update -qq >/dev/null
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
else
  echo "missing system packages; run:  sudo apt-get install ${missing[*]}" >&2
  exit 1
fi

#!/bin/sh
# Usage: check_objects.sh <nm> <objdump> native|emulated <isa> <object>... [-- <isa> <object>...]...
#
# What no run of the kernels can show:
#   - a kernel object defines nothing that the linker could pick for code of another instruction set: every global, weak
#     or unique symbol stands in namespace tidegate::<isa>;
#   - scalar objects use no AVX instruction, avx2 objects no zmm, mask or upper register of AVX-512. "baseline" stands for
#     all other objects of the library: they run before the CPU is asked, on any x86-64, so they use no AVX either;
#   - the bf16 dot product of the avx512_bf16 objects is the instruction.
set -u

nm=$1
objdump=$2
mode=$3
shift 3

failed=0
objects=0
dot_products=0
bf16_objects=0

fail() {
  echo "FAILED: $*"
  failed=1
}

# The mangled name begins with the namespace; a guard or a vtable has letters before it, a sanitizer its own prefix.
check_symbols() {
  prefix="8tidegate${#isa}${isa}"
  symbols=$("$nm" --defined-only "$1") || fail "$1: nm cannot read it"
  foreign=$(echo "$symbols" | awk -v inside="^(__odr_asan\\\\.)?_Z[A-Z]*N[A-Zr]*${prefix}" \
    'NF >= 3 && $2 ~ /^[A-Zuvw]$/ && $3 !~ inside { print "  " $2, $3 }')
  if [ -n "$foreign" ]; then
    fail "$1: symbols outside of namespace tidegate::$isa:"
    echo "$foreign"
  fi
  if ! echo "$symbols" | awk -v inside="N${prefix}" '$3 ~ inside { found = 1 } END { exit !found }'; then
    fail "$1: nothing defined in namespace tidegate::$isa"
  fi
}

check_instructions() {
  code=$("$objdump" -d --no-show-raw-insn "$1") || fail "$1: objdump cannot read it"
  avx='%[yz]mm|[[:space:]]v[a-z0-9]+[[:space:]]'
  avx512='%zmm|%k[0-7]|%[xy]mm(1[6-9]|2[0-9]|3[01])'
  foreign=
  case $isa in
    scalar | baseline) foreign=$avx ;;
    avx2) foreign=$avx512 ;;
    *) [ "$mode" = emulated ] && foreign=$avx512 ;;
  esac
  if [ -n "$foreign" ]; then
    lines=$(echo "$code" | grep -E -c "$foreign")
    [ "$lines" -eq 0 ] || fail "$1: $lines instructions that $isa does not have"
  fi
  if [ "$isa" = avx512_bf16 ]; then
    bf16_objects=$((bf16_objects + 1))
    dot_products=$((dot_products + $(echo "$code" | grep -c vdpbf16ps)))
  fi
}

isa=
for argument in "$@"; do
  if [ "$argument" = -- ]; then
    isa=
  elif [ -z "$isa" ]; then
    isa=$argument
  else
    objects=$((objects + 1))
    [ "$isa" = baseline ] || check_symbols "$argument"
    check_instructions "$argument"
  fi
done

[ "$objects" -gt 0 ] || fail "no objects given"
if [ "$mode" = emulated ]; then
  echo "not checked: vdpbf16ps, which an emulated build cannot contain"
elif [ "$bf16_objects" -gt 0 ]; then
  echo "vdpbf16ps: $dot_products in $bf16_objects objects"
  [ "$dot_products" -gt 0 ] || fail "no vdpbf16ps in any avx512_bf16 object"
fi
[ "$failed" -eq 0 ] && echo "$objects objects: symbols and instructions as they should be"
exit "$failed"

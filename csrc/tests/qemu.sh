#!/usr/bin/env bash
# Runs the native tests on emulated machines without the wide instructions of this one: the portable kernels on a
# Nehalem (SSE4.2), the avx2 kernels on a Haswell. An instruction that a level must not have ends them with SIGILL.
set -euo pipefail
cd "$(dirname "$0")/../.."

command -v qemu-x86_64 > /dev/null || {
  echo "qemu-user is not installed; try: apt-get install qemu-user" >&2
  exit 1
}

build=build/qemu
generator=()
command -v ninja > /dev/null && generator=(-G Ninja)
cmake -S csrc/tests -B "$build" "${generator[@]}" -DCMAKE_CXX_FLAGS="-O3 -march=x86-64" > /dev/null
cmake --build "$build" --target native_tests octavo_portable octavo_avx2 --parallel > /dev/null

# Runs the tests on a machine, at the best of the levels that it is expected to choose. Warnings of what qemu cannot
# emulate of that machine are dropped.
run() {
  local machine=$1 expected=$2 found
  found=$(qemu-x86_64 -cpu "$machine" "$build/native_tests" --levels 2> /dev/null | xargs)
  [ "$found" = "$expected" ] || {
    echo "$machine: chose the levels '$found', expected '$expected'" >&2
    exit 1
  }
  echo "== $machine: ${expected##* }"
  qemu-x86_64 -cpu "$machine" "$build/native_tests" "$build" "${expected##* }" \
    2> >(grep -v "TCG doesn't support" >&2)
}

run Nehalem "portable"
run Haswell "portable avx2"

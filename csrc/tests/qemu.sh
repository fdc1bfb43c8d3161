#!/usr/bin/env bash
# Runs the native tests on emulated processors that this machine is not: on x86-64 without the wide instructions of
# this one (Nehalem: SSE4.2, Haswell: AVX2), and on AArch64 without dot products (Cortex-A72), with them (Neoverse
# N1) and with I8MM and BF16 (Neoverse V1). Each must choose the expected level. An instruction that a level must
# not have ends the tests with SIGILL.
# usage: qemu.sh [x86_64] [aarch64]; both by default. CXX_AARCH64 names the cross compiler.
set -euo pipefail
cd "$(dirname "$0")/../.."

need() { # COMMAND PACKAGE
  command -v "$1" > /dev/null || {
    echo "make qemu needs $1, found none; try: apt-get install $2" >&2
    exit 1
  }
}

generator=()
command -v ninja > /dev/null && generator=(-G Ninja)

build() { # DIRECTORY LEVELS CMAKE-OPTION...
  local directory=$1 levels=$2 targets=() level
  shift 2
  for level in $levels; do targets+=("octavo_$level"); done
  cmake -S csrc/tests -B "$directory" "${generator[@]}" "$@" > /dev/null
  cmake --build "$directory" --target native_tests "${targets[@]}" --parallel "${JOBS:-$(nproc)}" \
    > "$directory/build.log" || {
    cat "$directory/build.log" >&2
    exit 1
  }
}

# Runs the tests on a machine, at the best of the levels that it is expected to choose. Warnings of what qemu cannot
# emulate of that machine are dropped.
run() { # MACHINE LEVELS
  local machine=$1 expected=$2 found
  found=$("${qemu[@]}" -cpu "$machine" "$directory/native_tests" --levels 2> /dev/null | xargs)
  [ "$found" = "$expected" ] || {
    echo "$machine: chose the levels '$found', expected '$expected'" >&2
    exit 1
  }
  echo "== $machine: ${expected##* }"
  "${qemu[@]}" -cpu "$machine" "$directory/native_tests" "$directory" "${expected##* }" \
    2> >(grep -v "TCG doesn't support" >&2)
}

run_x86_64() {
  need qemu-x86_64 qemu-user
  directory=build/qemu
  qemu=(qemu-x86_64)
  build "$directory" "portable avx2" -DCMAKE_CXX_FLAGS="-O3 -march=x86-64"
  run Nehalem "portable"
  run Haswell "portable avx2"
}

run_aarch64() {
  local compiler=${CXX_AARCH64:-aarch64-linux-gnu-g++} best=neoverse-v1
  need qemu-aarch64 qemu-user
  need "${compiler%% *}" g++-aarch64-linux-gnu
  directory=build/qemu-aarch64
  qemu=(qemu-aarch64 -L "${SYSROOT_AARCH64:-/usr/aarch64-linux-gnu}")
  build "$directory" "neon neon_dotprod neon_i8mm" -DCMAKE_SYSTEM_NAME=Linux \
    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_CXX_FLAGS="-O2"
  # qemu knows Neoverse V1 from 8.1 on; `max` has all that it emulates.
  "${qemu[@]}" -cpu help | grep -qw "$best" || best=max
  run cortex-a72 "portable neon"
  run neoverse-n1 "portable neon neon_dotprod"
  run "$best" "portable neon neon_dotprod neon_i8mm"
}

[ $# -gt 0 ] || set -- x86_64 aarch64
for architecture in "$@"; do "run_$architecture"; done

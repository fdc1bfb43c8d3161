#!/usr/bin/env bash
# Runs the native tests under the address, undefined-behaviour and thread sanitizers, with the portable kernels and
# this machine's best.
set -euo pipefail
cd "$(dirname "$0")/../.."

generator=()
command -v ninja > /dev/null && generator=(-G Ninja)
# Address randomisation with many bits breaks the memory layout that the thread sanitizer needs.
launch=()
setarch "$(uname -m)" -R true 2> /dev/null && launch=(setarch "$(uname -m)" -R)

run() {
  local name=$1 flags=$2 build=build/sanitize-$1
  cmake -S csrc/tests -B "$build" "${generator[@]}" \
    -DCMAKE_CXX_FLAGS="-O1 -g -fno-omit-frame-pointer $flags" > /dev/null
  cmake --build "$build" --target native_tests --parallel > /dev/null
  local best
  best=$("${launch[@]}" "$build/native_tests" --levels | tail -1)
  cmake --build "$build" --target octavo_portable "octavo_$best" --parallel > /dev/null
  echo "== $name sanitizer: portable, $best"
  "${launch[@]}" "$build/native_tests" "$build" portable "$best"
}

export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1
run address "-fsanitize=address,undefined -fno-sanitize-recover=all"
run thread "-fsanitize=thread"
echo "no fault found"

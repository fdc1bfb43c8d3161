#!/usr/bin/env bash
# Installs a wheel into an environment whose PATH holds no compiler, and runs the default model with it.
# usage: wheel_test.sh WHEEL          (PYTHON and MODEL may be set)
set -euo pipefail
wheel=$(realpath "$1")
python=$(command -v "${PYTHON:-python3}")
most_bytes=$((15 * 1000 * 1000))

bytes=$(stat --format %s "$wheel")
echo "$(basename "$wheel"): $bytes bytes, $most_bytes allowed"
[ "$bytes" -lt "$most_bytes" ]

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/bin"
for tool in env rm; do ln -s "$(command -v "$tool")" "$folder/bin/$tool"; done
"$python" -m venv "$folder/venv"
export PATH="$folder/venv/bin:$folder/bin"
unset CC CXX CFLAGS CXXFLAGS
for compiler in cc gcc c++ g++ clang clang++; do
  ! command -v "$compiler" || { echo "a compiler is on PATH: $compiler" >&2; exit 1; }
done
pip install --quiet --only-binary :all: "$wheel"
cd "$folder"
octavo doctor
answer=$(octavo run --model "${MODEL:-smollm2}" --max-tokens 16 "What is the capital of France?")
echo "$answer"
[[ "$answer" == *Paris* ]]

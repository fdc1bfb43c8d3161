#!/usr/bin/env bash
# Compiles the native sources for macOS on Apple silicon with Zig's headers: the core, the native tests, the extension,
# with the headers of this machine's Python, and each level. Links and runs nothing.
# usage: macos.sh; ZIG: the command of Zig, PYTHON: a Python with nanobind
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv-wheel/bin/python}
read -ra zig <<< "${ZIG:-$python -I -m ziglang}"
out=build/macos
mkdir -p "$out"
compile=("${zig[@]}" c++ -target aarch64-macos.13.0 -std=gnu++20 -O1 -include algorithm -fPIC
  -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra -Wno-psabi -Wno-missing-field-initializers)

echo "== core and native tests"
for source in csrc/plan/*.cpp csrc/runtime/*.cpp csrc/tests/*.cpp; do
  "${compile[@]}" -c -o "$out/core.o" "$source"
done

echo "== bindings"
includes=("-I$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
  "-I$("$python" -m nanobind --include_dir)")
for source in csrc/bindings/*.cpp; do
  "${compile[@]}" "${includes[@]}" -DOCTAVO_SOURCE_DIGEST='""' -c -o "$out/binding.o" "$source"
done

cat > "$out/levels.cmake" << 'END'
include(csrc/levels.cmake)
foreach(level IN LISTS OCTAVO_LEVELS)
  list(JOIN OCTAVO_FLAGS_${level} " " flags)
  message("${level} ${flags}")
endforeach()
END
cmake -DCMAKE_SYSTEM_PROCESSOR=arm64 -DCMAKE_CXX_COMPILER_ARG1=ziglang -P "$out/levels.cmake" 2> "$out/levels"
while read -r level flags; do
  echo "== level $level"
  # shellcheck disable=SC2086
  "${compile[@]}" $flags -DOCTAVO_LEVEL="\"$level\"" -c -o "$out/level.o" csrc/kernels/level.cpp
done < "$out/levels"

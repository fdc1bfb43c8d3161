#!/usr/bin/env bash
# Installs an AArch64 wheel into an emulated Python and generates with the default model on emulated processors, at
# the level that each chooses. In fp32 the tokens must be those of this machine's portable level.
# usage: arm64_test.sh WHEEL
# ROOT: folder with the files of an arm64 Python (arm64_root.sh); OCTAVO: a Python of this machine with Octavo.
# MODEL, TOKENS and PROCESSORS ("cortex-a72 ...") may be set.
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(realpath "$1")
root=$(realpath "${ROOT:?the folder of an arm64 Python}")
octavo=$(realpath --no-symlinks "${OCTAVO:?a Python with Octavo}")
most_bytes=$((15 * 1000 * 1000))
command -v qemu-aarch64 > /dev/null || {
  echo "arm64_test.sh needs qemu-aarch64, found none; try: apt-get install qemu-user" >&2
  exit 1
}

bytes=$(stat --format %s "$wheel")
echo "$(basename "$wheel"): $bytes bytes, $most_bytes allowed"
[ "$bytes" -lt "$most_bytes" ]

interpreter=$(cd "$root" && ls usr/bin/python3.* | head -n 1)
version=${interpreter#usr/bin/python}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# A virtual environment whose python starts qemu, so that the processes it starts are emulated too.
packages=$folder/venv/lib/python$version/site-packages
mkdir -p "$folder/venv/bin" "$packages"
printf 'home = /usr/bin\ninclude-system-site-packages = false\n' > "$folder/venv/pyvenv.cfg"
cat > "$folder/venv/bin/python" << END
#!/bin/sh
exec qemu-aarch64 -L "$root" -0 "$folder/venv/bin/python" "$root/$interpreter" "\$@"
END
chmod +x "$folder/venv/bin/python"
platforms=()
for glibc in $(seq 36 -1 17); do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done # Debian 12 has 2.36
"$octavo" -m pip install --quiet --only-binary :all: --python-version "$version" --target "$packages" \
  "${platforms[@]}" --platform manylinux2014_aarch64 "$wheel"

cat > "$folder/generate.py" << 'END'
import sys
from octavo import LLM, SamplingParams

model, level, num_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
llm = LLM(model=model, cpu_level=level, dtype="float32", max_model_len=256, threads=1)
params = SamplingParams(temperature=0, max_tokens=num_tokens)
output = llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0]
print(output.token_ids, repr(output.text))
END

cd "$folder"
generate() { # PYTHON LEVEL
  "$1" generate.py "${MODEL:-smollm2}" "$2" "${TOKENS:-8}" 2> generate.log || {
    cat generate.log >&2
    return 1
  }
}

expected=$(generate "$octavo" portable)
echo "this machine, portable: $expected"
for processor in ${PROCESSORS:-cortex-a72 neoverse-n1 max}; do
  found=$(QEMU_CPU=$processor generate "$folder/venv/bin/python" auto)
  echo "$processor: $found"
  [ "$found" = "$expected" ]
done

"""The native sources compile for macOS, with Zig's headers. `make macos` compiles all."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-wheel/bin/python"
ZIG = [PYTHON, "-I", "-m", "ziglang", "c++", "-target", "aarch64-macos.13.0", "-std=gnu++20"]
SOURCES = sorted((ROOT / "csrc/runtime").glob("*.cpp"))

pytestmark = pytest.mark.skipif(
    not any(PYTHON.parents[1].glob("lib/*/site-packages/ziglang")),
    reason="needs Zig in .venv-wheel; try: make .venv-wheel/.stamp",
)


@pytest.mark.sampled(one_in=len(SOURCES))
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_runtime_compiles(source, tmp_path):
    options = ["-include", "algorithm", "-include", "cfloat", "-c", "-o", tmp_path / "compiled.o"]
    subprocess.run([*ZIG, *options, source], check=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_sources_compile():
    subprocess.run(["bash", ROOT / "csrc/tests/macos.sh"], check=True)

"""The levels of AArch64 on emulated processors: each chooses its own and computes as specified.

`make qemu` runs all native tests at each level.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMPILER, QEMU, SYSROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
LEVELS = ["portable", "neon", "neon_dotprod", "neon_i8mm"]

missing = [command for command in (COMPILER, QEMU) if shutil.which(command) is None]
pytestmark = pytest.mark.skipif(
    bool(missing),
    reason=f"needs {' and '.join(missing)}; try: apt-get install g++-aarch64-linux-gnu qemu-user",
)

PRINT_LEVELS = """
#include <cstdio>
#include "runtime/levels.h"
int main() { for (const auto& level : octavo::supported_levels()) std::puts(level.c_str()); }
"""


@pytest.fixture(scope="module")
def print_levels(tmp_path_factory):
    """A program for AArch64 that prints the levels that its processor supports."""
    directory = tmp_path_factory.mktemp("aarch64")
    (directory / "main.cpp").write_text(PRINT_LEVELS)
    sources = [directory / "main.cpp", ROOT / "csrc/runtime/levels.cpp"]
    command = [COMPILER, "-std=gnu++20", f"-I{ROOT / 'csrc'}", "-o", directory / "levels", *sources]
    subprocess.run([*command, "-ldl"], check=True)
    return directory / "levels"


def levels_on(machine, program):
    command = [QEMU, "-L", SYSROOT, "-cpu", machine, program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("machine", "expected"),
    [("cortex-a72", LEVELS[:2]), ("neoverse-n1", LEVELS[:3]), ("max", LEVELS)],
)
def test_a_processor_supports_the_levels_of_its_extensions(print_levels, machine, expected):
    assert levels_on(machine, print_levels) == expected


@pytest.mark.parametrize(
    ("machine", "march"),
    [
        ("cortex-a72", "armv8-a"),
        ("neoverse-n1", "armv8.2-a+dotprod"),
        ("max", "armv8.2-a+dotprod+i8mm+bf16"),
    ],
)
def test_operations_at_extreme_values(tmp_path, machine, march):
    program = tmp_path / "extremes"
    source = Path(__file__).with_name("extremes_aarch64.cpp")
    options = ["-std=gnu++20", "-O2", "-ffp-contract=off", f"-march={march}", "-DOCTAVO_NEON"]
    command = [COMPILER, *options, f"-I{ROOT / 'csrc'}", "-o", program, source]
    subprocess.run(command, check=True)
    ended = subprocess.run(
        [QEMU, "-L", SYSROOT, "-cpu", machine, program], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_native_tests_pass_at_each_level():
    subprocess.run(["bash", ROOT / "csrc/tests/qemu.sh", "aarch64"], check=True)

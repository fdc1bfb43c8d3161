"""Instruction-set levels: no wide instruction leaks into what every machine runs, and a level's
object shows one symbol.

`make qemu` runs the native tests on emulated machines without wide instructions.
"""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.api.errors import BackendUnavailable
from octavo.executor.base import BackendOptions
from octavo.executor.native import extension
from octavo.executor.native.backend import NativeBackend
from octavo.executor.native.extension import native_module, supported_levels
from tests.support.native_harness import require_native

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="these are the levels of x86-64"
)

ALL_LEVELS = ["portable", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"]


@pytest.fixture(scope="module")
def directory():
    require_native()
    return Path(native_module().__file__).parent


def test_a_build_of_other_sources_is_refused(monkeypatch, tmp_path):
    """Whatever has changed in a source, the older build is refused with how to build it again."""
    require_native()
    shutil.copytree(extension.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(extension, "SOURCES", tmp_path / "csrc")
    native_module()
    with (tmp_path / "csrc/kernels/cutoffs.inl").open("a") as file:
        file.write("// one more line\n")
    extension.source_digest.cache_clear()
    with pytest.raises(BackendUnavailable, match=r"built from .*different") as caught:
        native_module()
    assert "make .venv-dev/.stamp" in caught.value.hint
    extension.source_digest.cache_clear()


def test_an_installed_build_needs_no_sources(monkeypatch, tmp_path):
    require_native()
    monkeypatch.setattr(extension, "SOURCES", tmp_path / "none")
    monkeypatch.setattr(native_module(), "SOURCE_DIGEST", "of some other tree")
    assert native_module().supported_levels()


def tool(*command):
    if shutil.which(command[0]) is None:
        pytest.fail(
            f"{command[0]} is not installed; it comes with the compiler (apt-get install binutils)",
            pytrace=False,
        )
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def mnemonics(path):
    return set(
        re.findall(
            r"^\s+[0-9a-f]+:\s+(\w+)",
            tool("objdump", "-d", "--no-show-raw-insn", str(path)),
            re.MULTILINE,
        )
    )


def wide(names):
    """VEX and EVEX encodings all begin with v (but for three instructions of old), masks with k,
    tiles with t.
    """
    return {
        name
        for name in names
        if re.match(
            r"v(?!err|erw|mcall)|k(and|mov|or|shift|unpck|xnor|test|add)|tile|tdp|ldtilecfg", name
        )
    }


@pytest.mark.parametrize("name", ["liboctavo_portable.so", "_native*.so"])
def test_what_every_machine_runs_holds_no_wide_instruction(directory, name):
    (path,) = directory.glob(name)
    found = mnemonics(path)
    assert {"mov", "ret", "call"} <= found, "objdump's output is understood"
    assert wide(found) == set()


def test_the_check_sees_wide_instructions(directory):
    assert {"vpdpbusd", "tdpbssd", "ldtilecfg"} <= wide(mnemonics(directory / "liboctavo_amx.so"))
    found = wide(mnemonics(directory / "liboctavo_avx2.so"))
    assert "vpmaddubsw" in found and not any(name.startswith(("k", "t")) for name in found)


def test_every_level_is_built_and_shows_one_symbol(directory):
    assert {path.name for path in directory.glob("liboctavo_*.so")} == {
        f"liboctavo_{level}.so" for level in ALL_LEVELS
    }
    for level in ALL_LEVELS:
        symbols = tool("nm", "-D", "--defined-only", str(directory / f"liboctavo_{level}.so"))
        assert [line.split()[-1] for line in symbols.splitlines()] == ["octavo_kernel_table"], level


def test_the_best_level_is_chosen():
    require_native()
    supported = supported_levels()
    assert (
        supported == [level for level in ALL_LEVELS if level in supported]
        and supported[0] == "portable"
    )
    assert NativeBackend(BackendOptions()).level == supported[-1]
    assert [NativeBackend(BackendOptions(), level=level).level for level in supported] == supported

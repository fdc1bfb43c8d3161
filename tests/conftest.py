"""What every test may ask for."""

import subprocess

import pytest

BACKENDS = ["reference", "native"]
"""Backends that the engine's own tests run on."""


@pytest.fixture(params=BACKENDS, scope="session")
def backend(request) -> str:
    return request.param


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 64 KiB; only root can have one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)

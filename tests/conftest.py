"""What every test may ask for."""

import os
import subprocess

import pytest

from octavo.backends.devices import has_nvidia_driver
from tests.support.backend_choice import BACKENDS, VARIABLE

if not has_nvidia_driver():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # before anything imports Triton: its kernels run in its interpreter
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # whose products of tiles are too small for threads

LONG_ON_TORCH = {
    "test_llm_faults.py",
    "test_prefix_store.py",
    "test_beam_search.py",
    "test_best_of.py",
}
"""Files whose tests on torch, which computes a batch-invariant step row by row, run in make
test-all only.
"""


def pytest_addoption(parser):
    parser.addoption(
        "--backend",
        choices=BACKENDS,
        help="only this one of the backends that tests have as a parameter",
    )


def pytest_configure(config):
    if config.getoption("--backend") is not None:
        os.environ[VARIABLE] = config.getoption("--backend")


def pytest_collection_modifyitems(config, items):
    wanted = config.getoption("--backend")
    if wanted is not None:
        items[:] = [item for item in items if backend_of(item) in (None, wanted)]
    for item in items:
        if backend_of(item) == "torch" and item.path.name in LONG_ON_TORCH:
            item.add_marker(pytest.mark.slow)


def backend_of(item):
    """That a test has as a parameter, by itself or within a setup; None where it has none."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    setup = params.get("setup")
    named = params.get("backend")
    if isinstance(named, str):
        return named.partition("-")[0]  # "torch-int8": a backend with the precision of its cache
    return named or (setup[0] if isinstance(setup, tuple) else getattr(setup, "backend", None))


@pytest.fixture(params=BACKENDS, scope="session")
def backend(request) -> str:
    return request.param


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 64 KiB; only root can have one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)],
        capture_output=True,
        check=False,
    ).returncode:
        pytest.skip("no right to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)

"""Options, markers and fixtures that every test may use."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

from octavo.executor.devices import has_nvidia_driver
from tests.support import tiers
from tests.support.backend_choice import BACKENDS, VARIABLE
from tests.support.progress_log import ProgressLog

if not has_nvidia_driver():
    # Triton's kernels run in its interpreter; the variable counts only before Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # The interpreter's products of tiles are too small for more than one thread.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Hundreds of tests start this package in a process of its own, and each worker rewrites the asserts
# of every test file: both take a third of the time where Python finds compiled files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background has them ignore Ctrl-C, and their children.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG_ON_TORCH = {
    "test_llm_faults.py",
    "test_prefix_store.py",
    "test_beam_search.py",
    "test_best_of.py",
}
"""Files whose torch tests run in make test-all only; torch computes a batch-invariant step row by
row.
"""

FEWER_ON_TORCH = 2
"""The sample runs one in this many on torch of the tests that every backend has, and of Triton's in
its interpreter; torch's own folder has the closer look.
"""


SAMPLED_ON_TORCH = pytest.mark.sampled(one_in=FEWER_ON_TORCH)


def pytest_addoption(parser):
    parser.addoption("--backend", choices=BACKENDS, help="run tests of this backend only")
    parser.addoption(
        "--tier",
        choices=list(tiers.MULTIPLES),
        default="sample",
        help="how much of each property is checked: a seeded sample, ten times that, everything",
    )
    parser.addoption(
        "--progress",
        type=Path,
        help="log finished tests to this file, and skip those that passed at this commit",
    )


def pytest_configure(config):
    if config.getoption("--backend") is not None:
        os.environ[VARIABLE] = config.getoption("--backend")
    os.environ[tiers.VARIABLE] = config.getoption("--tier")
    hypothesis.settings.register_profile("sample", derandomize=True, database=None)
    hypothesis.settings.load_profile("sample" if tiers.tier() == "sample" else "default")
    if config.getoption("--progress") is not None:
        is_worker = hasattr(config, "workerinput")
        config.pluginmanager.register(
            ProgressLog(config.getoption("--progress").absolute(), writes=not is_worker)
        )


def pytest_collection_modifyitems(config, items):
    wanted = config.getoption("--backend")
    if wanted is not None:
        items[:] = [item for item in items if backend_of(item) in (None, wanted)]
    for item in items:
        if backend_of(item) == "torch":
            long = item.path.name in LONG_ON_TORCH
            item.add_marker(pytest.mark.slow if long else SAMPLED_ON_TORCH)
        elif item.path.parent.name == "triton":
            item.add_marker(SAMPLED_ON_TORCH)
    for item in items:
        if f"{tempfile.gettempdir()}/octavo-" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: its name has a random path; give it an id")
    left_out = {"sample": {"slow", "soak"}, "all": {"soak"}, "soak": set()}[tiers.tier()]
    run = [item for item in items if not left_out & {mark.name for mark in item.iter_markers()}]
    kept = set(tiers.sample({item: (item.nodeid, one_in(item)) for item in run}))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def one_in(item):
    """Returns the largest number of which a test's markers have one case run."""
    return max((mark.kwargs["one_in"] for mark in item.iter_markers("sampled")), default=1)


def backend_of(item):
    """Returns the backend that a test has as a parameter, by itself or in a setup, or None."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    setup = params.get("setup")
    named = params.get("backend")
    if isinstance(named, str):
        return named.partition("-")[0]  # "torch-int8": a backend with the precision of its cache
    return named or (setup[0] if isinstance(setup, tuple) else getattr(setup, "backend", None))


@pytest.fixture(params=BACKENDS, scope="session")
def backend(request) -> str:
    """The name of each backend that this run tests."""
    return request.param


@pytest.fixture
def small_disk(request, tmp_path):
    """A folder on a disk of 64 KiB, or of the size given as parameter; only root can have one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = getattr(request, "param", "64k")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)

"""Triton's kernels compile for a GPU, without one; the interpreter would accept more."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # the interpreter always runs: test_models.py and test_rows.py


@pytest.mark.parametrize(
    "which",
    [[], pytest.param(["all"], marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
    ids=["of each kind", "all"],
)
def test_kernels_compile_for_an_h100(which, tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.executor.torch.triton.compile_kernels", *which]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

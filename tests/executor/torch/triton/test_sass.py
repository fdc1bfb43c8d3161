"""Budgets of the machine code that Triton makes of the tuned kernels for an H100: registers,
instructions of the hot loop for each weight of a lane or key of a block, and spills to memory.

These are ratchets: a change may lower a number here, and states why where it raises one. They say
nothing of time. Another version of Triton makes other code, so the budgets are of one version.
"""

import json
import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")

VERSION = "3.9.0"
"""The version of Triton that the budgets are of."""

BUDGETS = {
    "Q4_0, 8 rows": (136, 2.4, 0),
    "Q4_0, 16 rows": (176, 3.1, 0),
    "Q4_1, 8 rows": (136, 3.0, 0),
    "Q4_1, 16 rows": (236, 4.0, 0),
    "Q4_K, 8 rows": (140, 3.3, 0),
    "Q4_K, 16 rows": (180, 4.4, 0),
    "groups of 128, 8 rows": (184, 2.2, 0),
    "groups of 128, 16 rows": (254, 2.9, 0),
    "Q6_K, 8 rows": (128, 4.8, 0),
    "Q6_K, 16 rows": (140, 5.8, 0),
    "int8, 8 rows": (88, 3.2, 0),
    "int8, 16 rows": (102, 3.8, 0),
    "decode bf16": (158, 4.7, 0),
    "decode int8": (142, 8.7, 0),
    "decode fp8": (142, 9.7, 0),
    # Computes short chunks only, and all with batch invariance: long ones use PyTorch's attention.
    "prefill bf16": (255, 13.4, 34),
}
"""Registers of a lane, instructions for each weight or key, loads and stores of spilled registers
in the loop.
"""
OFTEN = ("Q4_0, 8 rows", "decode bf16")
"""Kernels that are compiled in every run of the tests."""

pytestmark = pytest.mark.skipif(
    triton.__version__ != VERSION, reason=f"the budgets are of Triton {VERSION}"
)


@pytest.mark.parametrize(
    "names",
    [
        OFTEN,
        pytest.param(tuple(BUDGETS), marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
    ids=["some", "all"],
)
def test_machine_code_keeps_to_its_budget(names, tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.executor.torch.triton.sass", *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {report["kernel"]: report for report in map(json.loads, done.stdout.splitlines())}
    assert set(found) == set(names)
    for name, report in found.items():
        registers, each, spills = BUDGETS[name]
        assert report["registers"] <= registers, report
        assert report["each"] <= each, report
        assert report["spills"] <= spills, report

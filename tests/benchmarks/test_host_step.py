"""The host's part of a decode step does not grow unnoticed. Calls are counted, not seconds, which
depend on the machine.
"""

import pytest

pytest.importorskip("triton")

from benchmarks.host_step import measure
from octavo.executor.torch.triton.device import is_interpreted

pytestmark = pytest.mark.skipif(
    not is_interpreted(), reason="prepares the inputs of Triton's attention on a CPU"
)

CALLS = 650
"""Python calls of a step, whatever the number of its requests."""
CALLS_OF_A_REQUEST = 24


def test_python_calls_of_a_decode_step():
    found = measure(streams=16, tokens=10, context=600)
    assert found["steps"] >= 2
    assert found["calls"] <= CALLS + 16 * CALLS_OF_A_REQUEST, found

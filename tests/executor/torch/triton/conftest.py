"""Holds kernels in Triton's interpreter to the tensors of their launch, and its products to one
order of sums, in every test.
"""

import importlib.util

import pytest

from octavo.executor.torch.triton.device import is_interpreted


@pytest.fixture(autouse=True)
def checked_launches(monkeypatch):
    if is_interpreted() and importlib.util.find_spec("triton") is not None:
        from tests.executor.torch.triton.interpreted_dot import sum_in_order
        from tests.executor.torch.triton.launch_memory import check_launches

        check_launches(monkeypatch)
        sum_in_order(monkeypatch)

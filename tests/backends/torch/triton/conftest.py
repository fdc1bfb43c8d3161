"""Holds kernels in Triton's interpreter to the tensors of their launch, and its products to one
order of sums, in every test.
"""

import importlib.util

import pytest

from octavo.backends.torch.triton.device import is_interpreted


@pytest.fixture(autouse=True)
def checked_launches(monkeypatch):
    if is_interpreted() and importlib.util.find_spec("triton") is not None:
        from tests.backends.torch.triton.interpreted_dot import sum_in_order
        from tests.backends.torch.triton.launch_memory import check_launches

        check_launches(monkeypatch)
        sum_in_order(monkeypatch)

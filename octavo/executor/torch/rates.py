"""Measures a device's read bandwidth and matmul rate, in some tenths of a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from octavo.executor.base import Ceilings

SIDE = 2048
"""Rows and columns of the measured matrices."""
ROUNDS = 3


def measured_ceilings(num_bytes: int, dtype: torch.dtype, device: torch.device) -> Ceilings:
    """Measures reading `num_bytes` and multiplying matrices of `dtype`."""
    array = torch.ones(max(1, num_bytes // 4), dtype=torch.float32, device=device)
    read_s = _least_s(array.sum, device)
    matrix = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    product_s = _least_s(lambda: matrix @ matrix, device)
    return Ceilings(array.nbytes / read_s, 2 * SIDE**3 / product_s)


def _least_s(work: Callable[[], object], device: torch.device) -> float:
    work()
    times = []
    for _ in range(ROUNDS):
        wait_for(device)
        began = time.perf_counter()
        work()
        wait_for(device)
        times.append(time.perf_counter() - began)
    return min(times)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

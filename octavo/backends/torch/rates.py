"""What a device gives at most: bytes per second read, operations per second of products. Measured
in some tenths of a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from octavo.backends.base import Ceilings

SIDE = 2048
"""Of the square matrices that are multiplied."""
ROUNDS = 3


def measured_ceilings(num_bytes: int, dtype: torch.dtype, device: torch.device) -> Ceilings:
    """Reading an array of so many bytes; multiplying matrices of the dtype."""
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

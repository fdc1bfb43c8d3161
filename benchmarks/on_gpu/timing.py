"""Times on a device, by its own events and with launches captured as a graph; on a CPU by the
clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

Run = Callable[[], object]
Made = TypeVar("Made")

CACHE_BYTES = 256 << 20
"""Bytes that no GPU's cache holds."""


class Mark:
    """A moment in the order of the device's work."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._at = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def until(self, other: Mark) -> float:
        """Returns the seconds between two marks, once the device has passed both."""
        if self._event is None:
            return other._at - self._at
        other._event.synchronize()
        return float(self._event.elapsed_time(other._event)) / 1e3


def seconds(run: Run, device: torch.device, *, rounds: int = 10) -> float:
    """Returns the median time of a run in seconds; a first run is not counted."""
    run()
    found = []
    for _ in range(rounds):
        began = Mark(device)
        run()
        found.append(began.until(Mark(device)))
    return statistics.median(found)


def distinct(
    make: Callable[[int], Made], num_bytes: Callable[[Made], int], *, most: int, tiny: bool
) -> list[Made]:
    """Makes as many as a cache does not hold, from 2 to `most`."""
    first = make(0)
    count = 2 if tiny else max(2, min(most, CACHE_BYTES // num_bytes(first) + 1))
    return [first, *map(make, range(1, count))]


def seconds_each(runs: Sequence[Run], device: torch.device, *, rounds: int = 10) -> float:
    """Returns the time of one of several runs in seconds, all captured in one graph so that the
    host launches once.

    Each run should read data of its own, so that together they read more than a cache holds.
    """
    for run in runs:
        run()
    if device.type != "cuda":
        return seconds(lambda: [run() for run in runs], device, rounds=rounds) / len(runs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return seconds(graph.replay, device, rounds=rounds) / len(runs)

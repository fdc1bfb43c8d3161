"""Tracks which bytes of a block have arrived, in any parts, with repetitions."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class ByteCover:
    """A set of byte ranges, which may touch, repeat or overlap."""

    __slots__ = ("_ends", "_starts", "num_bytes")

    def __init__(self) -> None:
        self.num_bytes = 0
        """Number of bytes in the union of the ranges."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        """Ends of the merged ranges, in the order of `_starts`; no two of them touch."""

    def add(self, start: int, end: int) -> None:
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        joined = range(first, last)
        self.num_bytes += end - start - sum(self._ends[at] - self._starts[at] for at in joined)
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

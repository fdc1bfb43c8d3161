"""Measures the transfer rate of blocks from other engines.

Each part of a block has a flag for whether another one was queued after it. If so, the time until
the next part is spent on the link; otherwise it may be the sender's and is not counted.
"""

from __future__ import annotations

LEAST_GAP_S = 1e-6
"""Lower bound on the seconds between two parts."""


class LinkMeter:
    """Sums of received bytes and of the seconds for them."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.seconds = 0.0
        self._before: dict[str, float] = {}
        """Arrival time of the last part of each source, if another one was queued after it."""

    def note(self, source: str, num_bytes: int, now: float, *, has_more: bool) -> None:
        """Records a part that arrived from a source at the time `now`."""
        before = self._before.pop(source, None)
        if before is not None:
            self.add(num_bytes, max(LEAST_GAP_S, now - before))
        if has_more:
            self._before[source] = now

    def add(self, num_bytes: int, seconds: float) -> None:
        self.num_bytes += num_bytes
        self.seconds += seconds

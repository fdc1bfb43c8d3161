"""Measures how fast blocks come over the link from other engines.

An engine that sends a part says whether another one was waiting behind it. The time between two
such parts is the link's; where nothing waited, it may have been the other engine's, and says
nothing.
"""

from __future__ import annotations

LEAST_GAP_S = 1e-6
"""Seconds that two parts are taken to be apart at least."""


class LinkMeter:
    """Sums of bytes and of the seconds in which they came."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.seconds = 0.0
        self._before: dict[str, float] = {}
        """When the last part of each source came, of those behind which another one waited."""

    def note(self, source: str, num_bytes: int, now: float, *, has_more: bool) -> None:
        """Takes in a part that has come from a source at the moment `now`."""
        before = self._before.pop(source, None)
        if before is not None:
            self.add(num_bytes, max(LEAST_GAP_S, now - before))
        if has_more:
            self._before[source] = now

    def add(self, num_bytes: int, seconds: float) -> None:
        """Takes in bytes and the seconds in which they came."""
        self.num_bytes += num_bytes
        self.seconds += seconds

"""State of one engine for routing: queued work, speed and cached blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.protocol.cached_hashes import CachedHashes

KEPT_SHARE = 0.9
"""Weight of earlier measurements relative to the newest one."""


@dataclass(slots=True)
class Target:
    """One engine, or one server."""

    label: str
    """Name that does not change when other targets are added or removed."""
    cached: CachedHashes = field(default_factory=CachedHashes)
    """Digests of the blocks that it has, as far as known."""
    pool: str = ""
    """Name of the store through which it shares blocks with other targets; "" without one."""
    queued_tokens: int = 0
    """Uncached prompt tokens of the requests that have no output yet."""
    held_tokens: int = 0
    """Tokens of all unfinished requests."""
    sent_tokens: int = 0
    """Total number of uncached prompt tokens sent to it."""
    _since: float = 0.0
    """Time up to which the completed part of the queue has been subtracted."""
    _measured_tokens: float = 0.0
    _measured_s: float = 0.0

    @property
    def rate(self) -> float | None:
        """Measured prompt tokens per second; None before the first measurement."""
        if not (self._measured_s and self._measured_tokens):
            return None
        return self._measured_tokens / self._measured_s

    def backlog(self, now: float) -> float:
        """Returns the queued tokens minus those computed since then according to the measured
        rate.
        """
        done = (self.rate or 0.0) * max(0.0, now - self._since)
        return max(0.0, self.queued_tokens - done)

    def queue(self, num_tokens: int, now: float) -> None:
        """Adds uncached tokens to compute."""
        if not self.queued_tokens:
            self._since = now
        self.queued_tokens += num_tokens
        self.sent_tokens += num_tokens

    def computed(self, num_tokens: int, now: float) -> None:
        """Counts `num_tokens` queued tokens as computed at time `now`."""
        self.queued_tokens -= num_tokens
        self._measured_tokens = KEPT_SHARE * self._measured_tokens + num_tokens
        self._measured_s = KEPT_SHARE * self._measured_s + max(0.0, now - self._since)
        self._since = now

"""State of one engine for routing: queued work, speed and cached blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.protocol.cached_hashes import CachedHashes

KEPT_SHARE = 0.9
"""Share of what was measured before that counts beside the newest measurement."""


@dataclass(slots=True)
class Target:
    """One engine, or one server."""

    label: str
    """Name that stays the same when others come and go."""
    cached: CachedHashes = field(default_factory=CachedHashes)
    """Names of the blocks that it holds, as far as is known."""
    pool: str = ""
    """Name of the store that it shares its blocks in with others; "" where it has none."""
    queued_tokens: int = 0
    """Uncached prompt tokens of the requests that have yielded nothing yet."""
    held_tokens: int = 0
    """Tokens of all unfinished requests."""
    sent_tokens: int = 0
    """Uncached prompt tokens that it was ever given."""
    _since: float = 0.0
    """Time until which the work of the queue is accounted for."""
    _measured_tokens: float = 0.0
    _measured_s: float = 0.0

    @property
    def rate(self) -> float | None:
        """Prompt tokens computed per second, as measured; None before the first measurement."""
        if not (self._measured_s and self._measured_tokens):
            return None
        return self._measured_tokens / self._measured_s

    def backlog(self, now: float) -> float:
        """Returns the queued tokens less those that the measured rate has computed since."""
        done = (self.rate or 0.0) * max(0.0, now - self._since)
        return max(0.0, self.queued_tokens - done)

    def queue(self, num_tokens: int, now: float) -> None:
        """Adds uncached tokens to compute."""
        if not self.queued_tokens:
            self._since = now
        self.queued_tokens += num_tokens
        self.sent_tokens += num_tokens

    def computed(self, num_tokens: int, now: float) -> None:
        """Counts `num_tokens` tokens of the queue as computed, the last ones just now."""
        self.queued_tokens -= num_tokens
        self._measured_tokens = KEPT_SHARE * self._measured_tokens + num_tokens
        self._measured_s = KEPT_SHARE * self._measured_s + max(0.0, now - self._since)
        self._since = now

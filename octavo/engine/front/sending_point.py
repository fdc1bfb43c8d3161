"""The fewest uncached tokens of a prompt that another engine computes for this one.

A prompt is worth sending once computing it here would take longer than its blocks take over the
link: what the other engine computes is hidden from this one's streams, the transfer is not. Knows
measured rates; reads no clock.
"""

from __future__ import annotations

import math

from octavo.engine.step_costs import UNMEASURED, StepCosts
from octavo.kv_messages import StoredBytes

UNMEASURED_TOKENS = 256
"""Fewest tokens that are sent before both rates are known, so that they become known."""
MOST_TOKENS = 1 << 20
"""Longest prompt that is looked at; where even that is not worth sending, none is."""
WINDOW_S = 1.0
"""Seconds of transfers that the link's rate is a mean of; older ones count half, then less."""
RATE_LIFE_S = 60.0
"""Seconds without a transfer after which the link's rate is not known any more."""
ROUND_TRIPS = 2
"""Messages to the peer and back before the first block comes: the prompt's and the blocks' own."""
WEIGHT = 0.2
"""Weight of the newest round trip in the running mean."""


class SendingPoint:
    """The rates of one engine and its link, and the number of tokens that follows from them."""

    def __init__(self, given: int | None, *, token_bytes: float, max_chunk: int) -> None:
        """`given` holds whatever is measured; None: the rates decide. `token_bytes` are those of a
        token in all cache groups, `max_chunk` the most tokens of a step.
        """
        self._given = given
        self._token_bytes = token_bytes
        self._max_chunk = max_chunk
        self._costs = UNMEASURED
        self._stored = StoredBytes()
        self._bytes = self._seconds = 0.0
        """Sums over the transfers of the window."""
        self._moved_at = -math.inf
        """Moment of the last transfer."""
        self._round_trip_s = 0.0
        self._derived: float = UNMEASURED_TOKENS
        self._is_fresh = False
        """Whether the derived number is that of the rates."""

    def note(self, costs: StepCosts | None, stored: StoredBytes, now: float) -> None:
        """Takes in what steps cost, where a step tells it, and the sums of blocks that came."""
        if costs is not None:
            self._costs, self._is_fresh = costs, False
        num_bytes = stored.link_bytes - self._stored.link_bytes
        if num_bytes > 0:
            seconds = stored.link_s - self._stored.link_s
            self._bytes, self._seconds = self._bytes + num_bytes, self._seconds + seconds
            if self._seconds > WINDOW_S:
                self._bytes, self._seconds = self._bytes / 2, self._seconds / 2
            self._moved_at, self._is_fresh = now, False
        self._stored = stored  # which begins again where an engine was replaced

    def note_round_trip(self, seconds: float) -> None:
        """Takes in how long a message and its answer took."""
        mean = self._round_trip_s or seconds
        self._round_trip_s = mean + WEIGHT * (seconds - mean)
        self._is_fresh = False

    def num_tokens(self, now: float) -> float:
        """Returns the fewest uncached tokens that are sent; infinity where none are worth it."""
        if self._given is not None:
            return self._given
        if now - self._moved_at > RATE_LIFE_S or not self._seconds or not self._costs.points:
            return UNMEASURED_TOKENS
        if not self._is_fresh:
            self._derived, self._is_fresh = self._fewest(), True
        return self._derived

    def _fewest(self) -> float:
        """Finds the number by halving, since each token more costs more here than on the link, or
        none does.
        """
        if not self._is_worth_it(MOST_TOKENS):
            return math.inf
        low, high = 0, MOST_TOKENS
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_worth_it(middle) else (middle, high)
        return high

    def _is_worth_it(self, num_tokens: int) -> bool:
        chunk = self._max_chunk
        whole, rest = divmod(num_tokens, chunk)
        step_s = self._costs.step_s(chunk, 0)
        rest_s = self._costs.step_s(rest, 0) if rest else 0.0
        if step_s is None or rest_s is None:
            return False
        keys = chunk * whole * (whole + 1) // 2
        here_s = whole * step_s + rest_s + self._costs.key_s * (keys + (num_tokens if rest else 0))
        link_s = num_tokens * self._token_bytes * self._seconds / self._bytes
        return here_s > ROUND_TRIPS * self._round_trip_s + link_s

"""Decides when a core counts as hung, and how long to wait before a dead one is replaced.

Pure computations: the caller passes the times and handles processes and requests.
"""

from __future__ import annotations

MAX_INTERVAL_S = 2.0
CHECKS_PER_TIMEOUT = 8

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
HEALTHY_S = 60.0
"""Seconds after which the death of a ready core counts as a first failure again."""


class Watchdog:
    """Measures how long a core's heartbeat counter has not changed.

    Time in which it was not checked does not count: a suspended machine has not hung.
    """

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` 0 disables it."""
        self.timeout_s = timeout_s
        self.interval_s = min(timeout_s / CHECKS_PER_TIMEOUT or MAX_INTERVAL_S, MAX_INTERVAL_S)
        """Interval at which `has_stalled` is to be called, in seconds."""
        self._beats: int | None = None
        self._still_s = self._checked_at = 0.0

    def has_stalled(self, beats: int, now: float) -> bool:
        """Compares the heartbeat counter with the previous one; returns whether it has been
        unchanged for `timeout_s`.
        """
        if beats == self._beats:
            self._still_s += min(now - self._checked_at, 2 * self.interval_s)
        else:
            self._beats, self._still_s = beats, 0.0
        self._checked_at = now
        return 0 < self.timeout_s <= self._still_s

    def reset(self) -> None:
        """Restarts the measurement, because the core has no work or is a new one."""
        self._beats = None


class RestartBackoff:
    """Delays between the starts of cores that keep dying: 0, then 0.5 s, doubling up to 30 s."""

    def __init__(self) -> None:
        self.num_failed_starts = 0
        """Number of cores in a row that died before they were ready."""
        self._num_deaths = 0
        self._ready_at: float | None = None

    def note_ready(self, now: float) -> None:
        self.num_failed_starts = 0
        self._ready_at = now

    def note_intended_end(self) -> None:
        """Records that a core was ended on purpose; the next one starts at once."""
        self.num_failed_starts = self._num_deaths = 0
        self._ready_at = None

    def delay_s(self, now: float) -> float:
        """Records a death; returns the seconds to wait before the next start."""
        if self._ready_at is None:
            self.num_failed_starts += 1
        elif now - self._ready_at >= HEALTHY_S:
            self._num_deaths = 0
        self._ready_at = None
        self._num_deaths += 1
        if self._num_deaths == 1:
            return 0.0
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** (self._num_deaths - 2))

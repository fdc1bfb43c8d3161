"""How a model in memory is used: by how many requests, since when by none, and until when it stays.

Counts and times only; `residency.py` decides what follows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class ModelUses:
    """The HTTP requests that hold a model, and how long it stays after the last."""

    keep_s: float | None = None
    """Seconds for which the model stays in memory without a request; None for good."""
    is_kept_by_request: bool = False
    """Whether a request's keep_alive set `keep_s`, rather than the server's --idle-unload."""
    num_held: int = 0
    """Requests that work with the model."""
    used_at: float = field(default_factory=time.monotonic)
    """End of its last request, on the monotonic clock."""
    loads_on_request: bool = False
    """Whether a request started its current load, so that others wait for it too."""

    def hold(self) -> None:
        self.num_held += 1

    def release(self) -> None:
        self.num_held -= 1
        self.used_at = time.monotonic()

    def keep(self, seconds: float | None, *, by_request: bool = False) -> None:
        """Sets how long the model stays in memory without a request."""
        self.keep_s = seconds
        self.is_kept_by_request = by_request

    @property
    def unload_reason(self) -> str:
        """Reason for an unload once the time is up."""
        if self.is_kept_by_request and not self.keep_s:
            return "a request set keep_alive to 0"
        source = "keep_alive" if self.is_kept_by_request else "--idle-unload"
        return f"no request for {self.keep_s or 0:g} s ({source})"

    @property
    def expires_in_s(self) -> float | None:
        """Seconds until the model may be unloaded; None if it stays for good."""
        if self.keep_s is None:
            return None
        since = 0.0 if self.num_held else time.monotonic() - self.used_at
        return max(0.0, self.keep_s - since)

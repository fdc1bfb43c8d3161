"""Usage of a loaded model: requests in progress, last use, idle timeout.

`residency.py` unloads models accordingly.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class ModelUses:
    """The HTTP requests that use a model, and its idle timeout."""

    keep_s: float | None = None
    """Idle timeout in seconds; None: never unload."""
    is_kept_by_request: bool = False
    """Whether `keep_s` comes from a request's keep_alive, not from --idle-unload."""
    num_held: int = 0
    """Number of requests in progress."""
    used_at: float = field(default_factory=time.monotonic)
    """End of its last request, on the monotonic clock in seconds."""
    loads_on_request: bool = False
    """Whether a request triggered the current load, so that other requests wait for it too."""

    def hold(self) -> None:
        self.num_held += 1

    def release(self) -> None:
        self.num_held -= 1
        self.used_at = time.monotonic()

    def keep(self, seconds: float | None, *, by_request: bool = False) -> None:
        """Sets the idle timeout in seconds; None: never unload."""
        self.keep_s = seconds
        self.is_kept_by_request = by_request

    @property
    def unload_reason(self) -> str:
        """Reason for unloading after the timeout."""
        if self.is_kept_by_request and not self.keep_s:
            return "a request set keep_alive to 0"
        source = "keep_alive" if self.is_kept_by_request else "--idle-unload"
        return f"no request for {self.keep_s or 0:g} s ({source})"

    @property
    def expires_in_s(self) -> float | None:
        """Seconds until the model may be unloaded; None: never."""
        if self.keep_s is None:
            return None
        since = 0.0 if self.num_held else time.monotonic() - self.used_at
        return max(0.0, self.keep_s - since)

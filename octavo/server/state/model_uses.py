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

    @property
    def expires_in_s(self) -> float | None:
        """Seconds until the model may be unloaded; None if it stays for good."""
        if self.keep_s is None:
            return None
        since = 0.0 if self.num_held else time.monotonic() - self.used_at
        return max(0.0, self.keep_s - since)

"""How a request or a beam has ended."""

from __future__ import annotations

from typing import NamedTuple

from octavo.outputs import FinishReason


class Finish(NamedTuple):
    reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token or, of a beam, the stop string."""
    error: str | None = None

"""The field keep_alive: how long a model stays in memory after a request.

Source: Ollama's API reference; durations are in Go's notation.
"""

from __future__ import annotations

import math

from fastapi import Request

from octavo.api.errors import InvalidRequest, shown
from octavo.config.sizes import read_seconds
from octavo.server.http.auth import is_operator
from octavo.server.http.body import get_ignored
from octavo.server.state.model_uses import ModelUses

KeepAlive = str | int | float | None

TAKES = 'a duration such as "5m" or "1h30m", seconds, 0 to unload at once, or -1 forever'
MAX_S = 1e9
"""Longest finite time in seconds; longer times keep the model loaded forever."""


def parse_keep_alive(keep_alive: str | int | float) -> float | None:
    """Returns seconds, or None to keep the model loaded. Raises InvalidRequest for an invalid
    value.
    """
    seconds = read_seconds(keep_alive.strip()) if isinstance(keep_alive, str) else float(keep_alive)
    if seconds is None or math.isnan(seconds):
        raise InvalidRequest(
            f"keep_alive: got {shown(keep_alive)}, expected {TAKES}", param="keep_alive"
        )
    return seconds if 0 <= seconds <= MAX_S else None


def asks_to_unload(keep_alive: KeepAlive) -> bool:
    return keep_alive is not None and parse_keep_alive(keep_alive) == 0


def apply_keep_alive(request: Request, uses: ModelUses, keep_alive: KeepAlive) -> None:
    """Sets the model's idle timeout; ignored unless the request is an operator's."""
    if keep_alive is None:
        return
    seconds = parse_keep_alive(keep_alive)
    if is_operator(request):
        uses.keep(seconds, by_request=True)
    else:
        get_ignored(request).add("keep_alive", "requires the operator key")

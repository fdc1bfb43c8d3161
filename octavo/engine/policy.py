"""Who goes first, and who gives way: the scheduler's order, as an object of its own so that others can be written beside it.

Decides over requests only; knows neither blocks nor time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from octavo.engine.request import Request


class Policy(Protocol):
    def admission_order(self, waiting: Mapping[str, Request]) -> Iterable[Request]:
        """The waiting requests, those to start first in front; read only as far as requests can start."""
        ...

    def victim(self, running: Sequence[Request]) -> Request:
        """Which of the running requests loses its blocks."""
        ...


class FirstComeFirstServed:
    """Waiting requests in their order (a preempted one stands in front); the youngest of the running gives way."""

    def admission_order(self, waiting: Mapping[str, Request]) -> Iterable[Request]:
        return waiting.values()

    def victim(self, running: Sequence[Request]) -> Request:
        return running[-1]

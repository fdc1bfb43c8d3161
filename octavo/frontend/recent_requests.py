"""Requests that have just finished, kept for a short while so that they can be forked.

Bounded in number, tokens and time. Keeps token ids and text, no logprobs; knows no KV block: what
is still in the prefix cache is found there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

KEPT_S = 60.0
"""Seconds for which a finished request is kept."""
MAX_KEPT = 256
MAX_KEPT_TOKENS = 1 << 20
"""Most tokens of all kept requests together, prompts included."""


class Finished(Protocol):
    """The part of a finished request that decides how long it is kept."""

    @property
    def ended_at(self) -> float:
        """Moment of its end on the monotonic clock, in seconds."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of its tokens, prompt and samples together."""
        ...


FinishedT = TypeVar("FinishedT", bound=Finished)


class RecentRequests(Generic[FinishedT]):
    """Finished requests by id, the oldest first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, FinishedT] = OrderedDict()
        self._num_tokens = 0

    def add(self, request_id: str, request: FinishedT) -> None:
        """Keeps a request, in place of an earlier one of that id; older ones make room."""
        if request_id in self._kept:
            self.drop(request_id)
        self._kept[request_id] = request
        self._num_tokens += request.num_tokens
        self._sweep(request.ended_at)

    def find(self, request_id: str, now: float) -> FinishedT | None:
        """Returns a request that finished within the last KEPT_S seconds."""
        self._sweep(now)
        return self._kept.get(request_id)

    def drop(self, request_id: str) -> None:
        """Removes a request, if it is kept."""
        found = self._kept.pop(request_id, None)
        if found is not None:
            self._num_tokens -= found.num_tokens

    def all(self, now: float) -> list[FinishedT]:
        """Returns all requests that finished within the last KEPT_S seconds."""
        self._sweep(now)
        return list(self._kept.values())

    def _sweep(self, now: float) -> None:
        while self._kept:
            request_id, oldest = next(iter(self._kept.items()))
            fits = len(self._kept) <= MAX_KEPT and self._num_tokens <= MAX_KEPT_TOKENS
            if fits and oldest.ended_at >= now - KEPT_S:
                return
            self.drop(request_id)

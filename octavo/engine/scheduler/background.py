"""Background requests behind all others, under whichever policy orders the rest.

Work that no one waits for (the lines of a batch) carries a priority of its own, beyond what users
may give. It starts where no other request waits, shares a step last and gives way first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from octavo.engine.protocol.requests import BACKGROUND_PRIORITY
from octavo.engine.requests.request import Request
from octavo.engine.scheduler.policy import FirstComeFirstServed, Policy


class BackgroundLast:
    """A policy for ordinary requests, and first come, first served for background ones behind
    them.
    """

    def __init__(self, ordinary: Policy) -> None:
        self.ordinary = ordinary
        self.counts_tokens = ordinary.counts_tokens
        self._background = FirstComeFirstServed()
        self._num_background_running = 0

    def __len__(self) -> int:
        return len(self.ordinary) + len(self._background)

    def join(self, request: Request, *, first: bool = False) -> None:
        self._policy_of(request).join(request, first=first)

    def leave(self, request: Request) -> None:
        self._policy_of(request).leave(request)

    def order(self) -> Iterator[Request]:
        return chain(self.ordinary.order(), self._background.order())

    def oldest(self) -> Request | None:
        found = [self.ordinary.oldest(), self._background.oldest()]
        waiting = [request for request in found if request is not None]
        return min(waiting, key=lambda request: request.source.arrival_time, default=None)

    def started(self, request: Request) -> None:
        self._num_background_running += _is_background(request)
        self._policy_of(request).started(request)

    def stopped(self, request: Request) -> None:
        self._num_background_running -= _is_background(request)
        self._policy_of(request).stopped(request)

    def took(self, request: Request, num_tokens: int) -> None:
        self._policy_of(request).took(request, num_tokens)

    def max_chunk(self, num_tokens: int) -> int:
        """Returns half of a step where an ordinary request waits while a background one runs, so
        that it can start beside a long background prompt.
        """
        if len(self.ordinary) and self._num_background_running:
            num_tokens = -(-num_tokens // 2)
        return self.ordinary.max_chunk(num_tokens)

    def ranked(self, running: Sequence[Request]) -> Sequence[Request]:
        background = _background_of(running)
        if not background:
            return self.ordinary.ranked(running)
        ordinary = [request for request in running if not _is_background(request)]
        return [*self.ordinary.ranked(ordinary), *background]

    def victim(self, running: Sequence[Request]) -> Request:
        background = _background_of(running)
        return self._background.victim(background) if background else self.ordinary.victim(running)

    def _policy_of(self, request: Request) -> Policy:
        return self._background if _is_background(request) else self.ordinary


def _is_background(request: Request) -> bool:
    return request.source.priority >= BACKGROUND_PRIORITY


def _background_of(requests: Sequence[Request]) -> list[Request]:
    return [request for request in requests if _is_background(request)]

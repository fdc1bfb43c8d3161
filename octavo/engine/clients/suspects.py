"""Finds which of the requests of a step is to blame for the hang or death of its engine.

All of them are tried, one after the other and alone in the engine: the one with which it fails
again is guilty. Requests that all prove sound alone go on together, but not forever. Knows ids
only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

MAX_UNSOLVED = 2
"""Number of unexplained failures that a request may have been part of; it fails with the next."""


class Suspects:
    """The requests that may be to blame. Each failure of an engine either ends a request or brings
    some nearer to their end, so failures come to an end.
    """

    def __init__(self) -> None:
        self.on_trial: str | None = None
        self._held: deque[str] = deque()
        self._case: list[str] = []
        """All suspects of the failure under trial; empty once one was found guilty."""
        self._unsolved: Counter[str] = Counter()

    @property
    def any(self) -> bool:
        """Whether a request is on trial or waits for its trial."""
        return self.on_trial is not None or bool(self._held)

    def has(self, request_id: str) -> bool:
        """Returns whether a request may be to blame for the failure under trial."""
        return request_id == self.on_trial or request_id in self._held or request_id in self._case

    def accuse(self, request_ids: Sequence[str], *, certain: bool = False) -> list[str]:
        """Records a failure while these were computed; returns those that caused it.

        The others are suspects from now on. With `certain` a single request is guilty at once: it
        is known that nothing else can have been the cause.
        """
        if self.on_trial is not None:
            guilty = [self.on_trial]
            self._case.clear()
        elif certain and len(request_ids) == 1:
            guilty = list(request_ids)
        else:
            guilty = [name for name in request_ids if self._unsolved[name] >= MAX_UNSOLVED]
            rest = [name for name in request_ids if name not in guilty]
            self._held.extend(rest)
            self._case = [] if guilty else rest
        for name in guilty:
            self.ended(name)
        return guilty

    def next_on_trial(self) -> str | None:
        """Returns the request to compute now, alone; None if one is on trial or none is left."""
        if self.on_trial is not None or not self._held:
            return None
        self.on_trial = self._held.popleft()
        return self.on_trial

    def postpone(self) -> None:
        """Ends a trial without a result: the engine failed before it took the request in."""
        if self.on_trial is not None:
            self._held.appendleft(self.on_trial)
            self.on_trial = None

    def cleared(self, request_id: str) -> None:
        """Records that a request was computed and its step ended."""
        if request_id == self.on_trial:
            self.on_trial = None
        if not self.any:
            self._unsolved.update(self._case)
            self._case = []

    def ended(self, request_id: str) -> None:
        """Removes a request that has ended."""
        if request_id in self._held:
            self._held.remove(request_id)
        if request_id in self._case:
            self._case.remove(request_id)
        self.cleared(request_id)
        del self._unsolved[request_id]

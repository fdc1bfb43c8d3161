"""Finds which request of a step caused the hang or death of its engine.

All requests of the step are tried, one after the other and alone in the engine; the one with which
the engine fails again is guilty. Requests that pass alone are computed together again, but not
forever. Works on request ids only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

MAX_UNSOLVED = 2
"""Number of unexplained failures that a request may be involved in; the next one fails it."""


class Suspects:
    """Requests that may have caused a failure.

    Each failure either ends a request or counts against its suspects, so the number of failures is
    bounded.
    """

    def __init__(self) -> None:
        self.on_trial: str | None = None
        self._held: deque[str] = deque()
        self._case: list[str] = []
        """All suspects of the current failure; empty once a request was found guilty."""
        self._unsolved: Counter[str] = Counter()

    @property
    def any(self) -> bool:
        """Whether a request is on trial or waits for its trial."""
        return self.on_trial is not None or bool(self._held)

    def has(self, request_id: str) -> bool:
        """Returns whether a request is a suspect of the current failure."""
        return request_id == self.on_trial or request_id in self._held or request_id in self._case

    def accuse(self, request_ids: Sequence[str], *, certain: bool = False) -> list[str]:
        """Records a failure during a step of these requests; returns the requests that caused it.

        The others become suspects. With `certain`, a single request is guilty at once, since
        nothing else can be the cause.
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
        """Ends a trial without a result, because the engine failed before it received the
        request.
        """
        if self.on_trial is not None:
            self._held.appendleft(self.on_trial)
            self.on_trial = None

    def cleared(self, request_id: str) -> None:
        """Records that a request was computed alone without a failure."""
        if request_id == self.on_trial:
            self.on_trial = None
        if not self.any:
            self._unsolved.update(self._case)
            self._case = []

    def ended(self, request_id: str) -> None:
        """Removes a finished request."""
        if request_id in self._held:
            self._held.remove(request_id)
        if request_id in self._case:
            self._case.remove(request_id)
        self.cleared(request_id)
        del self._unsolved[request_id]

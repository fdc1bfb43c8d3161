"""Which of the requests that a hung step computed is to blame.

All of them are tried, one after the other and alone in the engine: who hangs it again is the one.
Where all prove sound alone they go on together, but not for ever. Knows ids only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

MAX_UNSOLVED = 2
"""So many hangs of steps that a request was in may stay unexplained; with the next one it fails."""


class Suspects:
    """Each hang fails somebody, or brings somebody nearer to it, so hanging comes to an end."""

    def __init__(self) -> None:
        self.on_trial: str | None = None
        self._held: deque[str] = deque()
        self._case: list[str] = []
        """All that were suspected of what is being tried; empty once somebody was found guilty."""
        self._unsolved: Counter[str] = Counter()

    @property
    def any(self) -> bool:
        """Somebody is on trial, or waits for it."""
        return self.on_trial is not None or bool(self._held)

    def hung(self, request_ids: Sequence[str], *, in_step: bool = True) -> list[str]:
        """Whom to fail for a step of these that hung; the others are suspects from now on.

        Without `in_step` no step is known: it may be any of them, or none.
        """
        if self.on_trial is not None:
            guilty = [self.on_trial]
            self._case.clear()
        elif in_step and len(request_ids) == 1:
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
        """Whom to compute now, alone; None while another is on trial, or where nobody is left."""
        if self.on_trial is not None or not self._held:
            return None
        self.on_trial = self._held.popleft()
        return self.on_trial

    def cleared(self, request_id: str) -> None:
        """It was computed, and the step came to an end."""
        if request_id == self.on_trial:
            self.on_trial = None
        if not self.any:
            self._unsolved.update(self._case)
            self._case = []

    def ended(self, request_id: str) -> None:
        """It is wanted no more."""
        if request_id in self._held:
            self._held.remove(request_id)
        if request_id in self._case:
            self._case.remove(request_id)
        self.cleared(request_id)
        del self._unsolved[request_id]

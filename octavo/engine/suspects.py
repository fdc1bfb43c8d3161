"""Which of the requests that a hung step computed is to blame.

They are tried: all come again, but of those that nobody has cleared only one at a time; whoever hangs a step again is the one. Knows ids
only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class Suspects:
    """Each hung step either fails a request or makes suspects of some that were none before, so hanging comes to an end."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        """Were in a step that hung."""
        self._held: deque[str] = deque()
        self._on_trial: str | None = None

    def hung(self, request_ids: Sequence[str], *, in_step: bool = True) -> list[str]:
        """Whom to fail for a step of these that hung; of the others some may be held back from now on.

        Without `in_step` no step is known: it may be any of them, or none.
        """
        if in_step and len(request_ids) == 1:
            guilty = list(request_ids)
        elif self._on_trial in request_ids:
            guilty = [self._on_trial] if self._on_trial is not None else []
        else:
            guilty = [request_id for request_id in request_ids if request_id in self._known]
            self._hold([request_id for request_id in request_ids if request_id not in self._known])
        for request_id in guilty:
            self.ended(request_id)
        return guilty

    def is_held(self, request_id: str) -> bool:
        """Not to be computed yet."""
        return request_id in self._held

    def next_on_trial(self) -> str | None:
        """Whom to compute now, the first of the held; None while another is on trial."""
        if self._on_trial is not None or not self._held:
            return None
        self._on_trial = self._held.popleft()
        return self._on_trial

    def let_go(self, request_id: str) -> None:
        """It is wanted no more, and need not be tried."""
        self._held.remove(request_id)

    def cleared(self, request_id: str) -> None:
        """It was computed, and the step came to an end."""
        if request_id == self._on_trial:
            self._on_trial = None

    def ended(self, request_id: str) -> None:
        self.cleared(request_id)
        self._known.discard(request_id)
        if request_id in self._held:
            self._held.remove(request_id)

    def _hold(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._known.add(request_id)
            self._held.append(request_id)

"""How often Python collects garbage in a process that runs an engine."""

from __future__ import annotations

import gc

COLLECT_AFTER = 200_000
"""Garbage collection threshold in new objects, instead of Python's 700.

Few of the objects created while a model loads are garbage; with the default, collections take a
sixteenth of the time to the first token. Steps of 256 requests reach the default four times each.
"""


class RareCollection:
    """Raises the threshold while anyone needs it, unless collection is disabled."""

    def __init__(self) -> None:
        self._num_users = 0
        self._before = gc.get_threshold()

    def begin(self) -> None:
        if self._num_users == 0:
            self._before = first, *others = gc.get_threshold()
            if first:
                gc.set_threshold(max(first, COLLECT_AFTER), *others)
        self._num_users += 1

    def end(self) -> None:
        """Ends one `begin`; the last one restores the threshold."""
        self._num_users -= 1
        if self._num_users == 0:
            gc.set_threshold(*self._before)


RARE_COLLECTION = RareCollection()

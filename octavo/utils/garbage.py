"""How often Python collects garbage in a process that runs an engine."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

COLLECT_AFTER = 200_000
"""Garbage collection threshold in new objects, instead of Python's 700.

Few of the objects created while a model loads are garbage; with the default, collections take a
sixteenth of the time to the first token. Steps of 256 requests reach the default four times each.
"""


def collect_rarely() -> Callable[[], None]:
    """Raises the threshold, unless collection is disabled; returns a function that restores it."""
    first, *others = gc.get_threshold()
    if first:
        gc.set_threshold(max(first, COLLECT_AFTER), *others)
    return partial(gc.set_threshold, first, *others)

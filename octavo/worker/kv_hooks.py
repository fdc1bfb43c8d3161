"""What extensions add to KV memory: a plan of memory beside a file, and counters of what moved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from octavo.config.engine_config import EngineConfig
from octavo.executor.kv import KvCache, KvLayout
from octavo.utils.extensions import load_hooks
from octavo.worker.memory import KvPlanner

Counters: TypeAlias = Callable[[], Mapping[str, float]]
"""Returns counts since the start, by name."""


class KvHooks:
    """What one extension adds to KV memory. The defaults add nothing."""

    def planner(self, config: EngineConfig) -> KvPlanner | None:
        """Returns what plans the KV cache; None if all of it is in memory."""
        return None

    def counters(self, kv: KvCache, layouts: Sequence[KvLayout]) -> Counters | None:
        """Returns what counts the moves between memory and a file; None if there are none."""
        return None


@functools.cache
def _hooks() -> tuple[KvHooks, ...]:
    return tuple(hooks() for hooks in load_hooks("kv"))


def kv_planner(config: EngineConfig) -> KvPlanner | None:
    """Returns what plans a KV cache of which a part is in a file; None if all is in memory."""
    found = (hooks.planner(config) for hooks in _hooks())
    return next((each for each in found if each is not None), None)


def kv_counters(kv: KvCache, layouts: Sequence[KvLayout]) -> Counters | None:
    """Returns what counts the moves between memory and a file; None if there are none."""
    found = (hooks.counters(kv, layouts) for hooks in _hooks())
    return next((each for each in found if each is not None), None)

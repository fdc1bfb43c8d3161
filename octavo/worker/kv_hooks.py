"""Hooks of extensions that keep a part of the KV cache in a file: a memory planner, and counters.
Called when an engine starts, not in its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from octavo.config.engine_config import EngineConfig
from octavo.executor.kv import KvCache, KvLayout
from octavo.utils.extensions import get_first, get_hooks
from octavo.worker.memory import KvPlanner

Counters: TypeAlias = Callable[[], Mapping[str, float]]
"""Returns counters since the start, by name."""


class KvHooks:
    """KV memory hooks of one extension. The defaults add nothing."""

    def planner(self, config: EngineConfig) -> KvPlanner | None:
        """Returns the planner of the KV cache. Returns None if all of it is in memory."""
        return None

    def counters(self, kv: KvCache, layouts: Sequence[KvLayout]) -> Counters | None:
        """Returns the counters of moves between memory and a file. Returns None if there are
        none.
        """
        return None


def kv_planner(config: EngineConfig) -> KvPlanner | None:
    """Returns the planner of a KV cache that is partly in a file. Returns None if all of it is in
    memory.
    """
    return get_first(hooks.planner(config) for hooks in get_hooks("kv", KvHooks))


def kv_counters(kv: KvCache, layouts: Sequence[KvLayout]) -> Counters | None:
    """Returns the counters of moves between memory and a file. Returns None if there are none."""
    return get_first(hooks.counters(kv, layouts) for hooks in get_hooks("kv", KvHooks))

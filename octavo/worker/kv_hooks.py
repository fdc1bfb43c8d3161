"""Hooks by which extensions keep a part of the KV cache in a file: the plan of its memory, and the
counters of what was moved.

Called when an engine starts, and not in its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from octavo.config.engine_config import EngineConfig
from octavo.executor.kv import KvCache, KvLayout
from octavo.utils.extensions import get_first, get_hooks
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


def kv_planner(config: EngineConfig) -> KvPlanner | None:
    """Returns what plans a KV cache of which a part is in a file; None if all is in memory."""
    return get_first(hooks.planner(config) for hooks in get_hooks("kv", KvHooks))


def kv_counters(kv: KvCache, layouts: Sequence[KvLayout]) -> Counters | None:
    """Returns what counts the moves between memory and a file; None if there are none."""
    return get_first(hooks.counters(kv, layouts) for hooks in get_hooks("kv", KvHooks))

"""How much of the KV memory that a benchmark reserved it used, out of the engine's own counters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.config.sizes import format_bytes

if TYPE_CHECKING:
    from octavo.engine.stats import EngineStats


@dataclass(frozen=True, slots=True)
class KvUse:
    """Means over steps. Whole contexts: what it would be if each request that runs had one range of
    the longest context.
    """

    layout: str
    used_bytes: float
    reserved_bytes: float
    whole_contexts_bytes: float
    utilisation: float
    utilisation_of_whole_contexts: float

    @staticmethod
    def between(layout: str, before: EngineStats, after: EngineStats) -> KvUse:
        num_steps, kv = after.num_steps - before.num_steps, after.kv_sums - before.kv_sums
        used, reserved, whole = (
            kv.used / num_steps,
            kv.reserved / num_steps,
            kv.whole_contexts / num_steps,
        )
        return KvUse(layout, used, reserved, whole, kv.utilisation, used / whole)

    def lines(self) -> Iterator[tuple[float, str]]:
        """Each a share, and of what."""
        yield (
            self.utilisation,
            (
                f"{format_bytes(self.used_bytes)} of {format_bytes(self.reserved_bytes)}"
                f" ({self.layout})"
            ),
        )
        whole = format_bytes(self.whole_contexts_bytes)
        yield (
            self.utilisation_of_whole_contexts,
            f"of {whole}, were the longest context reserved for each request",
        )

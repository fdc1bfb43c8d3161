"""Utilisation of KV memory during a benchmark, from the engine's counters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.config.sizes import format_bytes

if TYPE_CHECKING:
    from octavo.engine.protocol.stats import EngineStats


@dataclass(frozen=True, slots=True)
class KvUse:
    """KV memory in use, averaged over steps."""

    layout: str
    used_bytes: float
    reserved_bytes: float
    whole_contexts_bytes: float
    """Bytes that would be reserved if each running request reserved its longest context."""
    utilisation: float
    """Fraction of the reserved bytes in use."""
    utilisation_of_whole_contexts: float

    @staticmethod
    def between(layout: str, before: EngineStats, after: EngineStats) -> KvUse:
        num_steps = after.num_steps - before.num_steps
        kv = after.kv_sums - before.kv_sums
        return KvUse(
            layout,
            used_bytes=kv.used / num_steps,
            reserved_bytes=kv.reserved / num_steps,
            whole_contexts_bytes=kv.whole_contexts / num_steps,
            utilisation=kv.utilisation,
            utilisation_of_whole_contexts=kv.used / kv.whole_contexts,
        )

    def lines(self) -> Iterator[tuple[float, str]]:
        """Yields each fraction and a description of it."""
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
            f"of {whole} if the maximum context was reserved per request",
        )

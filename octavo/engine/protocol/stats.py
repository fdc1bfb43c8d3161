"""Counters of the core, returned as a snapshot with each step.

Contains no history and no clock; readers compute rates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.engine.protocol.kv_messages import ConnectorStats
from octavo.engine.protocol.step import WeightArrivals


class KvBytes(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of K and V on the device, for the running requests."""

    used: float = 0.0
    """Bytes filled by computed tokens."""
    reserved: float = 0.0
    whole_contexts: float = 0.0
    """Bytes that would be needed to reserve the maximum context length for each request."""

    def __add__(self, other: KvBytes) -> KvBytes:
        return KvBytes(
            self.used + other.used,
            self.reserved + other.reserved,
            self.whole_contexts + other.whole_contexts,
        )

    def __sub__(self, other: KvBytes) -> KvBytes:
        return KvBytes(
            self.used - other.used,
            self.reserved - other.reserved,
            self.whole_contexts - other.whole_contexts,
        )

    @property
    def utilisation(self) -> float:
        """Used bytes as a fraction of the reserved ones, 0 to 1."""
        return self.used / self.reserved if self.reserved else 0.0


STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Inclusive upper bounds of the buckets of `StepTokens`; same as vLLM's."""


class StepTokens(msgspec.Struct, array_like=True):
    """Histogram of the number of tokens per step."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_TOKEN_BOUNDS) + 1))
    """Number of steps in each bucket; the last bucket has no upper bound."""
    total: int = 0

    def __add__(self, other: StepTokens) -> StepTokens:
        counts = [one + more for one, more in zip(self.counts, other.counts, strict=True)]
        return StepTokens(counts, self.total + other.total)


class GroupBlocks(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of one cache group on the device."""

    window: int | None
    """Window in tokens; None if every token attends to all earlier ones."""
    num_blocks: int
    num_held: int
    """Blocks held by requests."""
    num_shared: int
    """Blocks held by more than one request."""
    num_references: int
    """References of requests to blocks: the number of blocks that would be needed without
    sharing.
    """
    num_named: int
    """Blocks in the prefix cache, whether held by requests or not."""


LATE_COMPILATIONS = "kernel_compilations"
"""Name of the counter of kernels compiled during steps."""


class EngineStats(msgspec.Struct, array_like=True):
    """Current gauges, then counts since the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    num_blocks: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of requests that have started to generate, including cached tokens."""
    generation_tokens: int = 0
    busy_s: float = 0.0
    """Seconds for which the device was busy."""
    num_swapped: int = 0
    """Requests whose blocks are currently in host memory."""
    num_swaps: int = 0
    """Number of preemptions by swapping to host memory."""
    num_host_blocks: int = 0
    """Blocks of host memory in use, of all groups."""
    num_waiting_tokens: int = 0
    num_added: int = 0
    """Requests that were added since the start; `num_added_tokens` counts their prompt tokens."""
    num_added_tokens: int = 0
    num_restarts: int = 0
    """Number of engine processes that were replaced because they hung or died."""

    kv: KvBytes = KvBytes()
    """Bytes in the last step that computed tokens."""
    kv_sums: KvBytes = KvBytes()
    """Sums over all steps that computed tokens; ratios of these sums are the mean rates."""
    groups: list[GroupBlocks] = []
    external_query_tokens: int = 0
    """Prompt tokens that were not found in the prefix cache on the device and looked up outside of
    it.
    """
    external_hit_tokens: int = 0
    left_out_blocks: int = 0
    """Stored blocks that prompts skipped because their ratings are low."""
    connector: ConnectorStats = msgspec.field(default_factory=ConnectorStats)
    """Counters of the KV connector."""
    num_drafts: int = 0
    """Number of drafts that were verified."""
    num_draft_tokens: int = 0
    """Number of draft tokens that were verified."""
    num_accepted_tokens: int = 0
    """Number of accepted draft tokens."""

    weights: WeightArrivals = WeightArrivals()
    """Weights read from a file while steps were computed."""
    counters: dict[str, float] = {}
    """Counters of backends and extensions, by name."""

    step_tokens: StepTokens = msgspec.field(default_factory=StepTokens)

    engines: list[EngineStats] = []
    """Stats of each engine if there are several (these are then their sums); [] for one engine."""

    @property
    def kv_usage(self) -> float:
        """Fraction of the KV blocks that requests hold, 0 to 1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0

    def after(self, earlier: EngineStats) -> EngineStats:
        """Returns these stats plus the counts of `earlier`, the stats of a core that this one
        replaced.
        """
        return msgspec.structs.replace(
            self, **{name: _sum(getattr(self, name), getattr(earlier, name)) for name in COUNTS}
        )


COUNTS = (
    *(
        "num_steps",
        "num_preemptions",
        "prefix_query_tokens",
        "prefix_hit_tokens",
        "prompt_tokens",
        "generation_tokens",
        "busy_s",
    ),
    *(
        "num_swaps",
        "num_added",
        "num_added_tokens",
        "num_restarts",
        "kv_sums",
        "external_query_tokens",
        "external_hit_tokens",
        "left_out_blocks",
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "weights",
        "counters",
        "step_tokens",
    ),
)
"""Names of the fields that only grow; all others are gauges."""


def total_stats(engines: Sequence[EngineStats]) -> EngineStats:
    """Returns the sums over several engines, with each engine's stats in `engines`."""
    total = functools.reduce(_sum, engines)
    return msgspec.structs.replace(total, engines=list(engines))


def _sum(one: Any, other: Any) -> Any:
    """Adds two values of a field: numbers and KvBytes directly, structs by field, lists by
    entry.
    """
    if isinstance(one, GroupBlocks):
        added = [a + b for a, b in zip(_values(one)[1:], _values(other)[1:], strict=True)]
        return GroupBlocks(one.window, *added)
    if isinstance(one, dict):
        return {name: one.get(name, 0) + other.get(name, 0) for name in one | other}
    if isinstance(one, list):
        longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
        return [*map(_sum, longer, shorter), *longer[len(shorter) :]]
    if isinstance(one, msgspec.Struct) and not isinstance(one, KvBytes):
        return type(one)(*map(_sum, _values(one), _values(other)))
    return one + other


def _values(struct: msgspec.Struct) -> list[Any]:
    return [getattr(struct, name) for name in struct.__struct_fields__]

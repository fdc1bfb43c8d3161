"""Counters of the core, as a snapshot that returns with each step. Owns no history and no clock:
rates are the reader's business.
"""

from __future__ import annotations

import msgspec

from octavo.step import ConnectorStats


class KvBytes(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of K and V on the device, of the requests that run."""

    used: float = 0.0
    """By computed tokens."""
    reserved: float = 0.0
    whole_contexts: float = 0.0
    """What reserving the longest context for each of them would take."""

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

    def times(self, count: int) -> KvBytes:
        return KvBytes(self.used * count, self.reserved * count, self.whole_contexts * count)

    @property
    def utilisation(self) -> float:
        """Used of reserved, 0 to 1."""
        return self.used / self.reserved if self.reserved else 0.0


class GroupBlocks(msgspec.Struct, frozen=True, array_like=True):
    """One cache group's blocks on the device."""

    window: int | None
    """In tokens; None: all before a token."""
    num_blocks: int
    num_held: int
    """By requests."""
    num_shared: int
    """Of these, by more than one."""
    num_references: int
    """Of requests to blocks: what they would hold if nothing were shared."""
    num_named: int
    """Held or not, those that can be found again."""


class EngineStats(msgspec.Struct, array_like=True):
    """Gauges of this moment, then counts since the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    num_blocks: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of requests that began to generate, cached ones included."""
    generation_tokens: int = 0
    busy_s: float = 0.0
    """Time the device spent computing."""
    num_swapped: int = 0
    """Requests whose blocks are in host memory now."""
    num_swaps: int = 0
    """Of the preemptions, those to host memory."""
    num_host_blocks: int = 0
    """Of all groups, in use now."""
    num_waiting_tokens: int = 0
    num_added: int = 0
    """Requests that ever came, and their tokens: what a front has sent beyond these is still on its
    way.
    """
    num_added_tokens: int = 0
    num_restarts: int = 0
    """Cores that were replaced because they hung or died."""

    kv: KvBytes = KvBytes()
    """In the last step that computed something."""
    kv_sums: KvBytes = KvBytes()
    """Of all such steps: their means, once divided by each other."""
    groups: list[GroupBlocks] = []
    external_query_tokens: int = 0
    """Of the tokens looked up in the prefix cache, those not found on the device; and of these,
    those found off it.
    """
    external_hit_tokens: int = 0
    connector: ConnectorStats = msgspec.field(default_factory=ConnectorStats)
    """The prefix cache off the device."""

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that requests hold, 0 to 1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0

    def after(self, earlier: EngineStats) -> EngineStats:
        """With what a core had counted that this one has replaced."""
        return msgspec.structs.replace(
            self, **{name: getattr(self, name) + getattr(earlier, name) for name in COUNTS}
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
    ),
)
"""What grows from the start on; all else is of the moment."""

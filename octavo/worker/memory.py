"""The KV budget: how many blocks each cache group gets.

Knows a block's bytes, how long blocks live, and what memory is free; allocates nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.backends.base import DeviceMemory
from octavo.backends.kv import BLOCK_SIZE, KvLayout
from octavo.config.engine_config import EngineConfig
from octavo.config.sizes import format_bytes
from octavo.errors import ConfigError
from octavo.group_life import (
    GROWING,
    AnyLife,
    FixedLife,
    KvDemand,
    StateLife,
    StepLife,
    blocks_for,
    life_of_window,
)
from octavo.program.program import CacheGroup

SAFE_SHARE = 0.5
"""Share of the free memory that the KV cache gets; the rest is for the step's buffers, the page
cache of mapped weights, and the machine's other processes.
"""

UNKNOWN_BYTES = 2 << 30
"""Bytes taken as free where the system does not say what is."""


@dataclass(frozen=True, slots=True)
class GroupSize:
    """A cache group as the budget sees it."""

    block_bytes: int
    life: AnyLife = GROWING

    def least_blocks(self, demand: KvDemand) -> int:
        """Counts the blocks without which the longest request cannot run."""
        return self.life.least_blocks(demand, BLOCK_SIZE)

    def most_blocks(self, demand: KvDemand) -> int:
        """Counts the blocks beyond which no request would ever wait for this group."""
        return self.life.most_blocks(demand, BLOCK_SIZE)


def life_of(group: CacheGroup, *, keeps_kv: bool, max_model_len: int) -> AnyLife:
    """Returns how long the blocks of a Program's cache group live.

    Where KV is not kept from step to step (`keeps_kv`), a step writes whole contexts again, and no
    window releases anything.
    """
    if group.one_step:
        return StepLife()
    if group.kind == "cross":
        return FixedLife(max_model_len)
    if group.kind == "state":
        return StateLife()
    return life_of_window(group.window if keeps_kv else None)


def group_sizes(config: EngineConfig, layouts: Sequence[KvLayout]) -> list[GroupSize]:
    """Returns the sizes of a model's cache groups under the options."""
    max_model_len = demand_of(config).max_model_len
    return [
        GroupSize(
            layout.block_bytes,
            life_of(layout.group, keeps_kv=config.cache.kv_cache, max_model_len=max_model_len),
        )
        for layout in layouts
    ]


def demand_of(config: EngineConfig) -> KvDemand:
    """Returns the most that an engine with these options asks of its KV cache."""
    assert config.model.max_model_len is not None, "derive() has set it"
    options = config.scheduler
    return KvDemand(
        config.model.max_model_len, options.max_num_seqs, options.max_num_batched_tokens
    )


@dataclass(frozen=True, slots=True)
class KvBudget:
    """The plan of the KV cache: how many blocks each group gets."""

    num_blocks: tuple[int, ...]
    """Blocks of each of `groups`."""
    groups: tuple[GroupSize, ...]
    demand: KvDemand

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests together, in the groups that keep every token."""
        bounding = [
            count
            for count, group in zip(self.num_blocks, self.groups, strict=True)
            if group.life.keeps_every_token
        ]
        return min(bounding or self.num_blocks) * BLOCK_SIZE

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(
            count * group.block_bytes
            for count, group in zip(self.num_blocks, self.groups, strict=True)
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in every group."""
        return sum(group.block_bytes for group in self.groups)

    def describe(self) -> str:
        """Returns the line printed at the start."""
        requests = min(
            count // group.least_blocks(self.demand)
            for count, group in zip(self.num_blocks, self.groups, strict=True)
        )
        size = f"KV cache {format_bytes(self.num_bytes)}: {self.num_tokens:,} tokens"
        return (
            f"{size}, {requests:,} request{'' if requests == 1 else 's'} of"
            f" {self.demand.max_model_len:,}"
        )


def plan_kv(
    groups: Sequence[GroupSize],
    demand: KvDemand,
    *,
    wanted_bytes: int | None,
    available_bytes: int | None,
    share: float = SAFE_SHARE,
) -> KvBudget:
    """Plans blocks for `wanted_bytes`; by default for `max_num_seqs` whole contexts, within a share
    of what is free.

    All groups get the same number, except those that never need as many. ConfigError where not even
    one request of `max_model_len` tokens fits.
    """
    caps = [group.most_blocks(demand) for group in groups]
    if wanted_bytes is not None:
        given = wanted_bytes
        num_blocks = _most_within(given, groups, caps)
        wanted = num_blocks
    else:
        given = UNKNOWN_BYTES if available_bytes is None else int(available_bytes * share)
        num_blocks = _most_within(given, groups, caps)
        wanted = min(num_blocks, _blocks_for(demand.max_model_len) * demand.max_num_seqs)
    least = [group.least_blocks(demand) for group in groups]
    if any(wanted < count for count in least):
        raise _too_little(
            groups, demand, given, num_blocks, share=None if wanted_bytes is not None else share
        )
    return KvBudget(tuple(min(wanted, cap) for cap in caps), tuple(groups), demand)


def _too_little(
    groups: Sequence[GroupSize],
    demand: KvDemand,
    given_bytes: int,
    num_blocks: int,
    *,
    share: float | None,
) -> ConfigError:
    """Returns the error for `num_blocks` blocks in `given_bytes`, fewer than one request needs;
    `share` of the free memory they are, None where the options name the bytes.
    """
    length = f"set max_model_len to at most {num_blocks * BLOCK_SIZE}"
    if share is None:
        name = "kv_cache_memory_bytes"
        hint = f"raise kv_cache_memory_bytes, or {length}"
    else:
        name = f"too little memory: {share:.0%} of what is free"
        hint = f"free memory, {length}, or give kv_cache_memory_bytes yourself"
    least_bytes = sum(group.block_bytes * group.least_blocks(demand) for group in groups)
    needed = (
        f"needed are {format_bytes(least_bytes)} for one request of {demand.max_model_len:,} tokens"
    )
    return ConfigError(
        f"{name}: got {format_bytes(given_bytes)}, {needed}", hint=hint if num_blocks else None
    )


def memory_table(memory: DeviceMemory, kv_bytes: int) -> str:
    """Describes a device's memory once the KV cache lies in it, a line for each part."""
    free = memory.total_bytes - sum(memory.parts.values()) - kv_bytes
    rows = {"device": memory.total_bytes, **memory.parts, "KV cache": kv_bytes, "left free": free}
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {format_bytes(size):>10}" for name, size in rows.items())


def _most_within(num_bytes: int, groups: Sequence[GroupSize], caps: Sequence[int]) -> int:
    """Returns the largest number of blocks for each group, up to its cap, that fits."""

    def cost(num_blocks: int) -> int:
        return sum(
            group.block_bytes * min(num_blocks, cap)
            for group, cap in zip(groups, caps, strict=True)
        )

    most = min(max(caps), num_bytes // min(group.block_bytes for group in groups))
    return bisect_right(range(most + 1), num_bytes, key=cost) - 1


def _blocks_for(num_tokens: int) -> int:
    return blocks_for(num_tokens, BLOCK_SIZE)

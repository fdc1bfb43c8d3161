"""The KV budget: how many blocks each cache group gets.

Knows a block's bytes, the groups' windows and what memory is free; allocates nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.backends.base import DeviceMemory
from octavo.backends.kv import BLOCK_SIZE
from octavo.config.sizes import format_bytes
from octavo.errors import ConfigError

SAFE_SHARE = 0.5
"""Of the free memory: the rest is for the step's buffers, the page cache of mapped weights, and the
neighbours.
"""

UNKNOWN_BYTES = 2 << 30
"""Taken where the system does not say what is free."""


NO_CAP = 1 << 48


@dataclass(frozen=True, slots=True)
class GroupSize:
    """A cache group as the budget sees it. With a window, a request keeps the blocks of the last
    `window` tokens only.
    """

    block_bytes: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """The most that the engine will ask of its KV cache."""

    max_model_len: int
    max_num_seqs: int
    max_step_tokens: int

    def least_blocks(self, group: GroupSize) -> int:
        """For one request of the whole context: with a window, its blocks and those of one step, at
        odds with their edges.
        """
        whole = _blocks_for(self.max_model_len)
        return (
            whole
            if group.window is None
            else min(whole, _blocks_for(group.window + self.max_step_tokens) + 1)
        )

    def most_blocks(self, group: GroupSize) -> int:
        """Beyond it no request would wait for this group: each one's window, a step, and one block
        in reserve for each.
        """
        if group.window is None:
            return NO_CAP
        return (
            self.max_num_seqs * (_blocks_for(group.window) + 3)
            + _blocks_for(self.max_step_tokens)
            + 1
        )


@dataclass(frozen=True, slots=True)
class KvBudget:
    """What the KV cache holds: `num_blocks` of each of `groups`."""

    num_blocks: tuple[int, ...]
    groups: tuple[GroupSize, ...]
    load: Load

    @property
    def num_tokens(self) -> int:
        """Of all requests together, as long as they are within the windows."""
        unbounded = [
            count
            for count, group in zip(self.num_blocks, self.groups, strict=True)
            if group.window is None
        ]
        return min(unbounded or self.num_blocks) * BLOCK_SIZE

    @property
    def num_bytes(self) -> int:
        return sum(
            count * group.block_bytes
            for count, group in zip(self.num_blocks, self.groups, strict=True)
        )

    @property
    def block_bytes(self) -> int:
        """One block in every group."""
        return sum(group.block_bytes for group in self.groups)

    def describe(self) -> str:
        """The line printed at the start."""
        requests = min(
            count // self.load.least_blocks(group)
            for count, group in zip(self.num_blocks, self.groups, strict=True)
        )
        size = f"KV cache {format_bytes(self.num_bytes)}: {self.num_tokens:,} tokens"
        return (
            f"{size}, {requests:,} request{'' if requests == 1 else 's'} of"
            f" {self.load.max_model_len:,}"
        )


def plan_kv(
    groups: Sequence[GroupSize],
    load: Load,
    *,
    wanted_bytes: int | None,
    available_bytes: int | None,
    share: float = SAFE_SHARE,
) -> KvBudget:
    """Blocks for `wanted_bytes`; by default for `max_num_seqs` whole contexts, within a share of
    what is free.

    All groups get the same number, but for those whose windows never need so many. ConfigError
    where not even one request of `max_model_len` tokens fits.
    """
    caps = [load.most_blocks(group) for group in groups]
    least = [load.least_blocks(group) for group in groups]
    given = UNKNOWN_BYTES if available_bytes is None else int(available_bytes * share)
    num_blocks = _most_within(given if wanted_bytes is None else wanted_bytes, groups, caps)
    length = f"set max_model_len to at most {num_blocks * BLOCK_SIZE}"
    if wanted_bytes is not None:
        name, given, hint = (
            "kv_cache_memory_bytes",
            wanted_bytes,
            f"raise kv_cache_memory_bytes, or {length}",
        )
    else:
        name, hint = (
            f"too little memory: {share:.0%} of what is free",
            f"free memory, {length}, or give kv_cache_memory_bytes yourself",
        )
        num_blocks = min(num_blocks, _blocks_for(load.max_model_len) * load.max_num_seqs)
    if any(num_blocks < count for count in least):
        least_bytes = sum(
            group.block_bytes * count for group, count in zip(groups, least, strict=True)
        )
        needed = (
            f"needed are {format_bytes(least_bytes)} for one request of {load.max_model_len:,}"
            " tokens"
        )
        raise ConfigError(
            f"{name}: got {format_bytes(given)}, {needed}", hint=hint if num_blocks else None
        )
    return KvBudget(tuple(min(num_blocks, cap) for cap in caps), tuple(groups), load)


def memory_table(memory: DeviceMemory, kv_bytes: int) -> str:
    """A device's memory once the KV cache lies in it, a line for each part."""
    free = memory.total_bytes - sum(memory.parts.values()) - kv_bytes
    rows = {"device": memory.total_bytes, **memory.parts, "KV cache": kv_bytes, "left free": free}
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {format_bytes(size):>10}" for name, size in rows.items())


def _most_within(num_bytes: int, groups: Sequence[GroupSize], caps: Sequence[int]) -> int:
    """The largest number of blocks for each group, up to its cap, that so many bytes hold."""

    def cost(num_blocks: int) -> int:
        return sum(
            group.block_bytes * min(num_blocks, cap)
            for group, cap in zip(groups, caps, strict=True)
        )

    most = min(max(caps), num_bytes // min(group.block_bytes for group in groups))
    return bisect_right(range(most + 1), num_bytes, key=cost) - 1


def _blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)

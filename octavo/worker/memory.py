"""The KV budget: how many blocks each cache group gets.

Computes from the size and lifetime of blocks and the free memory; allocates nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from octavo.api.errors import ConfigError, InsufficientMemory
from octavo.config.engine_config import EngineConfig
from octavo.config.sizes import format_bytes
from octavo.engine.protocol.kv_cache_spec import (
    GROWING,
    AnyKVCacheSpec,
    CrossAttentionSpec,
    EncoderSpec,
    KvDemand,
    SingleStepSpec,
    StateSpec,
    blocks_for,
    get_window_spec,
)
from octavo.executor.base import DeviceMemory
from octavo.executor.kv import BLOCK_SIZE, KvLayout
from octavo.program.program import CacheGroup

SAFE_SHARE = 0.5
"""Fraction of the free memory for the KV cache; the rest is for the step's buffers, the page cache
of mapped weights, and other processes.
"""

STATE_SHARE = 0.5
"""Fraction of the KV cache's bytes for recurrent states if not all of them fit."""

CHECKPOINT_TOKENS = 256
"""Number of tokens between two hashed states. Each step of a prompt ends at one of them, and a
request with a prefix hit recomputes fewer tokens than this.
"""

UNKNOWN_BYTES = 2 << 30
"""Free memory to assume if the system does not report it, in bytes."""


@dataclass(frozen=True, slots=True)
class GroupSize:
    block_bytes: int
    """Bytes of a block, including parts in a file."""
    spec: AnyKVCacheSpec = GROWING
    record_bytes: int = 0
    """Bytes of a block in one of the layers that may be in a file."""
    num_in_file: int = 0
    """Number of layers that may be in a file."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of a block, in memory or in a file."""
        return self.block_bytes + self.num_in_file * self.record_bytes

    def least_blocks(self, demand: KvDemand) -> int:
        """Returns the number of blocks that the longest request needs."""
        return self.spec.least_blocks(demand, BLOCK_SIZE)

    def most_blocks(self, demand: KvDemand) -> int:
        """Returns the number of blocks that suffices for all requests to run without waiting for
        blocks.
        """
        return self.spec.most_blocks(demand, BLOCK_SIZE)

    def most_running(self, demand: KvDemand) -> int:
        """Returns the number of blocks of `most_blocks` without the blocks for checkpoints."""
        return demand.max_num_seqs if self.spec.is_rewritten else self.most_blocks(demand)


def get_kv_cache_spec(
    group: CacheGroup, *, keeps_kv: bool, max_encoder_len: int = 0, finds_prefixes: bool = True
) -> AnyKVCacheSpec:
    """Returns the spec of a Program's cache group.

    Without `keeps_kv`, each step rewrites complete contexts, so no window releases blocks. Without
    prefix caching, no state is kept as a checkpoint.
    """
    if group.one_step:
        return EncoderSpec(max_encoder_len) if group.of_input else SingleStepSpec()
    if group.kind == "cross":
        return CrossAttentionSpec(max_encoder_len)
    if group.kind == "state":
        return StateSpec(CHECKPOINT_TOKENS if keeps_kv and finds_prefixes else 0)
    return get_window_spec(group.window if keeps_kv else None)


def group_sizes(config: EngineConfig, layouts: Sequence[KvLayout]) -> list[GroupSize]:
    """Returns the sizes of a model's cache groups with these options."""
    max_encoder_len = get_kv_demand(config).max_encoder_len
    return [
        GroupSize(
            layout.resident_bytes,
            get_kv_cache_spec(
                layout.group,
                keeps_kv=config.cache.kv_cache,
                max_encoder_len=max_encoder_len,
                finds_prefixes=config.cache.enable_prefix_caching,
            ),
            layout.record_bytes if layout.in_file else 0,
            len(layout.in_file),
        )
        for layout in layouts
    ]


def get_kv_demand(config: EngineConfig) -> KvDemand:
    """Returns the maximum demand on the KV cache with these options."""
    assert config.model.max_model_len is not None, "derive() has set it"
    options = config.scheduler
    return KvDemand(
        config.model.max_model_len,
        options.max_num_seqs,
        options.max_num_batched_tokens,
        config.model.max_encoder_len or 0,
    )


@dataclass(frozen=True, slots=True)
class KvBudget:
    """Plan of the KV cache: how many blocks each group gets."""

    num_blocks: tuple[int, ...]
    """Number of blocks of each of `groups`."""
    groups: tuple[GroupSize, ...]
    demand: KvDemand
    num_kept: int = 0
    """Number of blocks kept in memory for each layer that may be in a file."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all requests, in the groups that keep every token."""
        bounding = [
            count
            for count, group in zip(self.num_blocks, self.groups, strict=True)
            if group.spec.keeps_every_token
        ]
        return min(bounding or self.num_blocks) * BLOCK_SIZE

    @property
    def bounds_tokens(self) -> bool:
        """Whether blocks limit the number of tokens, not only the number of requests."""
        specs = [group.spec for group in self.groups]
        return any(spec.keeps_every_token for spec in specs) or all(spec.grows for spec in specs)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks in memory."""
        return sum(
            count * group.block_bytes + _kept_bytes(group, count, self.num_kept)
            for count, group in zip(self.num_blocks, self.groups, strict=True)
        )

    @property
    def file_bytes(self) -> int:
        """Bytes of all blocks of the layers that may be in a file."""
        return sum(
            count * group.record_bytes * group.num_in_file
            for count, group in zip(self.num_blocks, self.groups, strict=True)
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all groups."""
        return sum(group.block_bytes for group in self.groups)

    def describe(self) -> str:
        """Returns the startup message."""
        requests = min(
            count // group.least_blocks(self.demand)
            for count, group in zip(self.num_blocks, self.groups, strict=True)
        )
        size = f"KV cache {format_bytes(self.num_bytes)}"
        size += f" and {format_bytes(self.file_bytes)} in a file:" if self.file_bytes else ":"
        if self.bounds_tokens:
            size += f" {self.num_tokens:,} tokens,"
        return (
            f"{size} {requests:,} request{'' if requests == 1 else 's'} of"
            f" {self.demand.max_model_len:,}"
        )


KvPlanner: TypeAlias = Callable[[Sequence[GroupSize], KvDemand], KvBudget]


def plan_kv(
    groups: Sequence[GroupSize],
    demand: KvDemand,
    *,
    wanted_bytes: int | None,
    available_bytes: int | None,
    share: float = SAFE_SHARE,
    planner: KvPlanner | None = None,
) -> KvBudget:
    """Plans blocks for `wanted_bytes`; None: for `max_num_seqs` complete contexts, within the
    fraction `share` of the free memory. If blocks may be in a file, `planner` makes the plan.

    All groups get the same number of blocks, except groups that never need as many, and states.
    States come first: one for each request, within a fraction of the bytes, then the same number of
    checkpoints as the other groups' tokens have. Raises ConfigError if not even one request of
    `max_model_len` tokens fits.
    """
    if planner is not None:
        return planner(groups, demand)
    if wanted_bytes is not None:
        kv_bytes = wanted_bytes
    else:
        kv_bytes = UNKNOWN_BYTES if available_bytes is None else int(available_bytes * share)
    caps = most_blocks(kv_bytes, groups, demand)
    min_blocks = max(group.least_blocks(demand) for group in groups)
    keeps = True
    num_blocks = _most_within(kv_bytes, groups, caps, keeps_checkpoints=keeps)
    if num_blocks < min_blocks:
        keeps = False
        num_blocks = _most_within(kv_bytes, groups, caps, keeps_checkpoints=keeps)
    wanted_blocks = num_blocks
    if wanted_bytes is None:
        one_each = blocks_for(demand.max_model_len, BLOCK_SIZE) * demand.max_num_seqs
        wanted_blocks = min(num_blocks, max(min_blocks, one_each))
    if wanted_blocks < min_blocks:
        raise _too_little(
            groups, demand, kv_bytes, num_blocks, share=None if wanted_bytes is not None else share
        )
    counts = block_counts(wanted_blocks, groups, caps, keeps_checkpoints=keeps)
    return KvBudget(tuple(counts), tuple(groups), demand)


def _kept_bytes(group: GroupSize, num_blocks: int, num_kept: int) -> int:
    """Returns the bytes in memory of the layers that may be in a file: all blocks of one layer, and
    the kept blocks of each layer.
    """
    return (num_blocks + num_kept * group.num_in_file) * group.record_bytes


def most_blocks(num_bytes: int, groups: Sequence[GroupSize], demand: KvDemand) -> list[int]:
    """Returns the maximum useful number of blocks of each group. For states: the number without
    checkpoints, limited by their fraction of the bytes, at least one.
    """
    states = sum(group.block_bytes for group in groups if isinstance(group.spec, StateSpec))
    fit = max(1, int(num_bytes * STATE_SHARE) // states) if states else 0
    return [
        min(group.most_running(demand), fit)
        if group.spec.is_rewritten
        else group.most_blocks(demand)
        for group in groups
    ]


def _too_little(
    groups: Sequence[GroupSize],
    demand: KvDemand,
    given_bytes: int,
    num_blocks: int,
    *,
    share: float | None,
) -> ConfigError:
    """Returns the error if `num_blocks` blocks in `given_bytes` are too few for one request.
    `share`: fraction of the free memory; None if the bytes were set by options.
    """
    length = f"set max_model_len to at most {num_blocks * BLOCK_SIZE}"
    if share is None:
        name = "kv_cache_memory_bytes"
        hint = f"raise kv_cache_memory_bytes, or {length}"
    else:
        name = f"not enough memory: {share:.0%} of the free memory"
        hint = f"free memory, {length}, or set kv_cache_memory_bytes"
    least_bytes = sum(group.block_bytes * group.least_blocks(demand) for group in groups)
    needed = (
        f"expected at least {format_bytes(least_bytes)} for one request of"
        f" {demand.max_model_len:,} tokens"
    )
    kind = ConfigError if share is None else InsufficientMemory
    return kind(
        f"{name}: got {format_bytes(given_bytes)}, {needed}", hint=hint if num_blocks else None
    )


def memory_table(memory: DeviceMemory, kv_bytes: int) -> str:
    """Describes a device's memory with the KV cache, one line per part."""
    free = memory.total_bytes - sum(memory.parts.values()) - kv_bytes
    rows = {"device": memory.total_bytes, **memory.parts, "KV cache": kv_bytes, "left free": free}
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {format_bytes(size):>10}" for name, size in rows.items())


def _most_within(
    num_bytes: int, groups: Sequence[GroupSize], caps: Sequence[int], *, keeps_checkpoints: bool
) -> int:
    """Returns the largest number of blocks per group, up to each group's cap, that fits."""

    def cost(num_blocks: int) -> int:
        counts = block_counts(num_blocks, groups, caps, keeps_checkpoints=keeps_checkpoints)
        return sum(group.block_bytes * count for group, count in zip(groups, counts, strict=True))

    max_blocks = min(max(caps), num_bytes // min(group.block_bytes for group in groups))
    return bisect_right(range(max_blocks + 1), num_bytes, key=cost) - 1


def block_counts(
    num_blocks: int, groups: Sequence[GroupSize], caps: Sequence[int], *, keeps_checkpoints: bool
) -> list[int]:
    """Returns the number of blocks of each group, up to their caps, if growing groups get
    `num_blocks`.
    """
    num_tokens = num_blocks * BLOCK_SIZE if keeps_checkpoints else 0
    return [
        cap + group.spec.num_checkpoints(num_tokens)
        if isinstance(group.spec, StateSpec) and num_blocks
        else min(num_blocks, cap)
        for group, cap in zip(groups, caps, strict=True)
    ]

"""What an engine takes of a machine's memory, and how many requests then fit, before anything is
loaded.

Knows sizes only: bytes of weights, of a step's buffers, of KV blocks. `memory.py` decides what the
KV cache really gets.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.backends.base import Footprint
from octavo.backends.kv import BLOCK_SIZE
from octavo.config.engine_config import EngineConfig
from octavo.config.sizes import format_bytes
from octavo.errors import ConfigError
from octavo.program.program import Program
from octavo.worker.memory import SAFE_SHARE, GroupSize, KvBudget, Load, plan_kv

PROCESS_BYTES = 192 << 20
"""Of the two processes besides: 75 MiB with a vocabulary of 300 tokens, 170 MiB with one of 260,000
(November 2026).
"""

SPARE = 0.1
"""Share of what is left that is better not given to the KV cache."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """An engine in `memory_bytes`, all that it may take."""

    memory_bytes: int
    weight_bytes: int
    step_bytes: int
    groups: tuple[GroupSize, ...]
    load: Load
    wanted_kv_bytes: int | None = None
    share: float = SAFE_SHARE
    """Of what is left, given to the KV cache at most where nothing was asked for."""

    @property
    def fixed_bytes(self) -> int:
        """Whatever the KV cache has."""
        return self.weight_bytes + self.step_bytes + PROCESS_BYTES

    @property
    def left_bytes(self) -> int:
        """For the KV cache; below 0 where not even the weights fit."""
        return self.memory_bytes - self.fixed_bytes

    @property
    def least_kv_bytes(self) -> int:
        """What was asked for, else one request of the longest context."""
        least = sum(group.block_bytes * self.load.least_blocks(group) for group in self.groups)
        return least if self.wanted_kv_bytes is None else self.wanted_kv_bytes

    @property
    def shortfall_bytes(self) -> int:
        """How much memory is missing; 0 where it fits."""
        return max(0, self.least_kv_bytes - self.left_bytes)

    @property
    def kv_bytes(self) -> int:
        """What the KV cache may have: as asked for, else what is left but for some to spare."""
        return (
            max(0, int(self.left_bytes * (1 - SPARE)))
            if self.wanted_kv_bytes is None
            else self.wanted_kv_bytes
        )

    @property
    def kv_token_bytes(self) -> float:
        """In all groups, within their windows."""
        return sum(group.block_bytes for group in self.groups) / BLOCK_SIZE

    def request_bytes(self, num_tokens: int) -> int:
        """KV of one request of so many tokens, prompt and output."""
        return sum(group.block_bytes * _blocks_of(group, num_tokens) for group in self.groups)

    def max_requests(self, num_tokens: int) -> int:
        """Of so many tokens each, at once."""
        return self.kv_bytes // self.request_bytes(num_tokens)

    def max_context(self) -> int:
        """The longest that one request may have, at most what the load says; 0 where not one block
        fits.
        """
        low, high = 0, self.load.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self.request_bytes(middle) <= self.kv_bytes else (low, middle - 1)
            )
        return low

    def check(self, name: str) -> None:
        """ConfigError where the model cannot fit, with what is missing."""
        if self.shortfall_bytes:
            kv = f"KV cache {format_bytes(self.least_kv_bytes)}"
            if self.wanted_kv_bytes is None:
                kv += f" for one request of {self.load.max_model_len:,} tokens"
            parts = (
                f"weights {format_bytes(self.weight_bytes)}, a step"
                f" {format_bytes(self.step_bytes)}, {kv}"
            )
            needed = format_bytes(self.fixed_bytes + self.least_kv_bytes)
            raise ConfigError(
                f"{name} does not fit: needed are {needed} ({parts}), free are"
                f" {format_bytes(self.memory_bytes)}; {format_bytes(self.shortfall_bytes)} are"
                " missing",
                hint="`octavo plan` with the same options says what fits",
            )
        self.budget()

    def budget(self) -> KvBudget:
        """As the engine will make it."""
        return plan_kv(
            self.groups,
            self.load,
            wanted_bytes=self.wanted_kv_bytes,
            available_bytes=self.left_bytes,
            share=self.share,
        )


def capacity_of(
    config: EngineConfig,
    program: Program,
    footprint: Footprint,
    memory_bytes: int,
    *,
    share: float = SAFE_SHARE,
) -> Capacity:
    assert config.model.max_model_len is not None, "derive() has set it"
    options, cache = config.scheduler, config.cache
    return Capacity(
        memory_bytes=memory_bytes,
        weight_bytes=sum(footprint.weight_bytes.values()),
        step_bytes=footprint.step_bytes,
        groups=tuple(
            GroupSize(layout.block_bytes, group.window if cache.kv_cache else None)
            for group, layout in zip(program.groups, footprint.kv_layouts, strict=True)
        ),
        load=Load(config.model.max_model_len, options.max_num_seqs, options.max_num_batched_tokens),
        wanted_kv_bytes=cache.kv_cache_memory_bytes,
        share=share,
    )


def _blocks_of(group: GroupSize, num_tokens: int) -> int:
    seen = num_tokens if group.window is None else min(num_tokens, group.window + BLOCK_SIZE)
    return -(-seen // BLOCK_SIZE)

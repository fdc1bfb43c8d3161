"""The KV budget: how many blocks the KV cache gets.

Knows a block's bytes and what memory is free; allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.backends.base import BLOCK_SIZE
from octavo.config.sizes import format_bytes
from octavo.errors import ConfigError

SAFE_SHARE = 0.5
"""Of the free memory: the rest is for the step's buffers, the page cache of mapped weights, and the neighbours."""

UNKNOWN_BYTES = 2 << 30
"""Taken where the system does not say what is free."""


@dataclass(frozen=True, slots=True)
class KvBudget:
    """What the KV cache holds. `block_bytes` is one block in every cache group."""

    num_blocks: int
    block_bytes: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * BLOCK_SIZE

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def describe(self) -> str:
        """The line printed at the start."""
        requests = self.num_blocks // _blocks_for(self.max_model_len)
        size = f"KV cache {format_bytes(self.num_bytes)}: {self.num_tokens:,} tokens"
        return f"{size}, {requests:,} request{'' if requests == 1 else 's'} of {self.max_model_len:,}"


def plan_kv(*, block_bytes: int, max_model_len: int, max_num_seqs: int, wanted_bytes: int | None, available_bytes: int | None) -> KvBudget:
    """Blocks for `wanted_bytes`; by default for `max_num_seqs` whole contexts, within a safe share of what is free.

    ConfigError where not even one request of `max_model_len` tokens fits.
    """
    least = _blocks_for(max_model_len)
    if wanted_bytes is not None:
        num_blocks = wanted_bytes // block_bytes
        hint = f"raise kv_cache_memory_bytes, or set max_model_len to at most {num_blocks * BLOCK_SIZE}"
        name, got = "kv_cache_memory_bytes", wanted_bytes
    else:
        share = UNKNOWN_BYTES if available_bytes is None else int(available_bytes * SAFE_SHARE)
        num_blocks = min(least * max_num_seqs, share // block_bytes)
        hint = f"free memory, set max_model_len to at most {num_blocks * BLOCK_SIZE}, or give kv_cache_memory_bytes yourself"
        name, got = f"too little memory: {SAFE_SHARE:.0%} of what is free", share
    if num_blocks < least:
        needed = f"needed are {format_bytes(least * block_bytes)} for one request of {max_model_len:,} tokens"
        raise ConfigError(f"{name}: got {format_bytes(got)}, {needed}", hint=hint if num_blocks else None)
    return KvBudget(num_blocks, block_bytes, max_model_len)


def _blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)

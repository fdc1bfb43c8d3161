"""KV memory as a backend offers it: bytes of a block, and whole blocks copied, read and written.

Only kernels look inside a block; the block size and the split of the attention stand here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from octavo.program.program import CacheGroup

BLOCK_SIZE = 16
"""Tokens in a KV block, everywhere: native kernels keep one block's keys in one vector."""


SPLIT_KEYS = 256
"""Keys in a split of the attention's definition (see ops.Attention)."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How a prepared Program keeps one cache group: the type of its numbers, and a block's bytes.

    Programs that share a group must agree on its layout.
    """

    group: CacheGroup
    dtype: str
    """Name of the stored type: fp32, bf16, int8 ..."""
    pieces: tuple[int, ...]
    """Bytes of each piece of a block in one layer; the same piece of the next block lies behind
    it."""

    @property
    def layer_bytes(self) -> int:
        """Bytes of a block in one layer."""
        return sum(self.pieces)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return self.layer_bytes * self.group.num_layers


class KvCache(Protocol):
    """KV bytes of one backend, made by `allocate`; opaque but for whole blocks."""

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copies one block of a group in every layer."""
        ...

    def read_block(self, group: int, block_id: int, into: NDArray[np.uint8]) -> None:
        """One block's bytes in every layer, `[KvLayout.block_bytes]`."""
        ...

    def write_block(self, group: int, block_id: int, data: NDArray[np.uint8]) -> None:
        """What `read_block` gave, into any block of the same group."""
        ...


class BlockMover(Protocol):
    """Copies blocks of a group in batches, perhaps while steps compute; as if all were done in the
    order in which it is asked for.
    """

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """(source, target) on the device; no target is another's source."""
        ...

    def read(self, group: int, block_ids: Sequence[int], into: Sequence[NDArray[np.uint8]]) -> None:
        """`KvCache.read_block` of each; the host has it after `settle`, and a later `write` from
        the same memory has it at once.
        """
        ...

    def write(
        self, group: int, block_ids: Sequence[int], data: Sequence[NDArray[np.uint8]]
    ) -> None:
        """`KvCache.write_block` of each."""
        ...

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """So that the device reads and writes this memory by itself, as long as it lives."""
        ...

    def settle(self) -> float:
        """Until the host has what was read; the seconds that were spent copying since the last
        time, 0 where nobody has measured.
        """
        ...


@runtime_checkable
class BatchedKvCache(Protocol):
    """A KvCache whose blocks are copied in batches."""

    @property
    def copies(self) -> BlockMover: ...


class OnDemandKvCache(KvCache, Protocol):
    """One whose blocks get memory when they are written and give it back when they are told to, in
    whole pages.
    """

    def give_back(self, group: int, first_block: int, num_blocks: int) -> None:
        """What these neighbouring blocks hold is lost. Pages that reach beyond them stay."""
        ...

    def spans(self, group: int) -> Sequence[tuple[int, int]]:
        """Addresses and sizes in bytes of a group's blocks, so that one can see what the system has
        given.
        """
        ...

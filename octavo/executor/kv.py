"""KV memory as a backend offers it: the layout of a block, and whole blocks copied, read and
written.

Only kernels look inside a block. The block size and the split of the attention are constants here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from octavo.program.program import CacheGroup

BLOCK_SIZE = 16
"""Number of tokens in a KV block, everywhere: native kernels keep one block's keys in one vector.
"""


SPLIT_KEYS = 256
"""Number of keys in a split of the attention's definition (`ops.Attention`)."""

PAGE_BYTES = 4096
"""Bytes of which places in a file of blocks and in their memory are multiples."""

STATES_A_BLOCK = 2
"""States in the one block of a request in a group of kind `state`: the one that a step reads, and
the one that it writes."""


class HeadRows(NamedTuple):
    """A run of a block's bytes: rows that hold equally many bytes of each KV head, head by head."""

    num_rows: int
    """Rows of all layers."""
    head_bytes: int
    """Bytes of one head in a row."""


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
    head_rows: tuple[HeadRows, ...] = field(repr=False)
    """How `read_block`'s bytes are shared out among the group's KV heads; a group that every rank
    keeps whole has one."""
    in_file: tuple[int, ...] = ()
    """Layers whose blocks may be in a file instead of memory."""

    @property
    def record_bytes(self) -> int:
        """Bytes of a block of one layer, in memory and in a file, if it may be in a file."""
        return -(-self.layer_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def resident_bytes(self) -> int:
        """Bytes of a block that are always in memory."""
        if not self.in_file:
            return self.block_bytes
        return self.record_bytes * (self.group.num_layers - len(self.in_file))

    @property
    def layer_bytes(self) -> int:
        """Bytes of a block in one layer."""
        return sum(self.pieces)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return self.layer_bytes * self.group.num_layers


class KvCache(Protocol):
    """KV memory of one backend, made by `allocate`; opaque but for whole blocks."""

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copies one block of a group in every layer."""
        ...

    def read_block(self, group: int, block_id: int, into: NDArray[np.uint8]) -> None:
        """Reads one block's bytes in every layer into `[KvLayout.block_bytes]`."""
        ...

    def write_block(self, group: int, block_id: int, data: NDArray[np.uint8]) -> None:
        """Writes the bytes that `read_block` gave to any block of the same group."""
        ...


@runtime_checkable
class LayeredKvCache(Protocol):
    """A KvCache of which single layers of a block can be read while a step computes."""

    def read_layer(self, group: int, layer: int, block_id: int, into: NDArray[np.uint8]) -> None:
        """Reads one layer of a block into `[KvLayout.layer_bytes]`: the part of what `read_block`
        gives from `layer * layer_bytes` on.
        """
        ...


class BlockMover(Protocol):
    """Copies blocks in batches, perhaps while steps compute, with the same effect as one copy after
    the other in the order of the calls.
    """

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (source, target) pairs on the device; no target is another pair's source."""
        ...

    def read(self, group: int, block_ids: Sequence[int], into: Sequence[NDArray[np.uint8]]) -> None:
        """Reads each block as `KvCache.read_block` does. The host has the bytes after `settle`; a
        later `write` from the same memory has them at once.
        """
        ...

    def write(
        self, group: int, block_ids: Sequence[int], data: Sequence[NDArray[np.uint8]]
    ) -> None:
        """Writes each block as `KvCache.write_block` does."""
        ...

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Pins host memory for its lifetime, so that the device reads and writes it directly."""
        ...

    def settle(self) -> float:
        """Waits until the host has all that was read, and returns the seconds spent copying since
        the last call, 0 where they are not measured.
        """
        ...


class BlockRows(NamedTuple):
    """The keys and values of one layer's blocks, by token."""

    k: NDArray[np.float32]
    """Keys, `[B, S, K, k_width]`."""
    v: NDArray[np.float32]
    """Values, `[B, S, K, v_width]`."""


@runtime_checkable
class BatchedKvCache(Protocol):
    """A KvCache whose blocks are copied in batches."""

    @property
    def copies(self) -> BlockMover: ...


class OnDemandKvCache(KvCache, Protocol):
    """A KvCache whose blocks take memory where they are written, and give it back on request, in
    whole pages.
    """

    def give_back(self, group: int, first_block: int, num_blocks: int) -> None:
        """Gives back the memory of neighbouring blocks, whose bytes are lost. Pages that reach
        beyond them stay.
        """
        ...

    def spans(self, group: int) -> Sequence[tuple[int, int]]:
        """Returns addresses and sizes in bytes of a group's blocks, for a look at what the system
        has given.
        """
        ...

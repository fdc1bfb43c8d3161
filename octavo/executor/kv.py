"""The KV memory of a backend: the layout of a block, and copies, reads and writes of complete
blocks.

Only kernels access the contents of a block. The block size and the split size of attention are
constants here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from octavo.program.program import CacheGroup

BLOCK_SIZE = 16
"""Number of tokens in a KV block, fixed because native kernels keep one block's keys in one vector.
"""

SPLIT_KEYS = 256
"""Number of keys in a split of the attention's definition (`ops.Attention`)."""

PAGE_BYTES = 4096
"""Alignment of blocks in files and in their memory, in bytes."""

STATES_A_BLOCK = 2
"""Number of states in a request's single block of a `state` group: a step reads one and writes the
other.
"""


class HeadRows(NamedTuple):
    """A contiguous range of a block's bytes: rows with equally many bytes per KV head, head by
    head.
    """

    num_rows: int
    """Number of rows, summed over all layers."""
    head_bytes: int
    """Bytes of one head in a row."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Storage of one cache group in a prepared Program. Programs that share a group must have the
    same layout.
    """

    group: CacheGroup
    dtype: str
    """Name of the stored type: fp32, bf16, int8 ..."""
    pieces: tuple[int, ...]
    """Bytes of each contiguous piece of a block in one layer. In memory, each piece is followed by
    the same piece of the next block.
    """
    head_rows: tuple[HeadRows, ...] = field(repr=False)
    """How the bytes of `read_block` are divided among the group's KV heads; a group that every rank
    stores completely has one head.
    """
    in_file: tuple[int, ...] = ()
    """Layers whose blocks may be in a file instead of memory."""

    @property
    def record_bytes(self) -> int:
        """Bytes of a block of one layer, rounded up to whole pages, as stored in a file."""
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
    """KV memory of one backend, created by `allocate`. Only complete blocks can be accessed."""

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copies one block of a group in every layer."""
        ...

    def read_block(self, group: int, block_id: int, into: NDArray[np.uint8]) -> None:
        """Reads one block's bytes in every layer into `[KvLayout.block_bytes]`."""
        ...

    def write_block(self, group: int, block_id: int, data: NDArray[np.uint8]) -> None:
        """Writes bytes that `read_block` returned to any block of the same group."""
        ...


class LayeredKvCache(Protocol):
    """The KvCache of a Runnable that reports `kv_writes`: layers can be read during a step."""

    def read_layer(self, group: int, layer: int, block_id: int, into: NDArray[np.uint8]) -> None:
        """Reads one layer of a block into `[KvLayout.layer_bytes]`: the part of the `read_block`
        bytes that starts at `layer * layer_bytes`.
        """
        ...


class BlockMover(Protocol):
    """Copies blocks in batches, possibly while steps are computed, with the same effect as single
    copies in call order.
    """

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (source, target) pairs on the device. A target must not be another pair's
        source.
        """
        ...

    def read(self, group: int, block_ids: Sequence[int], into: Sequence[NDArray[np.uint8]]) -> None:
        """Reads each block like `KvCache.read_block`. The bytes are on the host after `settle`; a
        later `write` from the same memory may be queued before that.
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
        """Waits until all reads have arrived on the host; returns the seconds spent copying since
        the last call, 0 if not measured.
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
    """A KvCache whose blocks use memory only from their first write until they are released, in
    units of pages.
    """

    def give_back(self, group: int, first_block: int, num_blocks: int) -> None:
        """Releases the memory of adjacent blocks, including their contents. Pages that also contain
        other blocks are kept.
        """
        ...

    def spans(self, group: int) -> Sequence[tuple[int, int]]:
        """Returns the addresses and sizes in bytes of a group's blocks."""
        ...

"""Partition of KV heads over the ranks of an engine, and the layout of each rank's blocks.

Two engines with different partitions exchange pieces of blocks: adjacent heads that one rank of the
sender has and one of the receiver needs. A piece has the layout of a block with just these heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.executor.kv import HeadRows, KvLayout
from octavo.program.passes.draft_groups import is_draft_group
from octavo.program.passes.splits import split_kv_heads
from octavo.program.program import CacheGroup, Span


class HeadPiece(NamedTuple):
    """Adjacent KV heads of one cache group on one rank, with indices in the complete model."""

    rank: int
    heads: Span


@dataclass(frozen=True, slots=True)
class GroupHeads:
    """KV heads of one cache group of the complete model."""

    num_heads: int
    """Number of KV heads that are partitioned; 1 if every rank stores the complete group."""
    rows: tuple[HeadRows, ...]
    """Layout of a block's bytes by head."""

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in a block, in all layers."""
        return sum(row.num_rows * row.head_bytes for row in self.rows)

    def spans(self, num_ranks: int) -> tuple[Span, ...]:
        """Returns the heads of each rank; raises ConfigError if they cannot be divided."""
        return split_kv_heads(self.num_heads, num_ranks)

    def cut(
        self, data: NDArray[np.uint8], block_heads: Span, piece_heads: Span
    ) -> NDArray[np.uint8]:
        """Copies the heads `piece_heads` from a block `[bytes]` of the heads `block_heads`."""
        first, last = piece_heads[0] - block_heads[0], piece_heads[1] - block_heads[0]
        parts = [part[:, first:last].reshape(-1) for part in self._parts(data, block_heads)]
        return np.concatenate(parts)

    def put(
        self,
        piece: NDArray[np.uint8],
        into: NDArray[np.uint8],
        block_heads: Span,
        piece_heads: Span,
    ) -> None:
        """Writes a piece of the heads `piece_heads` into a block of the heads `block_heads`."""
        first, last = piece_heads[0] - block_heads[0], piece_heads[1] - block_heads[0]
        for part, target in zip(
            self._parts(piece, piece_heads), self._parts(into, block_heads), strict=True
        ):
            target[:, first:last] = part

    def _parts(self, data: NDArray[np.uint8], heads: Span) -> list[NDArray[np.uint8]]:
        """Returns views of a block's rows, each `[rows, heads, bytes of a head]`."""
        num_heads, offset = heads[1] - heads[0], 0
        parts = []
        for row in self.rows:
            end = offset + row.num_rows * num_heads * row.head_bytes
            parts.append(data[offset:end].reshape(row.num_rows, num_heads, row.head_bytes))
            offset = end
        assert offset == len(data), "a block of other heads"
        return parts


@dataclass(frozen=True, slots=True)
class KVHeadPartition:
    """The KV heads that one rank stores, for every cache group."""

    groups: tuple[GroupHeads, ...]
    rank: int = 0
    num_ranks: int = 1
    """Number of ranks among which the heads are divided."""

    @classmethod
    def build(
        cls,
        layouts: Sequence[KvLayout],
        groups: Sequence[CacheGroup],
        rank: int = 0,
        num_ranks: int = 1,
    ) -> KVHeadPartition:
        """Builds the partition of a rank from its layouts and the complete model's cache groups."""
        group_heads = []
        for layout, group in zip(layouts, groups, strict=True):
            if group.kind == "state" or is_draft_group(group):
                group_heads.append(GroupHeads(1, (HeadRows(1, layout.block_bytes),)))
            else:
                group_heads.append(GroupHeads(group.num_kv_heads, layout.head_rows))
        return cls(tuple(group_heads), rank, num_ranks)

    def span(self, group: int) -> Span:
        """Returns this rank's heads of a group."""
        return self.groups[group].spans(self.num_ranks)[self.rank]

    def block_bytes(self) -> list[int]:
        """Returns the bytes of a block of each group, summed over all ranks."""
        return [
            group.head_bytes * sum(last - first for first, last in group.spans(self.num_ranks))
            for group in self.groups
        ]

    def pieces(self, group: int, num_ranks: int) -> list[HeadPiece]:
        """Splits this rank's heads into the pieces held by an engine of `num_ranks` ranks, in
        order. If several of its ranks hold the same heads, this engine's ranks alternate.
        """
        own_spans = self.groups[group].spans(num_ranks)
        first, end = self.span(group)
        head_pieces = []
        while first < end:
            having = [rank for rank, span in enumerate(own_spans) if span[0] <= first < span[1]]
            rank = having[self.rank % len(having)]
            last = min(end, own_spans[rank][1])
            head_pieces.append(HeadPiece(rank, (first, last)))
            first = last
        return head_pieces

    # -- bytes -------------------------------------------------------------------------------------

    def has(self, group: int, heads: Span) -> bool:
        """Returns whether this rank has all of these heads (at least one)."""
        first, last = self.span(group)
        return first <= heads[0] < heads[1] <= last

    def is_whole(self, group: int, heads: Span) -> bool:
        return heads == self.span(group)

    def cut(self, group: int, block: NDArray[np.uint8], heads: Span) -> NDArray[np.uint8]:
        """Copies the piece of these heads from this rank's block."""
        return self.groups[group].cut(block, self.span(group), heads)

    def cut_layer(
        self, group: int, layers: NDArray[np.uint8], offset: int, heads: Span
    ) -> tuple[NDArray[np.uint8], int]:
        """Copies heads from one layer of blocks `[blocks, layer_bytes]`, which starts at `offset`
        of each block; returns them with their offset in the piece of these heads.
        """
        assert len(self.groups[group].rows) == 1, "each layer of a block lies in one place"
        first, last = self.span(group)
        by_head = layers.reshape(len(layers), last - first, -1)
        cut = by_head[:, heads[0] - first : heads[1] - first].reshape(len(layers), -1)
        return cut, offset // (last - first) * (heads[1] - heads[0])

    def get_piece_slice(self, group: int, heads: Span) -> slice:
        """Returns the bytes of a block in which a piece is stored until all pieces have arrived:
        one after another.
        """
        first, size = self.span(group)[0], self.groups[group].head_bytes
        return slice((heads[0] - first) * size, (heads[1] - first) * size)

    def join(self, group: int, block: NDArray[np.uint8], pieces: Sequence[Span]) -> None:
        """Moves a block's pieces, stored one after the other, to their final positions."""
        if len(pieces) == 1:
            return
        come, own_heads = block.copy(), self.span(group)
        for heads in pieces:
            self.groups[group].put(
                come[self.get_piece_slice(group, heads)], block, own_heads, heads
            )


def make_single_rank_partition(block_bytes: Sequence[int]) -> KVHeadPartition:
    """Returns the partition of a single rank, whose blocks are never split."""
    return KVHeadPartition(tuple(GroupHeads(1, (HeadRows(1, size),)) for size in block_bytes))

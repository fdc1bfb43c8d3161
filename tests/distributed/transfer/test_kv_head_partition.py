"""Which heads of a block come from which rank, for each pair of sizes, and where they lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.api.errors import ConfigError
from octavo.distributed.transfer.kv_head_partition import (
    GroupHeads,
    KVHeadPartition,
    make_single_rank_partition,
)
from octavo.executor.kv import HeadRows, KvLayout
from octavo.executor.native import backend as native
from octavo.executor.reference import kv_cache as reference
from octavo.program.program import CacheGroup

SIZES = range(1, 9)
ROWS = (HeadRows(3, 8), HeadRows(6, 2), HeadRows(1, 0))
"""Three kinds of rows, of which one holds nothing."""


def sizes_of(num_heads: int) -> list[int]:
    """Returns the numbers of ranks on which a model with `num_heads` KV heads may run."""
    return [size for size in SIZES if size <= num_heads or size % num_heads == 0]


def ranks_of(num_heads: int, num_ranks: int) -> list[KVHeadPartition]:
    groups = (GroupHeads(num_heads, ROWS),)
    return [KVHeadPartition(groups, rank, num_ranks) for rank in range(num_ranks)]


PAIRS = [
    (num_heads, senders, receivers)
    for num_heads in SIZES
    for senders in sizes_of(num_heads)
    for receivers in sizes_of(num_heads)
]


@pytest.mark.parametrize("num_heads", SIZES)
def test_pieces_cover_what_a_rank_has_and_nothing_else(num_heads: int) -> None:
    """Each piece is of one rank that has all of it, and neighbours follow each other."""
    for _, senders, receivers in (pair for pair in PAIRS if pair[0] == num_heads):
        having = ranks_of(num_heads, senders)
        for receiver in ranks_of(num_heads, receivers):
            pieces = receiver.pieces(0, senders)
            borders = [heads[0] for _, heads in pieces] + [pieces[-1].heads[1]]
            assert (borders[0], borders[-1]) == receiver.span(0)
            assert [heads[1] for _, heads in pieces] == borders[1:]
            assert all(having[piece.rank].has(0, piece.heads) for piece in pieces)
            assert len({piece.rank for piece in pieces}) == len(pieces)
            if senders == receivers:
                assert [piece.rank for piece in pieces] == [receiver.rank]
                assert having[receiver.rank].is_whole(0, pieces[0].heads)


@pytest.mark.parametrize("num_heads", SIZES)
def test_bytes_come_to_lie_as_the_receiver_has_them(num_heads: int) -> None:
    whole, groups = ranks_of(num_heads, 1)[0], ranks_of(num_heads, 1)[0].groups
    data = np.random.default_rng(num_heads).integers(0, 256, whole.block_bytes()[0], np.uint8)
    for _, senders, receivers in (pair for pair in PAIRS if pair[0] == num_heads):
        having = ranks_of(num_heads, senders)
        blocks = [whole.cut(0, data, rank.span(0)) for rank in having]
        for receiver in ranks_of(num_heads, receivers):
            expected = whole.cut(0, data, receiver.span(0))
            slot = np.zeros_like(expected)
            pieces = receiver.pieces(0, senders)
            for rank, heads in pieces:
                piece = having[rank].cut(0, blocks[rank], heads)
                assert len(piece) == groups[0].head_bytes * (heads[1] - heads[0])
                slot[receiver.get_piece_slice(0, heads)] = piece
            receiver.join(0, slot, [heads for _, heads in pieces])
            assert (slot == expected).all()


def test_ranks_that_have_the_same_heads_take_turns() -> None:
    """Each of two heads is on two of four ranks; a latent is on all of them."""
    assert [rank.pieces(0, 4)[0].rank for rank in ranks_of(2, 4)] == [0, 1, 2, 3]
    assert [[rank for rank, _ in each.pieces(0, 4)] for each in ranks_of(2, 2)] == [[0], [3]]
    assert [rank.pieces(0, 3)[0].rank for rank in ranks_of(1, 3)] == [0, 1, 2]


def test_layers_are_cut_as_whole_blocks_are() -> None:
    """A layer of a block that is kept layer by layer, head by head within it."""
    num_layers, num_heads = 3, 4
    held = KVHeadPartition((GroupHeads(num_heads, (HeadRows(num_layers, 5),)),))
    blocks = np.random.default_rng(1).integers(0, 256, (2, num_layers * num_heads * 5), np.uint8)
    layer_bytes = num_heads * 5
    for heads in ((0, 1), (1, 3), (2, 4), (0, 4)):
        pieces = [held.cut(0, block, heads) for block in blocks]
        for layer in range(num_layers):
            offset = layer * layer_bytes
            layers = blocks[:, offset : offset + layer_bytes]
            cut, at = held.cut_layer(0, layers, offset, heads)
            for piece, found in zip(pieces, cut, strict=True):
                assert (piece[at : at + len(found)] == found).all()


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ConfigError, match="got 3, but the model has 2 KV heads"):
        ranks_of(2, 1)[0].pieces(0, 3)


def test_what_a_rank_has_is_told_from_what_it_has_not() -> None:
    (held,) = (rank for rank in ranks_of(4, 2) if rank.rank == 1)
    assert held.span(0) == (2, 4) and held.has(0, (3, 4))
    assert not any(held.has(0, heads) for heads in ((1, 3), (0, 0), (3, 3), (3, 2), (2, 5)))
    assert held.is_whole(0, (2, 4)) and not held.is_whole(0, (2, 3))


def test_the_only_rank_has_whole_blocks() -> None:
    held = make_single_rank_partition([10, 20])
    assert held.block_bytes() == [10, 20] and held.span(1) == (0, 1)
    assert held.pieces(1, 1)[0].rank == 0


GROUP = CacheGroup("self", "full", 2, 4, 16, 8)
GROUPS = {
    "heads": GROUP,
    "window": replace(GROUP, kind="window", window=8),
    "one head": replace(GROUP, num_kv_heads=1),
    "latent": CacheGroup("self", "latent", 2, 1, 24, 0),
    "conv": CacheGroup("self", "conv", 2, 1, 16, 0, window=3),
    "state": CacheGroup("self", "state", 2, 4, 8, 16),
}


def torch_layout(group: CacheGroup, dtype: str) -> KvLayout:
    kv_cache = pytest.importorskip("octavo.executor.torch.kv_cache")
    return kv_cache.make_kv_layout(group, kv_cache.DTYPES[dtype])


LAYOUTS = [
    *((native.make_kv_layout, dtype) for dtype in ("fp32", "bf16", "int8")),
    *((reference.make_kv_layout, dtype) for dtype in ("fp64", "fp32", "int8")),
    *((torch_layout, dtype) for dtype in ("bf16", "int8", "fp8")),
]


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(
    ("layout_of", "dtype"), LAYOUTS, ids=lambda one: getattr(one, "__module__", str(one))
)
def test_layouts_say_how_much_of_a_block_each_head_has(layout_of, dtype: str, name: str) -> None:
    """A rank's block has as many bytes as the heads that it has; states are on every rank."""
    group = GROUPS[name]
    layout = layout_of(group, dtype)
    held = KVHeadPartition.build([layout], [group], 0, 2)
    assert KVHeadPartition.build([layout], [group]).block_bytes() == [layout.block_bytes]
    first, last = held.span(0)
    of_rank = group if name == "state" else replace(group, num_kv_heads=last - first)
    assert held.groups[0].head_bytes * (last - first) == layout_of(of_rank, dtype).block_bytes
    assert layout_of(of_rank, dtype).head_rows == layout.head_rows
    assert "head_rows" not in str(layout)

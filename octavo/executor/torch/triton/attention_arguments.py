"""The arguments of the attention kernels, bundled: tensors and numbers of a launch, and the
constants that it is compiled for (in capitals, `tl.constexpr`).

Kernels read a bundle's fields and never import this file, but for the bundles in `splits.py` that
they make themselves. Knows calls and kernels' arguments, no arithmetic.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor

from octavo.executor.torch.attention.call import AttentionCall
from octavo.executor.torch.triton import splits
from octavo.executor.torch.triton.numbers import dot_dtype, dot_precision


class Queries(NamedTuple):
    """Queries `[T, H, K_WIDTH]`, rows and heads at any stride."""

    numbers: Tensor
    row_stride: int
    head_stride: int
    DTYPE: tl.constexpr
    """Type in which tiles are multiplied."""

    @staticmethod
    def of(call: AttentionCall) -> Queries:
        q = call.q if call.q.stride(-1) == 1 else call.q.contiguous()
        return Queries(q, q.stride(0), q.stride(1), tl.constexpr(dot_dtype(*_dtypes(call))))


class PagedKv(NamedTuple):
    """Keys and values of one layer as `KvTensor` has them, and the block tables `[R, B]`."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None
    block_tables: Tensor
    table_width: int
    HEADS: tl.constexpr
    K_STRIDE: tl.constexpr
    """Numbers from one head's key to the next."""
    V_STRIDE: tl.constexpr

    @staticmethod
    def of(call: AttentionCall) -> PagedKv:
        k, v = call.k.numbers, call.v.numbers
        return PagedKv(
            k=k,
            v=v,
            k_scales=call.k.scales,
            v_scales=call.v.scales,
            block_tables=call.block_tables,
            table_width=call.block_tables.stride(0),
            HEADS=tl.constexpr(k.shape[-2]),
            K_STRIDE=tl.constexpr(k.shape[-1]),
            V_STRIDE=tl.constexpr(v.shape[-1]),
        )


class Scoring(NamedTuple):
    """How a product of query and key becomes a score in base 2."""

    scale: float
    cap: float
    """Soft cap, times log2(e); 0.0 without one."""
    bias: Tensor | None
    """ALiBi's slopes `[H]`, or a bias by distance `[H, 2 * BIAS_LIMIT + 1]`."""
    BIAS: tl.constexpr
    """`splits.NO_BIAS`, `SLOPES` or `BY_DISTANCE`."""
    BIAS_LIMIT: tl.constexpr
    """Distance beyond which a bias by distance is constant."""
    CAPPED: tl.constexpr
    PRECISION: tl.constexpr
    """`input_precision` of the products."""

    @staticmethod
    def of(call: AttentionCall) -> Scoring:
        log2e: float = splits.LOG2E.value
        bias, kind, limit = _bias(call)
        return Scoring(
            scale=call.scale / call.softcap if call.softcap else call.scale * log2e,
            cap=(call.softcap or 0.0) * log2e,
            bias=bias,
            BIAS=tl.constexpr(kind),
            BIAS_LIMIT=tl.constexpr(limit),
            CAPPED=tl.constexpr(call.softcap is not None),
            PRECISION=tl.constexpr(dot_precision(*_dtypes(call))),
        )


class Mask(NamedTuple):
    """The keys of its request that a row sees."""

    WINDOW: tl.constexpr
    """Number of keys that a row sees, its own included; 0 without a window."""
    CHUNK: tl.constexpr
    """Number of keys of a chunk, of which a row sees its own chunk's; 0 without chunks."""
    FULL: tl.constexpr
    """Whether a row sees every key, whatever the place of the key."""

    @staticmethod
    def of(call: AttentionCall) -> Mask:
        chunk, window = (call.window, None) if call.chunks else (None, call.window)
        return Mask(*map(tl.constexpr, (window or 0, chunk or 0, call.full)))


class Widths(NamedTuple):
    """Columns of a key and of a value, and of the tiles that hold them."""

    K: tl.constexpr
    V: tl.constexpr
    K_FIRST: tl.constexpr
    """Columns of a key's first tile."""
    K_REST: tl.constexpr
    """Columns of a key's second tile; 0 without one."""
    V_TILE: tl.constexpr

    @staticmethod
    def of(call: AttentionCall) -> Widths:
        k_width = call.k.numbers.shape[-1]
        sizes = (k_width, call.v_width, *two_widths(k_width), tile_width(call.v_width))
        return Widths(*map(tl.constexpr, sizes))


class HeadTile(NamedTuple):
    """How rows and the query heads of one KV head share a tile's lanes."""

    HEADS: tl.constexpr
    """Query heads of the layer."""
    SHARE: tl.constexpr
    """Query heads of a KV head."""
    PARTS: tl.constexpr
    """Tiles that the query heads of one KV head take."""
    LANE_HEADS: tl.constexpr
    """Query heads of a tile."""
    ROWS: tl.constexpr
    """Rows of a tile."""

    @staticmethod
    def of(call: AttentionCall, block_m: int) -> HeadTile:
        num_heads = call.q.shape[1]
        share = num_heads // call.k.numbers.shape[-2]
        lane_heads = min(share, block_m)
        sizes = (num_heads, share, -(-share // lane_heads), lane_heads, block_m // lane_heads)
        return HeadTile(*map(tl.constexpr, sizes))


class Slots(NamedTuple):
    """The requests of one row of a launch; a slot is one of them."""

    places: Tensor
    """Place (key index) of each row of the step, `[T]`."""
    context_lens: Tensor
    """Number of keys of each request of the step, `[R]`."""
    row_of: Tensor | None
    """Row of each slot; None where slot s is row s."""
    request_of: Tensor | None
    """Request of each slot; None where slot s is request s."""
    first: int
    """First slot of the launch."""


class SplitStates(NamedTuple):
    """States of splits, written by `decode.py` and read by `merge.py`."""

    sums: Tensor
    """The m and l of each split, `[slots, H, splits, 2] fp32`."""
    accs: Tensor
    """Weighted sums of values, `[slots, H, splits, V] fp32`."""
    num_splits: int


class Runs(NamedTuple):
    """The slots that a program of `decode.py` computes together, and the splits it reads of
    them.
    """

    slots: Tensor | None
    """Slots of each shared run, `[runs, ROWS]`, -1 where there is none; None where run r is the
    slot r by itself."""
    splits: Tensor | None
    """Number of leading splits that each shared run reads, `[runs]`."""
    own_splits: Tensor | None
    """First split that each slot's own run reads, `[slots]`."""
    ROWS: tl.constexpr


class Requests(NamedTuple):
    """The requests of a step, as `prefill.py` reads them."""

    places: Tensor
    """Place (key index) of each row, `[T]`."""
    context_lens: Tensor
    """Number of keys of each request, `[R]`."""
    query_starts: Tensor
    """First row of each request, and the end, `[R + 1]`."""
    num: int
    """R, the number of requests."""


def _dtypes(call: AttentionCall) -> tuple[Any, ...]:
    return call.q.dtype, call.k.numbers.dtype, call.v.numbers.dtype


def _bias(call: AttentionCall) -> tuple[Tensor | None, int, int]:
    bias = call.bias
    if bias is None:
        return None, splits.NO_BIAS.value, 0
    if bias.slopes is not None:
        return bias.slopes, splits.SLOPES.value, 0
    assert bias.by_distance is not None
    table = bias.by_distance()
    return table, splits.BY_DISTANCE.value, table.shape[1] // 2


def tile_width(width: int) -> int:
    """Returns the columns of a tile for `width` of them: a power of two, at least the 16 that a
    product's tile needs.
    """
    return max(16, 1 << (width - 1).bit_length())


def two_widths(width: int) -> tuple[int, int]:
    """Cuts a row's columns into one tile or two, whichever pads less: 128 is (128, 0), 80 is
    (64, 16), 192 is (128, 64), 24 is (32, 0).
    """
    whole = tile_width(width)
    first = 1 << int(math.log2(width)) if width > 16 else 16
    rest = tile_width(width - first) if width > first else 0
    return (first, rest) if first + rest < whole else (whole, 0)

"""Argument bundles of the attention kernels: tensors and numbers of a launch, and compile-time
constants (in capitals, `tl.constexpr`).

Kernels read the bundles' fields without importing this file; bundles that kernels create are in
`splits.py`. Triton compiles a kernel again if an integer in a bundle becomes 1 or a multiple of 16,
so numbers that change from step to step are arguments of their own (`do_not_specialize`).
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
    """Queries `[T, H, K_WIDTH]`, with arbitrary row and head strides."""

    numbers: Tensor
    row_stride: int
    head_stride: int
    DTYPE: tl.constexpr
    """Dtype of tile products."""

    @staticmethod
    def of(call: AttentionCall) -> Queries:
        q = call.q if call.q.stride(-1) == 1 else call.q.contiguous()
        return Queries(q, q.stride(0), q.stride(1), tl.constexpr(dot_dtype(*_dtypes(call))))


class PagedKv(NamedTuple):
    """Keys and values of one layer as in `KvTensor.raw`, and the block tables `[R, B]`."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None
    block_tables: Tensor
    HEADS: tl.constexpr
    K_STRIDE: tl.constexpr
    """Elements from one head's key to the next."""
    V_STRIDE: tl.constexpr

    @staticmethod
    def of(call: AttentionCall) -> PagedKv:
        k, v = call.k.raw, call.v.raw
        return PagedKv(
            k=k,
            v=v,
            k_scales=call.k.scales,
            v_scales=call.v.scales,
            block_tables=call.block_tables,
            HEADS=tl.constexpr(k.shape[-2]),
            K_STRIDE=tl.constexpr(k.shape[-1]),
            V_STRIDE=tl.constexpr(v.shape[-1]),
        )


class Scoring(NamedTuple):
    """Conversion of query-key products to scores in base 2."""

    scale: float
    cap: float
    """Soft cap times log2(e); 0.0 without one."""
    bias: Tensor | None
    """ALiBi slopes `[H]`, or a bias by distance `[H, 2 * BIAS_LIMIT + 1]`."""
    BIAS: tl.constexpr
    """`splits.NO_BIAS`, `SLOPES` or `BY_DISTANCE`."""
    BIAS_LIMIT: tl.constexpr
    """Distance beyond which a bias by distance is constant."""
    CAPPED: tl.constexpr
    PRECISION: tl.constexpr
    """`input_precision` of tile products."""

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
    """Which keys of its request a row sees."""

    WINDOW: tl.constexpr
    """Number of keys that a row sees, including its own; 0 without a window."""
    CHUNK: tl.constexpr
    """Keys per chunk; a row sees only its own chunk. 0 without chunks."""
    FULL: tl.constexpr
    """Whether a row sees every key."""

    @staticmethod
    def of(call: AttentionCall) -> Mask:
        chunk, window = (call.window, None) if call.chunks else (None, call.window)
        return Mask(*map(tl.constexpr, (window or 0, chunk or 0, call.full)))


class Widths(NamedTuple):
    """Widths of a key and a value, and of their tiles."""

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
    """Query heads per KV head."""
    PARTS: tl.constexpr
    """Tiles per KV head."""
    LANE_HEADS: tl.constexpr
    """Query heads per tile."""
    ROWS: tl.constexpr
    """Rows per tile."""

    @staticmethod
    def of(call: AttentionCall, block_m: int) -> HeadTile:
        num_heads = call.q.shape[1]
        share = num_heads // call.k.numbers.shape[-2]
        lane_heads = min(share, block_m)
        sizes = (num_heads, share, -(-share // lane_heads), lane_heads, block_m // lane_heads)
        return HeadTile(*map(tl.constexpr, sizes))


class Slots(NamedTuple):
    """Single-row requests of a launch; a slot is one of them."""

    key_indices: Tensor
    """Key index of each row of the step, `[T]`."""
    context_lens: Tensor
    """Keys of each request of the step, `[R]`."""
    row_of: Tensor | None
    """Row of each slot; None: slot s is row s."""
    request_of: Tensor | None
    """Request of each slot; None: slot s is request s."""


class SplitStates(NamedTuple):
    """Split states, written by `decode.py` and read by `merge.py`."""

    sums: Tensor
    """m and l of each split, `[slots, H, splits, 2] fp32`."""
    accs: Tensor
    """Weighted value sums, `[slots, H, splits, V] fp32`."""


class Runs(NamedTuple):
    """Runs of slots that a program of `decode.py` computes together, and the splits that it
    reads.
    """

    slots: Tensor | None
    """Slots of each shared run, `[runs, ROWS]`, -1 for none; None: run r is slot r alone."""
    splits: Tensor | None
    """Leading splits that each shared run reads, `[runs]`."""
    own_splits: Tensor | None
    """First split that each slot's own run reads, `[slots]`."""
    ROWS: tl.constexpr


class Requests(NamedTuple):
    """Requests of a step, for `prefill.py`."""

    key_indices: Tensor
    """Key index of each row, `[T]`."""
    context_lens: Tensor
    """Keys of each request, `[R]`."""
    query_starts: Tensor
    """First row of each request, and the end, `[R + 1]`."""


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
    """Returns the tile width for `width` columns: a power of two, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def two_widths(width: int) -> tuple[int, int]:
    """Splits a row's columns into one or two tiles, whichever pads less: 128 is (128, 0), 80 is
    (64, 16), 192 is (128, 64), 24 is (32, 0).
    """
    whole = tile_width(width)
    first = 1 << int(math.log2(width)) if width > 16 else 16
    rest = tile_width(width - first) if width > first else 0
    return (first, rest) if first + rest < whole else (whole, 0)

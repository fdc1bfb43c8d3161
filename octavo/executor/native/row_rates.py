"""Measures how fast a single-row step reads weights and KV on this machine, by format and size.

Uses synthetic data; no model is loaded.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.executor.kv import KvLayout
from octavo.executor.native.formats import PRODUCTS, TILE, TileFormat, get_matrices
from octavo.program.expert_ops import GroupedLinear
from octavo.program.ops import Attention
from octavo.program.program import Op, Program, Weight

ROUNDS = 7
MEASURED_BYTES = 64 << 20
"""Bytes measured per kind of matmul: more than most last-level caches hold."""


KV_CONTEXT = 1024
"""Context length of the measured attention."""


@dataclass(frozen=True, slots=True)
class RowAttention:
    """Attention properties that determine its read rate."""

    dtype: str
    num_query_heads: int
    num_kv_heads: int
    k_width: int
    v_width: int


@dataclass(frozen=True, slots=True)
class RowProduct:
    """Matmul properties that determine its single-row rate."""

    tiles: TileFormat
    num_inputs: int
    num_bytes: int
    """Bytes of all weights that the matmul reads."""


def row_products(
    program: Program, formats: dict[Weight, TileFormat], sizes: dict[Weight, int]
) -> dict[Weight, RowProduct]:
    """Returns the matmul that reads each matrix; experts count only those chosen for one token."""

    def num_bytes(op: Op) -> int:
        whole = sum(sizes[weight] for weight in get_matrices(op))
        share = op.ids.width / op.weight.shape[0] if isinstance(op, GroupedLinear) else 1
        return round(whole * share)

    return {
        weight: RowProduct(formats[weight], weight.shape[-1], num_bytes(op))
        for op in program.ops
        if isinstance(op, PRODUCTS)
        for weight in get_matrices(op)
    }


def row_attention(program: Program, layouts: Sequence[KvLayout]) -> RowAttention | None:
    """Returns the attention of the cache group with most layers; None if no `Attention` reads a
    group.
    """
    num_heads = {op.group: op.num_heads for op in program.ops if isinstance(op, Attention)}
    read = [layout for layout in layouts if layout.group.name in num_heads]
    if not read:
        return None
    layout = max(read, key=lambda layout: layout.group.num_layers)
    group = layout.group
    return RowAttention(
        layout.dtype, num_heads[group.name], group.num_kv_heads, group.k_width, group.v_width
    )


def kv_rate(device: Any, attention: Hashable, most_bytes: int) -> float | None:
    """Returns the bytes per second at which single-row attention reads KV; None without
    attention.
    """
    if not isinstance(attention, RowAttention):
        return None
    rate: float = device.attention_rate(
        attention.dtype,
        num_query_heads=attention.num_query_heads,
        num_kv_heads=attention.num_kv_heads,
        k_width=attention.k_width,
        v_width=attention.v_width,
        context=KV_CONTEXT,
        bytes=min(most_bytes, MEASURED_BYTES),
        rounds=ROUNDS,
    )
    return rate


def row_rates(device: Any, products: Iterable[Hashable], most_bytes: int) -> dict[Hashable, float]:
    """Returns the weight read rate of each matmul in bytes per second, the median of several
    rounds.
    """
    return {
        product: statistics.median(
            rate
            for _, rate in stream_rounds(
                device,
                product.tiles,
                product.num_inputs,
                min(most_bytes, MEASURED_BYTES),
                ROUNDS,
                product_bytes=product.num_bytes,
            )
        )
        for product in dict.fromkeys(products)
        if isinstance(product, RowProduct)
    }


def stage_seconds(device: Any, num_threads: int) -> float:
    """Returns the minimum duration of a stage: each thread quantizes a row, multiplies it by two
    cached tiles, and waits at the barrier.
    """
    tiles, num_inputs = TileFormat("u4", "fp16"), 1024
    num_bytes = tiles.num_bytes((2 * TILE * num_threads, num_inputs))
    rounds = stream_rounds(device, tiles, num_inputs, num_bytes, ROUNDS)
    return statistics.median(num_bytes / rate for _, rate in rounds)


def stream_rounds(
    device: Any,
    tiles: TileFormat,
    num_inputs: int,
    num_bytes: int,
    rounds: int,
    *,
    product_bytes: int = 0,
) -> list[tuple[float, float]]:
    """Returns per round the bytes per second of a plain read by all threads, and of single-row
    matmuls over tiles in the same memory.

    Each matmul reads `product_bytes`; 0: one matmul reads everything.
    """
    rates: list[tuple[float, float]] = device.stream_rounds(
        tiles.code,
        scale_type=tiles.scale_type,
        low=tiles.low,
        half_groups=tiles.half_groups,
        half_factors=tiles.half_factors,
        span=tiles.span,
        num_inputs=num_inputs,
        bytes=num_bytes,
        product_bytes=product_bytes,
        rounds=rounds,
    )
    return rates

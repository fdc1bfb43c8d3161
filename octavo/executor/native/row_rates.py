"""Measures how fast a step of one row reads weights, K and V on this machine, by their formats and
sizes.

Memory and numbers are made up for the measurement; no model is loaded.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.executor.kv import KvLayout
from octavo.executor.native.formats import PRODUCTS, TILE, TileFormat, matrices_of
from octavo.program.expert_ops import GroupedLinear
from octavo.program.ops import Attention
from octavo.program.program import Op, Program, Weight

ROUNDS = 7
MEASURED_BYTES = 64 << 20
"""Bytes of each kind of product: more than most last-level caches hold."""


KV_CONTEXT = 1024
"""Keys of the requests whose attention is measured."""


@dataclass(frozen=True, slots=True)
class RowAttention:
    """What the speed of one row's attention depends on."""

    dtype: str
    num_query_heads: int
    num_kv_heads: int
    k_width: int
    v_width: int


@dataclass(frozen=True, slots=True)
class RowProduct:
    """What the speed of a product of one row depends on."""

    tiles: TileFormat
    num_inputs: int
    num_bytes: int
    """Bytes of weights that the whole product reads, in all matrices that it multiplies with."""


def row_products(
    program: Program, formats: dict[Weight, TileFormat], sizes: dict[Weight, int]
) -> dict[Weight, RowProduct]:
    """Returns the product that reads each matrix of an optimized Program; of experts' matrices it
    reads those of one token's experts.
    """

    def num_bytes(op: Op) -> int:
        whole = sum(sizes[weight] for weight in matrices_of(op))
        share = op.ids.width / op.weight.shape[0] if isinstance(op, GroupedLinear) else 1
        return round(whole * share)

    return {
        weight: RowProduct(formats[weight], weight.shape[-1], num_bytes(op))
        for op in program.ops
        if isinstance(op, PRODUCTS)
        for weight in matrices_of(op)
    }


def row_attention(program: Program, layouts: Sequence[KvLayout]) -> RowAttention | None:
    """Returns the attention of the cache group that has most layers; None if no group is read by
    `Attention` alone.
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
    """Returns the bytes per second at which attention of single rows reads K and V; None if the
    Program has none.
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
    """Returns the bytes per second at which each of these products reads its weights, the median of
    some rounds. One product follows the other, each behind the end of the last.
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
    """Returns the seconds that a stage takes at least: each thread prepares a row, multiplies it
    with two tiles in its caches, and waits for the others.
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
    """Returns the bytes per second of each round: of a plain read by all threads, and of products
    of one row with tiles in the same memory. Products read `product_bytes` each, one after another;
    0: one product reads all of them.
    """
    found: list[tuple[float, float]] = device.stream_rounds(
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
    return found

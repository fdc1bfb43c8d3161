"""How fast one row's products read weights on this machine, by the weights' format."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable
from typing import Any

from octavo.executor.native.formats import TileFormat

ROUNDS = 7
NUM_INPUTS = 2048
"""Inputs of the products that are measured, as models of 1 to 8 billion parameters have them."""
MEASURED_BYTES = 64 << 20
"""Bytes of each format: more than most last-level caches hold."""


def row_rates(device: Any, layouts: Iterable[Hashable], most_bytes: int) -> dict[Hashable, float]:
    """Returns the bytes per second at which products of one row read tiles of each format among
    these layouts, the median of some rounds.
    """
    num_bytes = min(most_bytes, MEASURED_BYTES)
    return {
        tiles: statistics.median(
            product for _, product in stream_rounds(device, tiles, NUM_INPUTS, num_bytes, ROUNDS)
        )
        for tiles in dict.fromkeys(layouts)
        if isinstance(tiles, TileFormat)
    }


def stream_rounds(
    device: Any, tiles: TileFormat, num_inputs: int, num_bytes: int, rounds: int
) -> list[tuple[float, float]]:
    """Returns the bytes per second of each round: of a plain read by all threads, and of products
    of one row with tiles in the same memory.
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
        rounds=rounds,
    )
    return found

"""Packs the weights of one matmul into the bytes of the file of streamed weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from octavo.executor.base import LoadWeight
from octavo.executor.native.weight_file import PlacedTiles
from octavo.executor.native.weights import NativeWeights
from octavo.program.expert_ops import GroupedLinear
from octavo.program.ops import HeadLinear, Linear

LINE = 64
"""Alignment of each weight in its unit, in bytes."""

Product: TypeAlias = Linear | GroupedLinear | HeadLinear


@dataclass(frozen=True, slots=True)
class PackedUnit:
    """A matmul's weights, packed."""

    data: bytes
    tiles: tuple[PlacedTiles, ...]
    """Positions of the tiles, in the order of `NativeWeights.adopt`."""
    is_interleaved: bool
    """Whether gates and up projections are interleaved."""

    @property
    def num_bytes(self) -> int:
        return len(self.data)


def pack_unit(device: Any, op: Product, load: LoadWeight, dtype: str) -> PackedUnit:
    """Packs a matmul's weights one after the other, each from a multiple of LINE bytes."""
    weights = NativeWeights(device, load, dtype, apart=True)
    handles = [tiles.handle for tiles in weights.of_product(op)]
    weights.pack()
    gated = isinstance(op, Linear | GroupedLinear) and op.gate is not None
    pairs = len(handles) // 2 if gated else 0
    data, offsets = bytearray(), dict[int, int]()
    for index, handle in enumerate(handles):
        if index in offsets:
            continue
        offsets[index] = len(data)
        size = round_up(handle.num_bytes, LINE)
        if handle.is_interleaved:
            *_, stride, _, _ = handle.layout  # code tables come last
            offsets[index + pairs] = len(data) + stride // 2
            data += fill_up(handle.raw(2 * handle.num_bytes), 2 * size)
        else:
            data += fill_up(handle.raw(handle.num_bytes), size)
    tiles = tuple(PlacedTiles(offsets[i], handle.layout) for i, handle in enumerate(handles))
    return PackedUnit(bytes(data), tiles, any(handle.is_interleaved for handle in handles))


def fill_up(data: bytes, size: int) -> bytes:
    """Appends zeros up to `size` bytes."""
    return data + bytes(size - len(data))


def round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit

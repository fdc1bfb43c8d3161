"""Experts that are read on use: one record per expert with all of its matrices, in the file of
streamed weights.

The other weights stay in memory. The experts that are used most often stay in memory, too; the
extension's NeuronCache (csrc/runtime/neuron_cache.h) counts their uses and reads the others when a
router has chosen them. The offload pass handles the other weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from octavo.api.errors import ConfigError
from octavo.config.sizes import format_bytes
from octavo.engine.protocol.step import WeightArrivals
from octavo.executor.base import LoadWeight
from octavo.executor.native.extension import native_module
from octavo.executor.native.formats import PRODUCTS, get_matrices
from octavo.executor.native.lowering_context import LoweringContext
from octavo.executor.native.packed_units import LINE, PackedUnit, pack_unit, round_up
from octavo.executor.native.stages import sort_token_ops_first
from octavo.executor.native.weight_file import PlacedTiles, StoredUnit
from octavo.executor.native.weights import NativeWeights
from octavo.program.expert_ops import GroupedLinear
from octavo.program.passes.offload import ALIGN
from octavo.program.program import Program, Value, Weight

DEPTH = 8
"""Reads in flight; each uses a thread and a buffer for an expert."""

HALF_LIFE = 256.0
"""Steps after which a use of an expert counts half."""


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The expert matmuls of one layer."""

    ops: tuple[GroupedLinear, ...]
    num_experts: int
    record_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        return self.num_experts * self.record_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of all records in the file, a multiple of a page."""
        return round_up(self.num_bytes, ALIGN)

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(weight for op in self.ops for weight in op.matrices)


class OpenedExperts:
    """Opened records of experts."""

    num_bytes = 0
    """Bytes that the offload plan does not count."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def arrivals(self) -> WeightArrivals:
        cache = self._cache
        return WeightArrivals(
            cache.bytes_read,
            wait_s=cache.wait_seconds,
            experts_found=cache.num_found,
            experts_read=cache.num_read,
            experts_prefetched=cache.num_prefetched,
            experts_prefetched_used=cache.num_prefetched_used,
        )

    def lowering(self, context: LoweringContext) -> None:
        """The tiles of the experts refer to the records, so no op has a lowering of its own."""


class ExpertRecords:
    """Implements `WeightRecords`."""

    in_file = True

    def __init__(self, program: Program, sizes: Mapping[Weight, int], memory_bytes: int) -> None:
        """`memory_bytes`: largest number of bytes of all weights in memory. Raises ConfigError if
        the Program has no experts, or with the smallest allowed size.
        """
        self._layers = _expert_layers(program, sizes)
        self.weights = frozenset(weight for each in self._layers for weight in each.weights)
        others = _other_bytes(program, sizes, self.weights)
        self._num_slots, self.memory_bytes = _plan_slots(self._layers, memory_bytes, others)
        self.sizes: Sequence[int] = [each.file_bytes for each in self._layers]
        self.key: Sequence[tuple[str, int]] = [
            (each.weights[0].name, each.record_bytes) for each in self._layers
        ]
        self.read_in_part: Mapping[str, int] = {
            "experts": sum(each.num_bytes for each in self._layers)
        }

    def data(
        self, index: int, device: Any, load: LoadWeight, dtype: str
    ) -> tuple[bytes, list[PlacedTiles]]:
        layer = self._layers[index]
        units = [pack_unit(device, op, load, dtype) for op in layer.ops]
        parts = [_split(unit, layer.num_experts) for unit in units]
        data = bytearray()
        for expert in range(layer.num_experts):
            for pieces in parts:
                for piece in pieces:
                    data += piece.of_expert(expert)
        assert len(data) == layer.num_bytes, "other bytes than planned"
        tiles, offset = [], 0
        for unit, pieces in zip(units, parts, strict=True):
            tiles += _placed(unit, pieces, layer.num_experts, offset)
            offset += sum(piece.num_bytes for piece in pieces)
        return bytes(data) + bytes(layer.file_bytes - len(data)), tiles

    def open_file(
        self, path: Path, units: Sequence[StoredUnit], into: NativeWeights
    ) -> OpenedExperts:
        cache = native_module().NeuronCache(
            str(path),
            [
                (unit.offset, each.num_experts, 0, each.record_bytes, slots, [])
                for unit, each, slots in zip(units, self._layers, self._num_slots, strict=True)
            ],
            num_threads=DEPTH,
            most_bytes=_read_bytes(self._layers),
            gap_bytes=0,
            window=0,
            half_life=HALF_LIFE,
            predicts=True,
        )
        for index, (unit, layer) in enumerate(zip(units, self._layers, strict=True)):
            placed = iter(unit.tiles)
            for op in layer.ops:
                handles: list[Any] = []
                for _ in op.matrices:
                    tiles = next(placed)
                    handle = cache.tiles(index, tiles.offset, tiles.layout)
                    handles += [handle] * layer.num_experts
                into.adopt(op, handles)
        return OpenedExperts(cache)


def _expert_layers(program: Program, sizes: Mapping[Weight, int]) -> tuple[ExpertLayer, ...]:
    """Returns the layers in the order of the executor; raises ConfigError if there are none."""
    by_route: dict[Value, list[GroupedLinear]] = {}
    for op in sort_token_ops_first(program).ops:
        if isinstance(op, GroupedLinear):
            by_route.setdefault(op.ids, []).append(op)
    if not by_route:
        raise ConfigError(
            f"weights_schedule: experts requires a mixture of experts, {program.name} has none",
            hint="use weights_schedule pinned",
        )
    layers = []
    for ops in by_route.values():
        num_experts = ops[0].weight.shape[0]
        record = sum(
            round_up(sizes[weight] // num_experts, LINE) for op in ops for weight in op.matrices
        )
        layers.append(ExpertLayer(tuple(ops), num_experts, record))
    return tuple(layers)


def _other_bytes(program: Program, sizes: Mapping[Weight, int], experts: frozenset[Weight]) -> int:
    """Returns the bytes in memory of the weights that are not experts: matmuls are padded."""
    num_matmuls = sum(isinstance(op, PRODUCTS) for op in program.ops)
    heads = sum(
        LINE * weight.shape[0]
        for op in program.ops
        if isinstance(op, PRODUCTS)
        for weight in get_matrices(op)
        if len(weight.shape) > 2 and weight not in experts
    )
    rest = sum(size for weight, size in sizes.items() if weight not in experts)
    return rest + num_matmuls * (ALIGN + 4 * LINE) + heads


def _read_bytes(layers: Sequence[ExpertLayer]) -> int:
    """Returns the size of the largest read: one expert."""
    return round_up(max(layer.record_bytes for layer in layers), ALIGN)


def _plan_slots(
    layers: Sequence[ExpertLayer], memory_bytes: int, other_bytes: int
) -> tuple[list[int], int]:
    """Returns the number of experts of each layer that are kept in memory, and the bytes of all
    parts of the cache. Each layer keeps the same fraction of its experts.
    """
    record = max(layer.record_bytes for layer in layers)
    landing = max(layer.num_bytes for layer in layers)
    fixed = landing + record + LINE + DEPTH * (_read_bytes(layers) + 2 * ALIGN)
    least = fixed + sum(layer.record_bytes for layer in layers)
    cache_bytes = memory_bytes - other_bytes
    if cache_bytes < least:
        needed = other_bytes + least
        raise ConfigError(
            f"weights_memory_bytes: got {format_bytes(memory_bytes)}, expected at least"
            f" {format_bytes(needed)}: the weights besides the experts"
            f" ({format_bytes(other_bytes)}), the experts of one layer ({format_bytes(landing)}),"
            " one expert of each layer and read buffers",
            hint=f"set weights_memory_bytes to {needed} or more, or weights_schedule to pinned",
        )
    share = min(1.0, (cache_bytes - fixed) / sum(layer.num_bytes for layer in layers))
    slots = [max(1, int(share * layer.num_experts)) for layer in layers]
    kept = sum(count * each.record_bytes for count, each in zip(slots, layers, strict=True))
    return slots, fixed + kept


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a unit with equal parts for all experts."""

    data: memoryview
    num_bytes: int
    """Bytes of one expert."""
    start: int
    """Offset in the unit."""

    def of_expert(self, expert: int) -> memoryview:
        return self.data[expert * self.num_bytes : (expert + 1) * self.num_bytes]


def _split(unit: PackedUnit, num_experts: int) -> list[_Piece]:
    """Returns the pieces of a unit: one per matrix, or one for a gate and its interleaved up
    projection.
    """
    for index, tiles in enumerate(unit.tiles):
        if tiles.layout != unit.tiles[index // num_experts * num_experts].layout:
            raise ConfigError(
                "weights_schedule: experts requires the same format for all experts of a matrix",
                hint="use weights_schedule pinned",
            )
    starts = [tiles.offset for tiles in unit.tiles[::num_experts]]
    whole = [starts[0]] if unit.is_interleaved else starts
    view = memoryview(unit.data)
    return [
        _Piece(view[start:end], (end - start) // num_experts, start)
        for start, end in pairwise([*whole, unit.num_bytes])
    ]


def _placed(
    unit: PackedUnit, pieces: Sequence[_Piece], num_experts: int, offset: int
) -> list[PlacedTiles]:
    """Returns the tiles of each matrix in a record in which the unit's pieces start at `offset`."""
    placed = []
    for first in unit.tiles[::num_experts]:
        before = [piece for piece in pieces if piece.start <= first.offset]
        at = offset + sum(piece.num_bytes for piece in before[:-1])
        placed.append(PlacedTiles(at + first.offset - before[-1].start, first.layout))
    return placed

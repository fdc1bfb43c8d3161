"""Weights in the kernels' tiles: loads each weight once and packs it for the ops that read it.

Owns the packed tiles and the floats of norms and biases. formats.py lists formats,
csrc/kernels/weights.h defines tile layouts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.executor.base import LoadWeight
from octavo.executor.native.extension import native_module
from octavo.executor.native.formats import (
    RowTypeOf,
)
from octavo.program.expert_ops import GroupedLinear
from octavo.program.family_ops import PositionScores
from octavo.program.ops import HeadLinear, Linear
from octavo.program.position_tables import position_table
from octavo.program.program import Weight
from octavo.quant.blocks import BlockWeight, StoredWeight
from octavo.quant.packed import Levels, PackedWeight

PACKED_AT_ONCE = 64 << 20
"""Tile bytes that are packed in one batch by all threads; the source weights stay in memory until
then.
"""


SMALL_SPAN = 256
"""Inputs per factor of small scales."""
SMALL_TOP = 127
"""Largest small scale."""


@dataclass(frozen=True, slots=True)
class NativeTiles:
    """A weight in the kernels' tiles."""

    handle: Any
    """The extension's PackedTiles."""
    row_type: str
    """Activation type of its matmuls at this level (`RowType` in csrc/kernels/activations.h)."""
    permutation: NDArray[np.int32] | None = None
    """Original input of each column, if permuted (GPTQ act-order)."""

    @property
    def num_bytes(self) -> int:
        return int(self.handle.num_bytes)


class NativeWeights:
    """Weights of one Program: tiles for matmuls and tables, floats for norms and biases."""

    def __init__(
        self,
        device: Any,
        load: LoadWeight,
        dtype: str,
        *,
        apart: bool = False,
        by_columns: Collection[Weight] = (),
    ) -> None:
        """`dtype` is the target of plain weights.

        With `apart`, tiles have separate memory, which is freed together with them. `by_columns`
        lists weights to store by columns if possible, because matmuls read few of them.
        """
        self._by_columns = frozenset(by_columns)
        self._row_type_of: RowTypeOf = device.row_type
        self._load = load
        self._dtype = dtype
        self._packer = native_module().Packer(device, apart=apart)
        self._tiles: dict[Weight, NativeTiles] = {}
        self._experts: dict[Weight, list[NativeTiles]] = {}
        """Matrices of each expert, or of each head."""
        self._floats: dict[Weight, NDArray[np.float32]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tiles and floats."""
        experts = (tiles for expert_tiles in self._experts.values() for tiles in expert_tiles)
        return sum(tiles.num_bytes for tiles in (*self._tiles.values(), *experts)) + sum(
            array.nbytes for array in self._floats.values()
        )

    def tiles(self, weight: Weight) -> NativeTiles:
        """Returns a weight's tiles, packed now or at the next `pack`."""
        self._pack_many()
        if weight not in self._tiles:
            by_columns = weight in self._by_columns
            self._tiles[weight] = self._make_tiles(self._load(weight), by_columns=by_columns)
        return self._tiles[weight]

    def table(self, weight: Weight) -> NativeTiles:
        """Returns the tiles of an embedding table."""
        return _in_order(weight, self.tiles(weight))

    def gate_and_up(self, gate: Weight, up: Weight) -> list[NativeTiles]:
        """Returns the tiles of a gate and its up projection, which one matmul reads together.

        They are interleaved if they have the same layout.
        """
        if gate == up or gate in self._tiles or up in self._tiles:
            return [self.tiles(gate), self.tiles(up)]
        self._pack_many()
        pair = self._pair(
            [self._load(weight) for weight in (gate, up)],
            by_columns={gate, up} <= self._by_columns,
        )
        first, second = (tiles.permutation for tiles in pair)
        if first is None or second is None or not np.array_equal(first, second):
            pair = [_in_order(gate, pair[0]), _in_order(up, pair[1])]
        self._tiles[gate], self._tiles[up] = pair
        return pair

    def _pair(self, stored: list[StoredWeight], *, by_columns: bool = False) -> list[NativeTiles]:
        pair = [self._make_tiles(weight, by_columns=by_columns) for weight in stored]
        self._packer.interleave(*(tiles.handle for tiles in pair))
        return pair

    def experts(self, weight: Weight) -> list[NativeTiles]:
        """Returns the tiles of each expert of a weight `[E, out, in]`."""
        if weight not in self._experts:
            self._pack_many()
            stored = self._load(weight)
            self._experts[weight] = [
                _in_order(weight, self._make_tiles(stored.matrix(e)))
                for e in range(weight.shape[0])
            ]
        return self._experts[weight]

    def experts_gate_and_up(
        self, gate: Weight, up: Weight
    ) -> tuple[list[NativeTiles], list[NativeTiles]]:
        """Returns each expert's gate and up tiles, laid out as by `gate_and_up`."""
        if gate == up or gate in self._experts or up in self._experts:
            return self.experts(gate), self.experts(up)
        stored = [self._load(weight) for weight in (gate, up)]
        pairs = []
        for e in range(gate.shape[0]):
            self._pack_many()
            pair = self._pair([weight.matrix(e) for weight in stored])
            pairs.append([_in_order(gate, tiles) for tiles in pair])
        self._experts[gate] = [first for first, _ in pairs]
        self._experts[up] = [second for _, second in pairs]
        return self._experts[gate], self._experts[up]

    def heads(self, op: HeadLinear) -> list[NativeTiles]:
        """Returns the tiles of each head; a transposed matrix is stored as floats."""
        if op.weight not in self._experts:
            self._pack_many()
            stored = self._load(op.weight)
            rows = op.weight.shape[0] // op.num_heads
            parts = [stored.rows(slice(h * rows, (h + 1) * rows)) for h in range(op.num_heads)]
            if op.transposed:
                parts = [_transpose(part) for part in parts]
            self._experts[op.weight] = [
                _in_order(op.weight, self._make_tiles(part)) for part in parts
            ]
        return self._experts[op.weight]

    def position_table(self, op: PositionScores) -> list[NativeTiles]:
        """Returns the fp32 tiles of each head's position table."""
        self._pack_many()
        table = position_table(op, lambda weight: self._load(weight).dequantize()).astype(
            np.float32
        )
        return [self._make_tiles(PackedWeight.plain(rows)) for rows in table]

    def of_product(self, op: Linear | GroupedLinear | HeadLinear) -> list[NativeTiles]:
        """Returns all tiles of a matmul's weights, gates before up projections."""
        if isinstance(op, HeadLinear):
            return self.heads(op)
        if isinstance(op, Linear):
            if op.gate is not None:
                return self.gate_and_up(*op.weights_)
            return [self.tiles(weight) for weight in op.weights_]
        if op.up is None:
            return self.experts(op.weight)
        gates, ups = self.experts_gate_and_up(op.weight, op.up)
        return gates + ups

    def adopt(self, op: Linear | GroupedLinear | HeadLinear, handles: Sequence[Any]) -> None:
        """Assigns existing tiles to a matmul's weights, in the order of `of_product`, without
        loading.
        """
        tiles = [NativeTiles(handle, self._row_type_of(handle.code)) for handle in handles]
        if isinstance(op, Linear):
            self._tiles |= zip(op.weights_, tiles, strict=True)
            return
        weights = (op.weight,) if isinstance(op, HeadLinear) else op.matrices
        num_per_weight = len(tiles) // len(weights)
        for index, weight in enumerate(weights):
            self._experts[weight] = tiles[index * num_per_weight : (index + 1) * num_per_weight]

    def adopt_tiles(self, weight: Weight, handle: Any) -> None:
        """Assigns existing tiles to a weight, without loading it."""
        self._tiles[weight] = NativeTiles(handle, self._row_type_of(handle.code))

    def reads_fp32(self, op: Linear | GroupedLinear | HeadLinear) -> bool:
        """Whether a matmul reads unquantized activations."""
        if isinstance(op, Linear):
            tiles = [self.tiles(weight) for weight in op.weights_]
        elif isinstance(op, GroupedLinear):
            tiles = [self.experts(weight)[0] for weight in op.matrices]
        else:
            tiles = self.heads(op)
        return all(native_tiles.row_type == "fp32" for native_tiles in tiles)

    def _pack_many(self) -> None:
        if self._packer.num_waiting_bytes >= PACKED_AT_ONCE:
            self._packer.run()

    def pack(self) -> None:
        self._packer.run()

    def floats(self, weight: Weight) -> NDArray[np.float32]:
        if weight not in self._floats:
            self._floats[weight] = np.ascontiguousarray(self._load(weight).dequantize())
        return self._floats[weight]

    def _make_tiles(self, stored: StoredWeight, *, by_columns: bool = False) -> NativeTiles:
        handle = add_weight(self._packer, stored, self._dtype, by_columns=by_columns)
        permutation = stored.input_permutation if isinstance(stored, PackedWeight) else None
        return NativeTiles(handle, self._row_type_of(handle.code), permutation)


def _in_order(weight: Weight, tiles: NativeTiles) -> NativeTiles:
    """Returns the tiles if their columns are unpermuted.

    Raises UnsupportedModel otherwise: only plain matmuls support permuted inputs.
    """
    if tiles.permutation is None:
        return tiles
    raise UnsupportedModel(
        f"{weight.name}: the native backend supports permuted inputs (act-order) for plain"
        f" matmuls, and for a gate and up projection with the same order",
        hint="use --dtype bfloat16 to dequantize the weights while loading",
    )


def _transpose(matrix: StoredWeight) -> PackedWeight:
    if matrix.is_float:
        values: NDArray = matrix.packed().codes
    else:
        values = matrix.dequantize().astype(ml_dtypes.bfloat16)
    return PackedWeight.plain(np.ascontiguousarray(values.T))


def add_weight(
    packer: Any,
    stored: StoredWeight,
    dtype: str = "auto",
    *,
    by_columns: bool = False,
) -> Any:
    """Adds a weight to a packer and returns its PackedTiles, filled by the packer's `run`.

    Floats become `dtype` unless it is "auto". `by_columns` stores codes with one scale per output
    by columns. Scales of two levels stay bytes with factors.
    """
    if isinstance(stored, PackedWeight) and stored.is_float:
        code = {"float32": "fp32", "bfloat16": "bf16"}.get(dtype)
        return packer.values(_get_array_and_type(stored.codes), code or stored.code)
    if isinstance(stored, PackedWeight) and (code := _float_code(stored)):
        return packer.float_codes(
            **_float_fields(stored), code=code, group=stored.group, num_inputs=stored.shape[-1]
        )
    return packer.codes(
        **_fields(stored),
        group=stored.group,
        num_inputs=stored.shape[-1],
        small_levels=_has_small_levels(stored),
        whole_rows=_has_whole_rows(stored),
        by_columns=by_columns,
    )


def _float_code(stored: PackedWeight) -> str | None:
    """Returns the code of float codes; None for integer codes."""
    if stored.code == "e4m3":
        return "e4m3"
    return "f4" if stored.lookup is not None and not stored.has_whole_lookup else None


def _has_small_levels(stored: StoredWeight) -> bool:
    """Whether scales and mins are small integers with a factor per 256 inputs."""
    if isinstance(stored, BlockWeight):
        return stored.layout.super_scales is not None
    if stored.scales is None or stored.scales.super_scale is None:
        return False
    levels = [stored.scales] + ([] if stored.mins is None else [stored.mins])
    return stored.shape[-1] % SMALL_SPAN == 0 and all(
        level.super_scale is not None
        and level.span * stored.group == SMALL_SPAN
        and level.values.dtype.itemsize == 1
        and (level.values.dtype == np.int8 or int(level.values.max(initial=0)) <= SMALL_TOP)
        for level in levels
    )


def _has_whole_rows(stored: StoredWeight) -> bool:
    """Whether a weight has one scale per output."""
    return isinstance(stored, PackedWeight) and stored.activation == "per_token"


def _fields(weight: StoredWeight) -> dict[str, Any]:
    """Returns codes, scales and mins for `Packer.codes`: views into file blocks, or arrays."""
    if isinstance(weight, BlockWeight):
        return _block_fields(weight)
    _refuse_without_tiles(weight)
    assert weight.scales is not None
    return _code_fields(weight) | {
        "is_signed": weight.codes.dtype == np.int8,
        "scales": _get_array_and_type(weight.scales.values),
        "mins": _values(weight.mins),
        "zeros": None if weight.zeros is None else _get_array_and_type(weight.zeros),
        "table": [] if weight.lookup is None else weight.lookup.astype(np.int8).tolist(),
        "super_scales": _supers(weight.scales),
        "super_mins": _supers(weight.mins),
        "zero_point": weight.zero_point,
    }


def _float_fields(weight: PackedWeight) -> dict[str, Any]:
    """Returns float codes and their scales for `Packer.float_codes`."""
    assert weight.scales is not None
    if weight.code == "e4m3" and (weight.codes.view(np.uint8) & 0x7F == 0x7F).any():
        raise WeightMismatch(
            f"a weight of shape {list(weight.shape)} holds e4m3 codes that are NaN",
            hint="the file is damaged; download the model again",
        )
    return _code_fields(weight) | {
        "scales": _get_array_and_type(weight.scales.values),
        "numbers": [] if weight.lookup is None else weight.lookup.tolist(),
    }


def _code_fields(weight: PackedWeight) -> dict[str, Any]:
    """Returns code rows and their bit layout."""
    half = weight.group // 2 if weight.nibbles == "halves" else 1
    inputs, plane = (32, (0, 8, 32)) if weight.bits != 4 else (max(2 * half, 32), (0, 4, half))
    return {
        "codes": _rows(weight.codes).view(np.uint8),
        "block": (inputs, inputs * plane[1] // 8),
        "planes": [plane],
    }


def _refuse_without_tiles(weight: PackedWeight) -> None:
    """Rejects codes without tiles, because `prepare_program` may be called without `check`."""
    if weight.has_whole_lookup or (weight.lookup is None and weight.code in ("int", "uint")):
        return
    raise UnsupportedModel(
        f"the native backend does not support {weight.code} codes of {weight.bits} bits;"
        f" supported: int, uint, e4m3 and lookup tables",
        hint="use --dtype bfloat16 to dequantize the weights while loading",
    )


def _block_fields(weight: BlockWeight) -> dict[str, Any]:
    layout, blocks = weight.layout, weight.blocks
    numbers = {
        "scales": layout.scales,
        "mins": layout.mins,
        "super_scales": layout.super_scales,
        "super_mins": layout.super_mins,
    }
    return {
        "codes": blocks.reshape(len(blocks), -1),
        "block": (weight.block_size, blocks.shape[-1]),
        "planes": [(plane.start, plane.bits, plane.run) for plane in layout.planes],
        "is_signed": layout.bits == 8,
        "zero_point": layout.zero_point,
        "zeros": None,
        "table": [],
    } | {
        name: None if one is None else (one.view(blocks), one.kind) for name, one in numbers.items()
    }


def _rows(array: NDArray) -> NDArray:
    """Makes each row contiguous."""
    return array if array.strides[-1] == array.itemsize else np.ascontiguousarray(array)


def _get_array_and_type(array: NDArray) -> tuple[NDArray, str]:
    """Returns the array and its type name; bfloat16 is passed as uint16, because the bindings do
    not support it.
    """
    name = array.dtype.name
    return _rows(array.view(np.uint16) if name == "bfloat16" else array), name


def _values(levels: Levels | None) -> tuple[NDArray, str] | None:
    return None if levels is None else _get_array_and_type(levels.values)


def _supers(levels: Levels | None) -> tuple[NDArray, str] | None:
    return (
        None
        if levels is None or levels.super_scale is None
        else _get_array_and_type(levels.super_scale)
    )

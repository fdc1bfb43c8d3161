"""The records of feed-forward layers that are read neuron by neuron: what a record holds, how many
of them stay in memory, and how they are opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import ConfigError
from octavo.config.sizes import format_bytes
from octavo.engine.protocol.step import WeightArrivals
from octavo.executor.base import LoadWeight
from octavo.executor.native.extension import native_module
from octavo.executor.native.formats import TILE
from octavo.executor.native.lowering_context import LoweringContext
from octavo.executor.native.weights import NativeWeights
from octavo.program.ops import Foresee, Gate
from octavo.program.passes.offload import ALIGN
from octavo.sparsity.neurons import LINE, NeuronLayer, Neurons, round_up

READ_BYTES = 256 << 10
"""Most bytes of one read."""

GAP_BYTES = 32 << 10
"""Bytes that a read passes over rather than end: another read takes about as long on the disks that
were measured."""

DEPTH = 16
"""Number of reads in flight, each in a thread of its own."""


@dataclass(frozen=True, slots=True)
class NeuronCacheOptions:
    """Feed-forward weights of which each neuron's lie together in the file and are read when a step
    uses them.
    """

    cache_bytes: int
    """Most bytes of them in memory, of those for weights."""
    window: int = 0
    """Steps for which a neuron that none has used stays in memory; 0: as long as there is room."""
    hot: Mapping[str, Sequence[int]] | None = None
    """Neurons by the name of their last product's matrix, the most used first, of which each layer
    pins as many as half of its slots; None: none is pinned."""


@dataclass(frozen=True, slots=True)
class NeuronPlan:
    """The layers of a Program that are read neuron by neuron, and their slots in memory."""

    layers: tuple[NeuronLayer, ...]
    num_slots: tuple[int, ...]
    """Records of each layer that have room, beside those that are pinned."""
    pinned: tuple[tuple[int, ...], ...]
    """Neurons of each layer that stay for good."""
    memory_bytes: int
    """Bytes of the slots, the landing place and the buffers of reads."""

    @property
    def scales_bytes(self) -> int:
        """Bytes of the scales, which are always in memory."""
        return 4 * sum(layer.num_scales for layer in self.layers)


def plan_neurons(layers: Sequence[NeuronLayer], options: NeuronCacheOptions) -> NeuronPlan:
    """Shares out the memory of the cache: each layer keeps the same share of its neurons, and pins
    half of these where it is told which.

    ConfigError, with the least that works, where two layers do not fit.
    """
    cache_bytes = options.cache_bytes
    record = max(layer.record_bytes for layer in layers)
    landing = max(layer.all_records_bytes for layer in layers)
    fixed = DEPTH * (READ_BYTES + 2 * ALIGN) + landing + record + LINE
    least = fixed + landing
    if cache_bytes < least:
        raise ConfigError(
            f"neuron_cache_bytes: got {format_bytes(cache_bytes)}, needed are at least"
            f" {format_bytes(least)}: two layers of neurons and the buffers of reads",
            hint=f"set neuron_cache_bytes to {least} or more",
        )
    share = min(1.0, (cache_bytes - fixed) / sum(layer.all_records_bytes for layer in layers))
    slots = tuple(max(1, int(share * layer.num_neurons)) for layer in layers)
    kept = sum(count * each.record_bytes for count, each in zip(slots, layers, strict=True))
    pinned = tuple(
        _pinned(layer, options.hot, count // 2) for layer, count in zip(layers, slots, strict=True)
    )
    own = tuple(count - len(each) for count, each in zip(slots, pinned, strict=True))
    return NeuronPlan(tuple(layers), own, pinned, fixed + kept)


def _pinned(
    layer: NeuronLayer, hot: Mapping[str, Sequence[int]] | None, count: int
) -> tuple[int, ...]:
    if hot is None:
        return ()
    name = layer.op.down.name
    if len(hot.get(name, ())) != layer.num_neurons:
        raise ConfigError(
            f"hot_neurons: the file says nothing of the {layer.num_neurons} inputs of {name}",
            hint="calibrate this model",
        )
    return tuple(hot[name][:count])


def records_of(matrices: Sequence[bytes], layer: NeuronLayer) -> bytes:
    """Returns a layer's bytes in the file, from the tiles of its matrices, the last product's
    last.
    """
    records, scales = neuron_records(matrices, layer)
    data = records.tobytes() + scales.tobytes()
    return data + bytes(layer.num_bytes - len(data))


def neuron_records(
    matrices: Sequence[bytes], layer: NeuronLayer
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Returns a layer's records `[neurons, record_bytes]` and its scales `[num_scales]`."""
    records = np.zeros((layer.num_neurons, layer.record_bytes), np.uint8)
    scales = []
    *rows, down = matrices
    for index, tiles in enumerate(rows):
        codes, of_rows = _untiled(tiles, layer.num_neurons, layer.num_inputs)
        first = index * layer.row_bytes
        records[:, first : first + layer.num_inputs] = codes
        scales.append(of_rows)
    codes, of_outputs = _untiled(down, layer.num_outputs, layer.num_neurons)
    records[:, layer.rows_bytes : layer.rows_bytes + layer.num_outputs] = codes.T
    return records, np.concatenate([*scales, of_outputs])


def _untiled(
    tiles: bytes, num_rows: int, num_inputs: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Returns the codes `[rows, inputs]` and the scales `[rows]` of i8 tiles, in which the quads of
    inputs of sixteen rows lie side by side.
    """
    padded = round_up(num_inputs, LINE)
    whole = np.frombuffer(tiles, np.uint8).reshape(-1, TILE * padded + 4 * TILE)
    quads = whole[:, : TILE * padded].reshape(len(whole), padded // 4, TILE, 4)
    codes = quads.transpose(0, 2, 1, 3).reshape(-1, padded)[:num_rows, :num_inputs]
    scales = np.ascontiguousarray(whole[:, TILE * padded :]).view(np.float32).reshape(-1)
    return codes, scales[:num_rows]


class OpenedNeurons:
    """The records of a prepared Program, as lowering needs them."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        """The extension's NeuronCache."""
        self.columns: list[Any] = []
        """The PackedTiles of each layer's last product."""
        self.layers: dict[int, tuple[int, list[NDArray[np.float32]]]] = {}
        """Index in the cache, and the scales of the rows of each matrix, by the identity of the
        op."""
        self.of_gate: dict[str, int] = {}
        """Index in the cache of layers with gate rows, by the name of that matrix."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the records but for the columns, which count as the last products' tiles."""
        return int(self.cache.memory_bytes) - sum(int(each.num_bytes) for each in self.columns)

    def add(self, layer: NeuronLayer, scales: NDArray[np.float32]) -> None:
        """Takes in the scales of the next layer of the cache."""
        index = len(self.columns)
        of_rows, of_outputs = np.split(scales, [layer.num_scales - layer.num_outputs])
        self.columns.append(self.cache.columns(index, of_outputs))
        if layer.op.gate_row is not None:
            self.of_gate[layer.op.gate_row.name] = index
        self.layers[id(layer.op)] = (index, list(of_rows.reshape(-1, layer.num_neurons)))

    def arrivals(self) -> WeightArrivals:
        """Returns what has been read from the file so far."""
        cache = self.cache
        return WeightArrivals(
            cache.bytes_read,
            wait_s=cache.wait_seconds,
            neurons_found=cache.num_found,
            neurons_read=cache.num_read,
            neurons_foreseen=cache.num_foreseen,
            neurons_foreseen_used=cache.num_foreseen_used,
        )

    def lowering(self, context: LoweringContext) -> NeuronLowering:
        """Makes what lowers the ops that read the records."""
        return NeuronLowering(self, context)


class NeuronLowering:
    """Lowers the ops that read records of neurons. Part of `Lowering`."""

    def __init__(self, neurons: OpenedNeurons, context: LoweringContext) -> None:
        self._neurons = neurons
        self._context = context
        self._native = context.native
        self._add, self._span = context.builder.add, context.span

    def lower_Neurons(self, op: Neurons) -> None:
        layer, scales = self._neurons.layers[id(op)]
        self._add(
            self._native.NeuronsSpec(
                cache=self._neurons.cache,
                layer=layer,
                opened=self._span(op.opened),
                threshold=op.threshold,
                out=self._context.span_or_none(op.out),
                x=self._span(op.opened if op.x is None else op.x),
                norm=self._context.input_norm(op.norm),
                x_threshold=op.x_threshold,
                up_scales=scales[-1] if scales else None,
                up_bias=self._context.floats_or_none(op.up_bias),
                gate_scales=None if op.gate_row is None else scales[0],
                gate_bias=self._context.floats_or_none(op.gate_bias),
                gate=self._context.gate_spec(op.gate or Gate("relu", up_offset=op.up_offset)),
            )
        )

    def lower_Foresee(self, op: Foresee) -> None:
        self._add(
            self._native.ForeseeSpec(
                cache=self._neurons.cache,
                layer=self._neurons.of_gate[op.gate],
                scores=self._span(op.scores),
            )
        )


class NeuronRecords:
    """The layers of an optimized Program that are computed neuron by neuron. Implements
    `WeightRecords`.
    """

    def __init__(self, layers: tuple[NeuronLayer, ...], options: NeuronCacheOptions | None) -> None:
        """With options the records lie in a file, and memory caches some; else all are in
        memory.
        """
        self.weights = frozenset(weight for each in layers for weight in each.op.matrices)
        self.in_file = options is not None
        self._layers = layers
        self._window = 0 if options is None else options.window
        self._plan = None if options is None else plan_neurons(layers, options)
        self.sizes: Sequence[int] = [layer.num_bytes for layer in layers]
        self.memory_bytes = (
            sum(self.sizes)
            if self._plan is None
            else self._plan.memory_bytes + self._plan.scales_bytes
        )
        self.key: Sequence[tuple[str, int]] = [
            (each.op.down.name, each.record_bytes) for each in layers
        ]
        self.read_in_part: Mapping[str, int] = {
            "neurons": sum(layer.all_records_bytes for layer in layers)
        }

    def data(self, index: int, device: Any, load: LoadWeight, dtype: str) -> bytes:
        """Returns the bytes of a layer's records for the file."""
        layer = self._layers[index]
        return records_of(_tiles_of(device, layer, load, dtype), layer)

    def open_file(self, path: Path, offsets: Sequence[int], into: NativeWeights) -> OpenedNeurons:
        """Opens the records of each layer at its offset."""
        assert self._plan is not None, "they lie in a file"
        return self._adopted(open_neurons(path, self._plan, offsets, self._window), into)

    def open_in_memory(
        self, device: Any, load: LoadWeight, dtype: str, into: NativeWeights
    ) -> OpenedNeurons:
        """Packs the records into memory."""
        opened = neurons_in_memory(
            self._layers, lambda layer: _tiles_of(device, layer, load, dtype)
        )
        return self._adopted(opened, into)

    def _adopted(self, opened: OpenedNeurons, into: NativeWeights) -> OpenedNeurons:
        """Gives the last product of each layer the columns of its neurons."""
        for layer, columns in zip(self._layers, opened.columns, strict=True):
            into.adopt_tiles(layer.op.down, columns)
        return opened


def _tiles_of(device: Any, layer: NeuronLayer, load: LoadWeight, dtype: str) -> list[bytes]:
    """Returns the tiles of the matrices of a layer that is read neuron by neuron."""
    weights = NativeWeights(device, load, dtype, apart=True)
    handles = [weights.table(each).handle for each in layer.op.matrices]
    weights.pack()
    return [handle.raw(handle.num_bytes) for handle in handles]


def open_neurons(
    path: Path, plan: NeuronPlan, offsets: Sequence[int], window: int
) -> OpenedNeurons:
    """Opens the records of a plan's layers, each at its offset in a file."""
    cache = native_module().NeuronCache(
        str(path),
        [
            (offset, each.num_neurons, each.rows_bytes, each.record_bytes, slots, list(pinned))
            for offset, each, slots, pinned in zip(
                offsets, plan.layers, plan.num_slots, plan.pinned, strict=True
            )
        ],
        num_threads=DEPTH,
        most_bytes=READ_BYTES,
        gap_bytes=GAP_BYTES,
        window=window,
    )
    opened = OpenedNeurons(cache)
    for offset, layer in zip(offsets, plan.layers, strict=True):
        place = offset + layer.all_records_bytes
        opened.add(layer, np.fromfile(path, np.float32, layer.num_scales, offset=place))
    return opened


def neurons_in_memory(
    layers: Sequence[NeuronLayer], tiles_of: Callable[[NeuronLayer], Sequence[bytes]]
) -> OpenedNeurons:
    """Makes the records of all layers in memory, from the tiles of each layer's matrices."""
    cache = native_module().NeuronCache.in_memory(
        [(each.num_neurons, each.rows_bytes, each.record_bytes) for each in layers]
    )
    opened = OpenedNeurons(cache)
    for index, layer in enumerate(layers):
        records, scales = neuron_records(tiles_of(layer), layer)
        cache.fill(index, records)
        opened.add(layer, scales)
    return opened

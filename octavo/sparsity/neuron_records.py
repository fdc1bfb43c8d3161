"""Neuron records of feed-forward layers: their contents, memory plan and opening."""

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
from octavo.executor.native.weight_file import PlacedTiles, StoredUnit
from octavo.executor.native.weights import NativeWeights
from octavo.program.ops import Gate, PrefetchNeurons
from octavo.program.passes.offload import ALIGN
from octavo.sparsity.neurons import LINE, NeuronLayer, Neurons, round_up

READ_BYTES = 256 << 10
"""Maximum size of a read, in bytes."""

GAP_BYTES = 32 << 10
"""Maximum gap in bytes that is read along with its neighbours: on the disks that were measured, a
separate read takes about as long.
"""

DEPTH = 16
"""Reads in flight; each uses a thread."""


@dataclass(frozen=True, slots=True)
class NeuronCacheOptions:
    """Feed-forward weights stored neuron by neuron in a file and read on use."""

    cache_bytes: int
    """Memory for cached neurons, in bytes, part of the memory for weights."""
    window: int = 0
    """Steps after which an unused neuron is evicted; 0: only when space is needed."""
    hot: Mapping[str, Sequence[int]] | None = None
    """Most used neurons of each down projection, in order; each layer pins up to half of its slots
    with them. None: nothing is pinned.
    """


@dataclass(frozen=True, slots=True)
class NeuronPlan:
    """Layers that are read neuron by neuron, and their slots in memory."""

    layers: tuple[NeuronLayer, ...]
    num_slots: tuple[int, ...]
    """Unpinned record slots of each layer."""
    pinned: tuple[tuple[int, ...], ...]
    """Pinned neurons of each layer."""
    memory_bytes: int
    """Bytes of the slots, the staging area and the read buffers."""

    @property
    def scales_bytes(self) -> int:
        """Bytes of the scales, which always stay in memory."""
        return 4 * sum(layer.num_scales for layer in self.layers)


def plan_neurons(layers: Sequence[NeuronLayer], options: NeuronCacheOptions) -> NeuronPlan:
    """Divides the cache among the layers: each layer caches the same fraction of its neurons and
    pins up to half of these.

    Raises ConfigError, with the smallest allowed size, if two layers do not fit.
    """
    cache_bytes = options.cache_bytes
    record = max(layer.record_bytes for layer in layers)
    landing = max(layer.all_records_bytes for layer in layers)
    fixed = DEPTH * (READ_BYTES + 2 * ALIGN) + landing + record + LINE
    min_bytes = fixed + landing
    if cache_bytes < min_bytes:
        raise ConfigError(
            f"neuron_cache_bytes: got {format_bytes(cache_bytes)}, expected at least"
            f" {format_bytes(min_bytes)}: two layers of neurons and the read buffers",
            hint=f"set neuron_cache_bytes to {min_bytes} or more",
        )
    share = min(1.0, (cache_bytes - fixed) / sum(layer.all_records_bytes for layer in layers))
    slots = tuple(max(1, int(share * layer.num_neurons)) for layer in layers)
    cached_bytes = sum(count * each.record_bytes for count, each in zip(slots, layers, strict=True))
    pinned = tuple(
        _pinned(layer, options.hot, count // 2) for layer, count in zip(layers, slots, strict=True)
    )
    own = tuple(count - len(each) for count, each in zip(slots, pinned, strict=True))
    return NeuronPlan(tuple(layers), own, pinned, fixed + cached_bytes)


def _pinned(
    layer: NeuronLayer, hot: Mapping[str, Sequence[int]] | None, count: int
) -> tuple[int, ...]:
    if hot is None:
        return ()
    name = layer.op.down.name
    if len(hot.get(name, ())) != layer.num_neurons:
        raise ConfigError(
            f"hot_neurons: the file has no data for the {layer.num_neurons} inputs of {name}",
            hint="calibrate this model: octavo calibrate MODEL --text FILE --out FILE",
        )
    return tuple(hot[name][:count])


def pack_records(matrices: Sequence[bytes], layer: NeuronLayer) -> bytes:
    """Returns a layer's bytes in the file; `matrices` are tiles, the down projection last."""
    records, scales = neuron_records(matrices, layer)
    data = records.tobytes() + scales.tobytes()
    return data + bytes(layer.num_bytes - len(data))


def neuron_records(
    matrices: Sequence[bytes], layer: NeuronLayer
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Returns a layer's records `[neurons, record_bytes] u8` and its scales `[num_scales] f32`."""
    records = np.zeros((layer.num_neurons, layer.record_bytes), np.uint8)
    scales = []
    *rows, down = matrices
    for index, tiles in enumerate(rows):
        codes, of_rows = _untile(tiles, layer.num_neurons, layer.num_inputs)
        first = index * layer.row_bytes
        records[:, first : first + layer.num_inputs] = codes
        scales.append(of_rows)
    codes, of_outputs = _untile(down, layer.num_outputs, layer.num_neurons)
    records[:, layer.rows_bytes : layer.rows_bytes + layer.num_outputs] = codes.T
    return records, np.concatenate([*scales, of_outputs])


def _untile(
    tiles: bytes, num_rows: int, num_inputs: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Returns codes `[rows, inputs]` and scales `[rows]` of i8 tiles (4 inputs of 16 rows
    interleaved).
    """
    padded = round_up(num_inputs, LINE)
    whole = np.frombuffer(tiles, np.uint8).reshape(-1, TILE * padded + 4 * TILE)
    quads = whole[:, : TILE * padded].reshape(len(whole), padded // 4, TILE, 4)
    codes = quads.transpose(0, 2, 1, 3).reshape(-1, padded)[:num_rows, :num_inputs]
    scales = np.ascontiguousarray(whole[:, TILE * padded :]).view(np.float32).reshape(-1)
    return codes, scales[:num_rows]


class OpenedNeurons:
    """Opened neuron records of a prepared Program, for lowering."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        """The extension's NeuronCache."""
        self.columns: list[Any] = []
        """PackedTiles of each layer's down projection."""
        self.layers: dict[int, tuple[int, list[NDArray[np.float32]]]] = {}
        """Index in the cache and row scales of each matrix, by op id."""
        self.of_gate: dict[str, int] = {}
        """Cache index of layers with gate rows, by the name of that matrix."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the records without their columns: these count as tiles of the down
        projections.
        """
        return int(self.cache.memory_bytes) - sum(
            int(columns.num_bytes) for columns in self.columns
        )

    def add(self, layer: NeuronLayer, scales: NDArray[np.float32]) -> None:
        """Adds the scales of the cache's next layer."""
        index = len(self.columns)
        of_rows, of_outputs = np.split(scales, [layer.num_scales - layer.num_outputs])
        self.columns.append(self.cache.columns(index, of_outputs))
        if layer.op.gate_row is not None:
            self.of_gate[layer.op.gate_row.name] = index
        self.layers[id(layer.op)] = (index, list(of_rows.reshape(-1, layer.num_neurons)))

    def arrivals(self) -> WeightArrivals:
        """Returns the counts of file reads and cache hits so far."""
        cache = self.cache
        return WeightArrivals(
            cache.bytes_read,
            wait_s=cache.wait_seconds,
            neurons_found=cache.num_found,
            neurons_read=cache.num_read,
            neurons_foreseen=cache.num_prefetched,
            neurons_foreseen_used=cache.num_prefetched_used,
        )

    def lowering(self, context: LoweringContext) -> NeuronLowering:
        return NeuronLowering(self, context)


class NeuronLowering:
    """Lowers the ops that read neuron records. Part of `Lowering`."""

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

    def lower_PrefetchNeurons(self, op: PrefetchNeurons) -> None:
        self._add(
            self._native.PrefetchNeuronsSpec(
                cache=self._neurons.cache,
                layer=self._neurons.of_gate[op.gate],
                scores=self._span(op.scores),
            )
        )


class NeuronRecords:
    """Layers of an optimized Program that are computed neuron by neuron. Implements
    `WeightRecords`.
    """

    def __init__(self, layers: tuple[NeuronLayer, ...], options: NeuronCacheOptions | None) -> None:
        """With `options` the records are in a file and memory caches some of them; otherwise all
        are in memory.
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

    def data(
        self, index: int, device: Any, load: LoadWeight, dtype: str
    ) -> tuple[bytes, Sequence[PlacedTiles]]:
        layer = self._layers[index]
        return pack_records(_make_tiles(device, layer, load, dtype), layer), ()

    def open_file(
        self, path: Path, units: Sequence[StoredUnit], into: NativeWeights
    ) -> OpenedNeurons:
        """Opens the records of each layer in the file."""
        assert self._plan is not None, "they lie in a file"
        offsets = [unit.offset for unit in units]
        return self._adopt(open_neurons(path, self._plan, offsets, self._window), into)

    def open_in_memory(
        self, device: Any, load: LoadWeight, dtype: str, into: NativeWeights
    ) -> OpenedNeurons:
        """Packs all records into memory."""
        opened = neurons_in_memory(
            self._layers, lambda layer: _make_tiles(device, layer, load, dtype)
        )
        return self._adopt(opened, into)

    def _adopt(self, opened: OpenedNeurons, into: NativeWeights) -> OpenedNeurons:
        """Uses the record columns as the tiles of each layer's down projection."""
        for layer, columns in zip(self._layers, opened.columns, strict=True):
            into.adopt_tiles(layer.op.down, columns)
        return opened


def _make_tiles(device: Any, layer: NeuronLayer, load: LoadWeight, dtype: str) -> list[bytes]:
    """Returns the tiles of a layer's matrices."""
    weights = NativeWeights(device, load, dtype, apart=True)
    handles = [weights.table(matrix).handle for matrix in layer.op.matrices]
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
    """Builds the records of all layers in memory from the tiles of their matrices."""
    cache = native_module().NeuronCache.in_memory(
        [(each.num_neurons, each.rows_bytes, each.record_bytes) for each in layers]
    )
    opened = OpenedNeurons(cache)
    for index, layer in enumerate(layers):
        records, scales = neuron_records(tiles_of(layer), layer)
        cache.fill(index, records)
        opened.add(layer, scales)
    return opened

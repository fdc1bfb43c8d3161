"""Feed-forward layers whose weights are read neuron by neuron: which layers, what a record holds,
and how many of them stay in memory.

A layer is split behind its gates, which say what a row uses: they are multiplied whole, and a
neuron's row of the up projection and its column of the last product lie together in a file. Where a
predictor says it, the row that makes the gate is part of the record, and no gate is computed that
nothing needs. Who reads them is csrc/core/neuron_cache.h; with a predictor they may all be in
memory. Source of the idea: LLM in a Flash (arXiv 2312.11514).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import BackendUnavailable, ConfigError
from octavo.config.sizes import format_bytes
from octavo.executor.base import NeuronCacheOptions
from octavo.executor.native.extension import native_module
from octavo.program.ops import Act, Gate, Linear, PreNorm
from octavo.program.passes.offload import ALIGN
from octavo.program.passes.skip_zeros import ZEROING
from octavo.program.program import Op, Program, Value, Weight

LINE = 64
"""Bytes of which a record's length and the place of its column are multiples."""

READ_BYTES = 256 << 10
"""Most bytes of one read."""

GAP_BYTES = 32 << 10
"""Bytes that a read passes over rather than end: another read takes about as long on the disks that
were measured."""

DEPTH = 16
"""Number of reads in flight, each in a thread of its own."""

TILE = 16
"""Outputs of a tile (csrc/kernels/table.h)."""

HINT = "leave neuron_cache_bytes out"


@dataclass(frozen=True, slots=True)
class Neurons(Op):
    """The part of a feed-forward layer between its gates and its last product, where a row's zeros
    say which neurons it uses: out = opened * (x @ up^T + bias + offset).

    `opened [T, F]` is f(gate), of which sparse rows lose what is smaller than `threshold`. Without
    an up projection it is what the last product reads, and there is no `out`. With a `gate_row` it
    is scores: f(gate) is computed here, of the neurons whose score is not negative in sparse rows,
    of all in the others.
    """

    opened: Value
    down: Weight
    """Matrix of the last product; its columns are read with the up projection's rows."""
    x: Value | None = None
    up: Weight | None = None
    up_bias: Weight | None = None
    norm: PreNorm | None = None
    out: Value | None = None
    up_offset: float = 0.0
    threshold: float = 0.0
    x_threshold: float = 0.0
    """Magnitude below which sparse rows take a number of x, after the norm, for zero."""
    gate_row: Weight | None = None
    """Matrix that makes the gate; its rows are parts of the records. None: `opened` is f(gate)."""
    gate_bias: Weight | None = None
    gate: Gate | None = None

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """Weights of which a record has a row each, and then the column of the last one."""
        rows = (each for each in (self.gate_row, self.up) if each is not None)
        return (*rows, self.down)


@dataclass(frozen=True, slots=True)
class NeuronLayer:
    """The records of one layer."""

    op: Neurons
    num_neurons: int
    num_inputs: int
    """Numbers of a row of the up projection; 0 without one."""
    num_outputs: int

    @property
    def num_rows(self) -> int:
        """Rows of matrices in a record: of the gate and of the up projection, where there are."""
        return len(self.op.matrices) - 1

    @property
    def row_bytes(self) -> int:
        return _round_up(self.num_inputs, LINE)

    @property
    def rows_bytes(self) -> int:
        """Bytes of a record in front of its column."""
        return self.num_rows * self.row_bytes

    @property
    def record_bytes(self) -> int:
        return self.rows_bytes + _round_up(self.num_outputs, LINE)

    @property
    def all_records_bytes(self) -> int:
        return self.num_neurons * self.record_bytes

    @property
    def num_scales(self) -> int:
        """Scales of the records, which lie behind them in the file and stay in memory: of each row
        of each matrix, then of each output.
        """
        return self.num_rows * self.num_neurons + self.num_outputs

    @property
    def num_bytes(self) -> int:
        """Bytes in the file, a multiple of ALIGN."""
        return _round_up(self.all_records_bytes + 4 * self.num_scales, ALIGN)


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


def split_neurons(program: Program) -> Program:
    """Splits the feed-forward layers of a fused Program whose zeros say what a row uses;
    ConfigError where it has none.
    """
    readers = Counter(value for op in program.ops for value in op.inputs)
    readers.update(program.outputs.values())
    downs = {op.x: op for op in program.ops if isinstance(op, Linear)}
    uses = Counter(weight for op in program.ops for weight in op.weights)
    ops: list[Op] = []
    for op in program.ops:
        down = _last_product(op, downs, readers)
        if down is None or any(uses[weight] > 1 for weight in (*op.weights, *down.weights_)):
            ops.append(op)
        else:
            ops += _split(op, down)
    if not any(isinstance(op, Neurons) for op in ops):
        raise ConfigError(
            f"neuron_cache_bytes: {program.name} has no feed-forward layer whose zeros say which"
            f" neurons a token uses: {' or '.join(ZEROING)} with ffn_sparsity exact, or gates with"
            " ffn_sparsity gate:SHARE or a sparsity_predictor",
            hint=HINT,
        )
    result = replace(program, ops=tuple(ops))
    result.check()
    return result


def neuron_layers(program: Program) -> tuple[NeuronLayer, ...]:
    """Returns the layers of a split Program, in its order."""
    return tuple(
        NeuronLayer(
            op,
            op.opened.width,
            0 if op.x is None else op.x.width,
            op.down.shape[0],
        )
        for op in program.ops
        if isinstance(op, Neurons)
    )


def check_neurons(program: Program, code_of: dict[Weight, str]) -> None:
    """Refuses layers whose weights have another code than i8: sums of other codes depend on their
    order.
    """
    for op in program.ops:
        if not isinstance(op, Neurons):
            continue
        name = "neuron_cache_bytes" if op.gate_row is None else "sparsity_predictor"
        for weight in op.matrices:
            if code_of[weight] != "i8":
                raise BackendUnavailable(
                    f"{name}: takes weights with one scale for each output, got"
                    f" {weight.name}, which is computed as {code_of[weight]}",
                    hint=f"set quantization to int8, or leave {name} out",
                )


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
    padded = _round_up(num_inputs, LINE)
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
    def rows_bytes(self) -> int:
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


def _last_product(op: Op, downs: dict[Value, Linear], readers: Counter[Value]) -> Linear | None:
    """Returns the product that alone reads what an op's zeros say which neurons it uses."""
    if not _makes_zeros(op) or len(op.outputs) != 1 or readers[op.outputs[0]] != 1:
        return None
    down = downs.get(op.outputs[0])
    if down is None or down.norm is not None or down.gate is not None or len(down.weights_) != 1:
        return None
    return down


def _makes_zeros(op: Op) -> bool:
    if not isinstance(op, Linear):
        return isinstance(op, Act) and op.activation in ZEROING
    if op.scores is not None:
        return True
    if op.gate is None:
        return op.activation in ZEROING and op.residual is None
    if op.gate.clamp is not None or op.gate.alpha != 1.0:
        return False
    return op.gate.activation in ZEROING or op.gate.threshold > 0


def _split(op: Op, down: Linear) -> tuple[Op, ...]:
    (out,) = op.outputs
    if not isinstance(op, Linear) or op.gate is None:
        return op, Neurons(out, down.weights_[0])
    gate, up = op.weights_
    gate_bias, up_bias = op.biases or (None, None)
    gated = partial(
        Neurons,
        down=down.weights_[0],
        x=op.x,
        up=up,
        up_bias=up_bias,
        norm=op.norm,
        out=out,
        x_threshold=op.threshold,
    )
    if op.scores is not None:
        return (gated(op.scores, gate_row=gate, gate_bias=gate_bias, gate=op.gate),)
    opened = replace(out, name=f"{out.name}.opened")
    gates = replace(
        op,
        outs=(opened,),
        weights_=(gate,),
        biases=() if gate_bias is None else (gate_bias,),
        activation=op.gate.activation,
        gate=None,
    )
    return gates, gated(opened, up_offset=op.gate.up_offset, threshold=op.gate.threshold)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit

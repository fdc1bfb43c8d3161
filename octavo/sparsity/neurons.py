"""Feed-forward layers that are read neuron by neuron: selects the layers and defines the contents
of a record.

A layer is split after its gates, which determine the neurons a row uses: gates are computed
completely; a neuron's up row and down column form one record. With a predictor the gate row is part
of the record, and unused gates are not computed. `csrc/runtime/neuron_cache.h` reads the records.
Source: LLM in a Flash (arXiv 2312.11514).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from octavo.api.errors import BackendUnavailable, ConfigError
from octavo.executor.native.check import check_activation
from octavo.executor.native.formats import RecordOp, TileFormat
from octavo.program.ops import Act, ActMul, Gate, Linear, PreNorm
from octavo.program.passes.offload import ALIGN
from octavo.program.program import Op, Program, Value, Weight
from octavo.sparsity.passes.skip_zeros import ZEROING

LINE = 64
"""Alignment in bytes of a record and of its column."""

HINT = "remove neuron_cache_bytes"


@dataclass(frozen=True, slots=True)
class Neurons(RecordOp):
    """The part of a feed-forward layer between gates and down projection, for the neurons in use.

    out = opened * (x @ up^T + bias + offset). `opened [T, F]` is f(gate); sparse rows zero values
    below `threshold`. Without an up projection the down projection reads `opened` and there is no
    `out`. With `gate_row`, `opened` holds predictor scores instead: f(gate) is computed here, in
    sparse rows only for neurons with a score of at least 0.
    """

    opened: Value
    down: Weight
    """Down projection; its columns are stored with the up projection's rows."""
    x: Value | None = None
    up: Weight | None = None
    up_bias: Weight | None = None
    norm: PreNorm | None = None
    out: Value | None = None
    up_offset: float = 0.0
    threshold: float = 0.0
    x_threshold: float = 0.0
    """Magnitude below which sparse rows treat a normed input as zero."""
    gate_row: Weight | None = None
    """Gate matrix if its rows are part of the records; None: `opened` is f(gate)."""
    gate_bias: Weight | None = None
    gate: Gate | None = None

    @property
    def row_matrices(self) -> tuple[Weight, ...]:
        return self.matrices[:-1]

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """Matrices with a row in each record, followed by the matrix with a column."""
        rows = (each for each in (self.gate_row, self.up) if each is not None)
        return (*rows, self.down)


@dataclass(frozen=True, slots=True)
class NeuronLayer:
    """Record layout of one layer."""

    op: Neurons
    num_neurons: int
    num_inputs: int
    """Inputs of the up projection; 0 without one."""
    num_outputs: int

    @property
    def num_rows(self) -> int:
        """Matrix rows in a record: gate and up projection, if present."""
        return len(self.op.matrices) - 1

    @property
    def row_bytes(self) -> int:
        return round_up(self.num_inputs, LINE)

    @property
    def rows_bytes(self) -> int:
        """Offset of the column in a record, in bytes."""
        return self.num_rows * self.row_bytes

    @property
    def record_bytes(self) -> int:
        return self.rows_bytes + round_up(self.num_outputs, LINE)

    @property
    def all_records_bytes(self) -> int:
        return self.num_neurons * self.record_bytes

    @property
    def num_scales(self) -> int:
        """Number of scales: one per row of each matrix, then one per output.

        They follow the records in the file and stay in memory.
        """
        return self.num_rows * self.num_neurons + self.num_outputs

    @property
    def num_bytes(self) -> int:
        """Bytes in the file, a multiple of ALIGN."""
        return round_up(self.all_records_bytes + 4 * self.num_scales, ALIGN)


def predicts_neurons(program: Program) -> bool:
    """Returns whether a predictor selects the neurons, before or after fusion."""
    return any(isinstance(op, ActMul | Linear) and op.scores is not None for op in program.ops)


def split_neurons(program: Program) -> Program:
    """Splits the feed-forward layers of a fused Program that have zeroing gates.

    Raises ConfigError if there are none.
    """
    readers = Counter(value for op in program.ops for value in op.inputs)
    readers.update(program.outputs.values())
    downs = {op.x: op for op in program.ops if isinstance(op, Linear)}
    uses = Counter(weight for op in program.ops for weight in op.weights)
    ops: list[Op] = []
    for op in program.ops:
        down = _get_down_projection(op, downs, readers)
        if down is None or any(uses[weight] > 1 for weight in (*op.weights, *down.weights_)):
            ops.append(op)
        else:
            ops += _split(op, down)
    if not any(isinstance(op, Neurons) for op in ops):
        raise ConfigError(
            f"neuron_cache_bytes: {program.name} has no feed-forward layer that selects neurons,"
            f" expected {' or '.join(ZEROING)} with ffn_sparsity exact, or gates with ffn_sparsity"
            " gate:SHARE or a sparsity_predictor",
            hint=HINT,
        )
    result = replace(program, ops=tuple(ops))
    result.check()
    return result


def neuron_layers(program: Program) -> tuple[NeuronLayer, ...]:
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


def check_neurons(program: Program, formats: Mapping[Weight, TileFormat]) -> None:
    """Raises an error for unsupported activations and weight codes other than i8.

    Sums over other codes depend on their order.
    """
    for op in program.ops:
        if not isinstance(op, Neurons):
            continue
        if op.gate is not None:
            check_activation(program, op.gate.activation)
        name = "neuron_cache_bytes" if op.gate_row is None else "sparsity_predictor"
        for weight in op.matrices:
            if formats[weight].code != "i8":
                raise BackendUnavailable(
                    f"{name}: requires int8 weights with one scale per output, got"
                    f" {formats[weight].code} for {weight.name}",
                    hint=f"set quantization to int8, or remove {name}",
                )


def _get_down_projection(
    op: Op, downs: dict[Value, Linear], readers: Counter[Value]
) -> Linear | None:
    """Returns the down projection that reads an op's zeros if it is the only reader; else None."""
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


def round_up(number: int, unit: int) -> int:
    """Rounds up to a multiple of `unit`."""
    return -(-number // unit) * unit

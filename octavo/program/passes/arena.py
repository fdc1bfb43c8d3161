"""Assigns each Value an offset in an arena per row axis, reusing dead buffers.

The executor determines which ops run together as a stage. Within a stage, different rows may be at
different ops, so no memory is reused. Offsets are in floats within a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.program.expert_ops import Route
from octavo.program.family_ops import KeepLargest, Xielu
from octavo.program.ops import (
    Act,
    Clip,
    Linear,
    RmsNorm,
    Rope,
    Scale,
    SoftCap,
)
from octavo.program.program import Op, Program, Value
from octavo.program.rank_ops import Collect, Dispatch

ALIGN_FLOATS = 16
"""Alignment of a buffer in floats: one cache line."""

IN_PLACE = (RmsNorm, Rope, Act, Scale, SoftCap, Clip, KeepLargest, Xielu)
"""Row-local ops that may overwrite their input."""


@dataclass(frozen=True, slots=True)
class ValueLocation:
    """Memory of a Value in the arena, in floats within a row."""

    axis: str
    """Row axis of the arena: tokens, block, expert_rows, samples or requests."""
    offset: int
    width: int


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """Offsets of all Values except int inputs."""

    locations: dict[str, ValueLocation]
    row_floats: dict[str, int]
    """Floats per row of each axis."""


@dataclass(slots=True, eq=False)
class _Buffer:
    axis: str
    stride: int
    first: int
    last: int
    offset: int = 0
    columns: dict[Value, int] = field(default_factory=dict)


def assign_offsets(program: Program, stages: list[int], ranges: list[int]) -> ArenaPlan:
    """Assigns offsets to all Values of a Program; the Program's outputs live to the end.

    `stages[i]` and `ranges[i]` are the stage and range of op i, not decreasing. A range is a
    sequence of stages that an executor may run on a few rows at a time. Values used only within
    their range are on the axis `block`, which needs only as many rows as are in flight.
    """
    buffers = _make_buffers(program, stages)
    range_of = dict(zip(stages, ranges, strict=True))
    for buffer in buffers:
        if buffer.axis == "tokens" and range_of[buffer.first] == range_of[buffer.last]:
            buffer.axis = "block"
    row_floats: dict[str, int] = {}
    for axis in {buffer.axis for buffer in buffers}:
        row_floats[axis] = _place_buffers([buffer for buffer in buffers if buffer.axis == axis])
    locations = {
        value.name: ValueLocation(buffer.axis, buffer.offset + column, value.width)
        for buffer in buffers
        for value, column in buffer.columns.items()
    }
    return ArenaPlan(locations, row_floats)


class _Readers:
    """Last reader of each Value, and the stage up to which the Value's memory must be kept."""

    def __init__(self, program: Program, stages: list[int]) -> None:
        self.op: dict[Value, int] = {}
        self.stage: dict[Value, int] = {}
        laid_out: dict[Value, Value] = {}
        scales: set[Value] = set()
        for index, (op, stage) in enumerate(zip(program.ops, stages, strict=True)):
            crosses = any(
                _in_body(v) and not _in_body(out) for v in op.inputs for out in op.outputs
            )
            if isinstance(op, Route):
                laid_out[op.outs[0]] = op.x
                scales |= {op.outs[0]} if op.scales_rows else set()
            # Rows in their original layout were already converted by the Route.
            again = [
                laid_out[value]
                for value in op.inputs
                if value in laid_out and (isinstance(op, Dispatch) or value in scales)
            ]
            for value in (*op.inputs, *again):
                self.op[value] = index
                # An op on another axis reads it again for each chunk, so it lives to the end.
                self.stage[value] = stages[-1] if crosses else max(stage, self.stage.get(value, 0))
        for value in program.outputs.values():
            self.op[value], self.stage[value] = len(stages), stages[-1]


def _make_buffers(program: Program, stages: list[int]) -> list[_Buffer]:
    readers = _Readers(program, stages)
    buffers: list[_Buffer] = []
    home: dict[Value, _Buffer] = {}
    for index, (op, stage) in enumerate(zip(program.ops, stages, strict=True)):
        outs = _stored_outputs(op)
        if not outs:
            continue
        over = _get_overwritten_input(op)
        if (
            over is not None
            and over in home
            and over.axis == outs[0].axis
            and over.width == outs[0].width
            and readers.op[over] == index
        ):
            buffer = home[over]
            buffer.columns[outs[0]] = buffer.columns[over]
        else:
            buffer = _new_buffer(outs, stage)
            buffers.append(buffer)
        for value in outs:
            home[value] = buffer
            buffer.last = max(buffer.last, readers.stage.get(value, stage))
    return buffers


def _in_body(value: Value) -> bool:
    return value.axis in ("tokens", "expert_rows")


def _stored_outputs(op: Op) -> list[Value]:
    """Returns the outputs that need memory.

    Rows of a Route or a Dispatch need none: they alias x or memory shared by all ranks.
    """
    if isinstance(op, Dispatch):
        return []
    outs = op.outs[1:] if isinstance(op, Route) else op.outputs
    return [value for value in outs if value.dtype == "float"]


def _new_buffer(outs: list[Value], stage: int) -> _Buffer:
    """Makes one buffer for all outputs of an op."""
    width = sum(value.width for value in outs)
    buffer = _Buffer(outs[0].axis, -(-width // ALIGN_FLOATS) * ALIGN_FLOATS, stage, stage)
    column = 0
    for value in outs:
        buffer.columns[value] = column
        column += value.width
    return buffer


def _get_overwritten_input(op: Op) -> Value | None:
    """Returns the input that the op's single output may overwrite element by element if no later op
    reads it; None if there is none.
    """
    if isinstance(op, (*IN_PLACE, Collect)):
        return op.x
    if isinstance(op, Linear) and len(op.outs) == 1 and op.residual != op.x:
        return op.residual
    return None


def _place_buffers(buffers: list[_Buffer]) -> int:
    """Assigns each buffer the lowest free offset, in order of creation; returns the floats
    per row.
    """
    live: list[_Buffer] = []
    end = 0
    for buffer in sorted(buffers, key=lambda b: b.first):
        live = [other for other in live if other.last >= buffer.first]
        offset = 0
        for other in sorted(live, key=lambda b: b.offset):
            if offset + buffer.stride <= other.offset:
                break
            offset = max(offset, other.offset + other.stride)
        buffer.offset = offset
        live.append(buffer)
        end = max(end, offset + buffer.stride)
    return end

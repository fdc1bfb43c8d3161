"""Rejects what the native kernels cannot run, before any weight is read."""

from __future__ import annotations

from octavo.api.errors import BackendUnavailable
from octavo.executor.base import FormatOf
from octavo.executor.native.formats import (
    RecordOp,
    RowTypeOf,
    TileFormat,
    get_matrices,
    tile_formats,
)
from octavo.executor.native.stages import BEHIND_BARRIERS, ROW_LOCAL
from octavo.executor.rank_grid import ALONE, RankGrid, misplaced
from octavo.program import expert_ops, family_ops, ops, rank_ops
from octavo.program.mixers import SelectiveScan, ShortConv
from octavo.program.program import Op, Program, Weight

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "softplus")
"""Supported activations, in the order of their numbers (csrc/kernels/epilogue.inl)."""

MAX_LANES = 16
"""Maximum number of query heads per KV head; one attention kernel call processes them together
(csrc/kernels/attention.h).
"""

MAX_KEY_WIDTH = 1024
"""Maximum key width for which a dot product with an int8 cache fits 31 bits
(csrc/kernels/attention_lanes.inl).
"""

MASKS = ("causal", "window", "chunk", "full")
AXES = ("tokens", "samples", "requests")
"""Row axes that the executor allocates memory for."""

OUTPUTS = {
    "logits": ("samples",),
    "pooled": ("requests", "samples"),
    "encoded": ("requests",),
    "rows": ("samples", "requests"),
    "hidden": ("tokens",),
}
"""Axis of each supported output; a Program must have exactly one output."""

OF_EXPERTS = (
    expert_ops.Route,
    rank_ops.Dispatch,
    expert_ops.GroupedLinear,
    rank_ops.Collect,
    expert_ops.Combine,
)

IN_BLOCKS = (ops.Linear, ops.HeadLinear, family_ops.PositionScores)
"""Matmuls that form a separate stage within a range of row blocks."""

ON_TOKENS = (
    *(ops.Embedding, ops.ScatterRows, ops.Rope, ops.KvWrite, ops.Attention, ops.HeadLinear),
    *(family_ops.PositionScores, ShortConv, SelectiveScan, RecordOp, ops.PrefetchNeurons),
)
"""Ops that read the step's per-token arrays."""


def check(
    program: Program, format_of: FormatOf, row_type_of: RowTypeOf, grid: RankGrid = ALONE
) -> dict[Weight, TileFormat]:
    """Validates a fused Program and returns the tile format of each matrix.

    Raises BackendUnavailable for an unsupported op, group or pair of formats, and UnsupportedModel
    for an unsupported weight format.
    """
    check_ops(program, grid)
    formats = tile_formats(program, format_of)
    for op in program.ops:
        if not isinstance(op, ops.Linear | expert_ops.GroupedLinear) or op.gate is None:
            continue
        pair = get_matrices(op)
        row_types = sorted({row_type_of(formats[weight].code) for weight in pair})
        if len(row_types) > 1:
            names = " and ".join(f"{w.name} ({format_of(w)})" for w in pair)
            raise _make_error(
                program,
                f"a gate and its up projection with inputs of different types:"
                f" {' and '.join(row_types)}:"
                f" {names}",
            )
    return formats


def _check_ranks(program: Program, grid: RankGrid) -> None:
    for op in program.ops:
        if reason := misplaced(op, grid):
            raise _make_error(program, reason)


def check_ops(program: Program, grid: RankGrid = ALONE) -> None:
    """Rejects unsupported ops, regardless of weight formats."""
    _check_ranks(program, grid)
    for op in program.ops:
        if not isinstance(op, (*ROW_LOCAL, *BEHIND_BARRIERS, *IN_BLOCKS)):
            raise _make_error(program, f"the op {op.kind}")
    for op in program.ops:
        _check_attributes(program, op)
    if not set(program.inputs) <= {"token_ids"}:
        raise _make_error(program, f"the inputs {sorted(program.inputs)}")
    if len(program.outputs) != 1 or not program.outputs.keys() <= OUTPUTS.keys():
        raise _make_error(program, f"the outputs {sorted(program.outputs)}")
    for name, value in program.outputs.items():
        if value.axis not in OUTPUTS[name]:
            raise _make_error(program, f"{name} over {value.axis}")


def _check_attributes(program: Program, op: Op) -> None:
    axes = {value.axis for value in (*op.inputs, *op.outputs)}
    if unknown := sorted(axes - _get_axes(op)):
        raise _make_error(program, f"the op {op.kind} over {unknown[0]}")
    if isinstance(op, ops.Attention):
        _check_attention(program, op)
    if isinstance(op, ops.KvWrite):
        _check_write(program, op)
    if isinstance(op, ops.Linear | expert_ops.GroupedLinear) and op.gate is not None:
        check_activation(program, op.gate.activation)
    if isinstance(op, ops.Linear | ops.ActMul) and op.scores is not None:
        raise _make_error(
            program, "predicted neurons of a layer that is not gate, up and down alone"
        )
    if isinstance(op, SelectiveScan) and op.num_heads == op.x.width and op.num_runs > 1:
        raise _make_error(program, "a scan of heads of one column with several runs of b and c")
    if isinstance(op, SelectiveScan) and op.beta is not None and op.num_heads == op.x.width:
        raise _make_error(program, "the delta rule for heads of one column")
    acting = ops.Linear | expert_ops.GroupedLinear | ops.Act | ops.ActMul | ShortConv
    if isinstance(op, acting) and op.activation is not None:
        check_activation(program, op.activation)


def _get_axes(op: Op) -> set[str]:
    if isinstance(op, rank_ops.AllGather):
        return {*AXES, "expert_rows"}
    if isinstance(op, OF_EXPERTS):
        return {"tokens", "expert_rows"}
    return {"tokens"} if isinstance(op, ON_TOKENS) else {*AXES}


def _check_attention(program: Program, op: ops.Attention) -> None:
    group = program.group(op.group)
    if op.mask not in MASKS:
        raise _make_error(program, f"attention with the mask {op.mask}")
    if op.num_heads // group.num_kv_heads > MAX_LANES and not op.latent_width:
        raise _make_error(program, f"more than {MAX_LANES} query heads for one kv head")
    if group.k_width > MAX_KEY_WIDTH:
        raise _make_error(program, f"keys wider than {MAX_KEY_WIDTH}")


def _check_write(program: Program, op: ops.KvWrite) -> None:
    group = program.group(op.group)
    if group.kind == "conv":
        return
    if len(op.k_parts) > 1 and group.num_kv_heads > 1:
        raise _make_error(program, "a KV write of several parts for several heads")
    if (op.v is None) != (group.v_width == 0):
        raise _make_error(program, "a KV write without values")
    if group.k_width > MAX_KEY_WIDTH:
        raise _make_error(program, f"keys wider than {MAX_KEY_WIDTH}")


def check_activation(program: Program, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise _make_error(program, f"the activation {activation}")


def _make_error(program: Program, what: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"the native backend cannot run {what} (in {program.name})", hint="try --backend reference"
    )

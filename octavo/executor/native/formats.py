"""Weight formats that the native kernels support, and the tile format of each.

Works on names and sizes; reads no weight. Tile layouts are defined in csrc/kernels/weights.h,
packing in csrc/plan/packing.cpp.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.api.errors import UnsupportedModel
from octavo.executor.base import FormatOf
from octavo.executor.native.extension import native_module
from octavo.program.expert_ops import GroupedLinear
from octavo.program.ops import Embedding, HeadLinear, Linear
from octavo.program.program import Op, Program, Weight

FLOATS_HINT = (
    "--dtype bfloat16 dequantizes such weights while loading, --quantization int8 packs them to 8"
    " bits; --backend torch supports them directly"
)

RowTypeOf = Callable[[str], str]
"""Maps a weight code to the activation type of its matmuls, for one instruction-set level."""


@dataclass(frozen=True, slots=True)
class RecordOp(Op, abc.ABC):
    """An extension's op over all tokens that reads weights from its own records."""

    @property
    @abc.abstractmethod
    def row_matrices(self) -> tuple[Weight, ...]:
        """Matrices with rows in the records."""


@dataclass(frozen=True, slots=True)
class TileFormat:
    """Tile format of a weight."""

    code: str
    """u4, u8, u2, u3, u5, u6, l4, i8, bf16, fp16, fp32, f4 or e4m3."""
    scale_type: str = "fp32"
    """Type of group scales and mins: fp16 for fp16 scales without super-scales; small for bytes
    with a factor per 256 inputs.
    """
    low: str = "none"
    """Second value per group: none, min or zero."""
    half_groups: bool = False
    """Whether scales cover 16 inputs instead of 32."""
    half_factors: bool = False
    """Whether the factors of small scales are fp16, as in the file, instead of fp32."""
    span: int = 0
    """Groups of 32 inputs per scale, for float codes."""

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the size of a weight `[..., out, in]` in tiles."""
        *lead, num_rows, num_inputs = shape
        matrix_bytes = native_module().tile_bytes(
            code=self.code,
            scale_type=self.scale_type,
            low=self.low,
            half_groups=self.half_groups,
            half_factors=self.half_factors,
            span=self.span,
            num_rows=num_rows,
            num_inputs=num_inputs,
        )
        return math.prod(lead) * int(matrix_bytes)


FORMATS = {
    "F32": TileFormat("fp32"),
    "F16": TileFormat("fp16"),
    "BF16": TileFormat("bf16"),
    "Q4_0": TileFormat("u4", "fp16"),
    "Q4_1": TileFormat("u4", "fp16", low="min"),
    "Q5_0": TileFormat("u5", "fp16"),
    "Q5_1": TileFormat("u5", "fp16", low="min"),
    "Q8_0": TileFormat("u8", "fp16"),
    "I8": TileFormat("i8"),
    "Q2_K": TileFormat("u2", "small", low="min", half_groups=True, half_factors=True),
    "Q3_K": TileFormat("u3", "small", half_groups=True, half_factors=True),
    "Q4_K": TileFormat("u4", "small", low="min", half_factors=True),
    "Q5_K": TileFormat("u5", "small", low="min", half_factors=True),
    "Q6_K": TileFormat("u6", "small", half_groups=True, half_factors=True),
}
"""Tile format by tensor format. "I8" has one scale per output."""

GROUPED = {
    f"U{bits}{zeros}_{scale}": TileFormat(
        f"u{bits}", "fp16" if scale == "F16" else "fp32", low="zero" if zeros else "none"
    )
    for bits in (4, 8)
    for zeros in ("", "Z")
    for scale in ("F16", "BF16", "F32")
} | {
    "I8_F32": TileFormat("u8"),
    "L4I_F32": TileFormat("l4"),
    "L4I_F16": TileFormat("l4", "fp16"),
    "L4I_K16": TileFormat("l4", "small", half_groups=True),
    "L4I_K32": TileFormat("l4", "small"),
}
"""Tile format of grouped codes; their names end with a colon and the group size."""
FLOAT_CODES = {"L4_F32": "f4", "F8_E4M3": "e4m3"}
"""Float codes by format name; the group size follows a colon, or nothing for one scale per output.
"""
GROUP_INPUTS = 32
HALF_GROUP = 16
MOST_SPAN = 4
"""Maximum number of groups that share a scale of float codes (csrc/kernels/weights.h)."""


TILE = 16
"""Outputs per tile (csrc/kernels/weights.h)."""

PRODUCTS = (Linear, GroupedLinear, HeadLinear)
"""Ops that multiply activations by tiled matrices."""


def get_matrices(op: Op) -> tuple[Weight, ...]:
    """Returns an op's weights that are stored in tiles."""
    if isinstance(op, Linear):
        return op.weights_
    if isinstance(op, GroupedLinear):
        return op.matrices
    if isinstance(op, HeadLinear):
        return (op.weight,)
    if isinstance(op, RecordOp):
        return op.row_matrices
    return (op.table,) if isinstance(op, Embedding) else ()


def tile_formats(program: Program, format_of: FormatOf) -> dict[Weight, TileFormat]:
    """Returns the tile format of each matrix; raises UnsupportedModel if one has none."""
    matrices = dict.fromkeys(weight for op in program.ops for weight in get_matrices(op))
    formats = {weight: _format(weight, format_of(weight)) for weight in matrices}
    for op in program.ops:
        if isinstance(op, HeadLinear) and op.transposed and not is_float(formats[op.weight]):
            formats[op.weight] = TileFormat("bf16")
    return formats


def is_float(tiles: TileFormat) -> bool:
    return tiles.code in ("fp32", "fp16", "bf16")


def _format(weight: Weight, stored: str) -> TileFormat:
    name, _, group = stored.partition(":")
    if name in GROUPED and group:
        return _group(weight, name, int(group))
    if name in FLOAT_CODES:
        return _get_float_format(weight, stored)
    if stored not in FORMATS:
        raise UnsupportedModel(
            f"{weight.name} is stored as {stored}, supported: {', '.join(FORMATS)}"
        )
    return FORMATS[stored]


def _get_float_format(weight: Weight, stored: str) -> TileFormat:
    name, _, size = stored.partition(":")
    width = weight.shape[-1]
    group = int(size) if size else width
    if group < width and group % GROUP_INPUTS:
        raise UnsupportedModel(
            f"{weight.name} is stored as {stored}, expected groups of a multiple of"
            f" {GROUP_INPUTS} inputs, or one group for all inputs",
            hint=FLOATS_HINT,
        )
    return TileFormat(FLOAT_CODES[name], span=_span(group, width))


def _span(group: int, width: int) -> int:
    """Returns the groups of 32 inputs per scale in tiles."""
    span = MOST_SPAN
    while group < width and group % (span * GROUP_INPUTS):
        span //= 2
    return span


def _group(weight: Weight, name: str, group: int) -> TileFormat:
    tiles = GROUPED[name]
    takes_halves = tiles.low != "zero"
    whole = group >= weight.shape[-1]
    if group % GROUP_INPUTS == 0 or whole:
        return tiles
    if group == HALF_GROUP and takes_halves:
        code = "l4" if tiles.code == "u4" else tiles.code
        return replace(tiles, code=code, half_groups=True)
    raise UnsupportedModel(
        f"{weight.name} is stored in groups of {group} inputs, expected multiples of"
        f" {GROUP_INPUTS}, or {HALF_GROUP} for groups without zero points",
        hint="use --dtype bfloat16 to dequantize the weights while loading",
    )

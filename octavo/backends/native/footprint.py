"""What the native backend would take for a Program, from how its weights are stored: no weight is
read, no thread started.

The counts are those of the tiles in csrc/core/packing.cpp and of the executor's buffers
(csrc/core/executor.cpp); tests hold them to what `prepare` really takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from octavo.backends.base import FormatOf
from octavo.backends.native.lower import GROUP
from octavo.backends.native.stages import body_first, plan_arena, stages_of
from octavo.errors import UnsupportedModel
from octavo.program.ops import Embedding, GroupedLinear, Linear
from octavo.program.program import Program, Weight

TILE_ROWS = 16
CODES: dict[str, tuple[str, float]] = {
    "F32": ("fp32", 32),
    "F16": ("fp16", 16),
    "BF16": ("bf16", 16),
    "Q4_0": ("u4", 4.5),
    "Q4_1": ("u4", 5),
    "Q5_0": ("u8", 8.5),
    "Q5_1": ("u8", 9),
    "Q8_0": ("u8", 8.5),
    "I8": ("i8", 8),
    "Q4_K": ("u4", 6),
    "Q5_K": ("u8", 10),
    "Q6_K": ("u8", 10),
}
"""By a tensor's format: its code in tiles, and bits of a weight: 4 or 8 for the code, and for each
scale or min of a group of 32 half a bit where it is an fp16, one where two levels were multiplied
out. "I8" has one scale an output instead."""

FP8_HINT = (
    "--dtype bfloat16 turns fp8 weights into floats at load, --quantization int8 packs them anew;"
    " --backend torch reads them as they are"
)

FP32_CODES = ("fp32", "fp16")
"""Their products read fp32 rows."""


@dataclass(frozen=True, slots=True)
class NativeFootprint:
    weight_bytes: dict[Weight, int]
    step_bytes: int
    code: str
    """In which most of the weights are packed."""
    computes_fp32: bool


def native_footprint(
    optimized: Program, format_of: FormatOf, row_type_of: Callable[[str], str], max_tokens: int
) -> NativeFootprint:
    """`row_type_of`: how products of weights in a code read their rows, at this level."""
    tiled = {weight for op in optimized.ops for weight in _matrices(op)}
    codes = {weight: _code(weight, format_of(weight)) for weight in tiled}
    codes |= {
        weight: _wide(codes[weight])
        for op in optimized.ops
        for weight in _widened(op, codes, row_type_of)
    }
    sizes = {
        weight: (
            _tile_bytes(weight, codes[weight]) if weight in tiled else 4 * math.prod(weight.shape)
        )
        for weight in optimized.weights
    }
    products = {weight for op in optimized.ops if isinstance(op, Linear) for weight in op.weights_}
    bytes_of_codes = Counter[str]()
    for weight in tiled:
        bytes_of_codes[codes[weight][0]] += sizes[weight]
    return NativeFootprint(
        weight_bytes=sizes,
        step_bytes=_step_bytes(optimized, max_tokens),
        code=bytes_of_codes.most_common(1)[0][0],
        computes_fp32=all(codes[weight][0] in FP32_CODES for weight in products),
    )


def _matrices(op: object) -> tuple[Weight, ...]:
    if isinstance(op, Linear):
        return op.weights_
    if isinstance(op, GroupedLinear):
        return (op.weight,)
    return (op.table,) if isinstance(op, Embedding) else ()


def _code(weight: Weight, stored: str) -> tuple[str, float]:
    if stored not in CODES:
        hint = FP8_HINT if stored.startswith("F8_") else None
        raise UnsupportedModel(
            f"{weight.name} is stored as {stored}, supported are {', '.join(CODES)}", hint=hint
        )
    return CODES[stored]


def _widened(
    op: object, codes: dict[Weight, tuple[str, float]], row_type_of: Callable[[str], str]
) -> list[Weight]:
    """Weights of 4 bits whose codes lie in bytes, because they are gate or up of one of 8 that
    reads its rows otherwise.
    """
    if (
        not isinstance(op, Linear)
        or op.gate is None
        or {row_type_of(codes[weight][0]) for weight in op.weights_} != {"digits", "int8"}
    ):
        return []
    return [weight for weight in op.weights_ if codes[weight][0] == "u4"]


def _wide(code: tuple[str, float]) -> tuple[str, float]:
    return "u8", code[1] + 4


def _tile_bytes(weight: Weight, code: tuple[str, float]) -> int:
    """Rows are filled up to whole tiles, inputs to whole groups, or pairs of groups where a tile
    ends with its scales.
    """
    *lead, rows, inputs = weight.shape
    if code[0] == "i8":
        return int(
            math.prod(lead)
            * -(-rows // TILE_ROWS)
            * TILE_ROWS
            * (-(-inputs // (2 * GROUP)) * 2 * GROUP + 4)
        )
    tiles, groups = -(-rows // TILE_ROWS), -(-inputs // GROUP)
    return int(math.prod(lead) * tiles * TILE_ROWS * groups * GROUP * code[1] / 8)


def _step_bytes(optimized: Program, max_tokens: int) -> int:
    """At most: the arena, and two areas of rows converted for products: three bytes for each input,
    four numbers for each group.
    """
    program = body_first(optimized)
    floats = plan_arena(program, stages_of(program)).row_floats
    widest = max(op.x.width for op in program.ops if isinstance(op, Linear | GroupedLinear))
    return max_tokens * (
        4 * floats.get("tokens", 0)
        + 4 * floats.get("block", 0)
        + 2 * (3 * widest + 16 * -(-widest // GROUP))
    )

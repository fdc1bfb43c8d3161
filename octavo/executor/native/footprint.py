"""Memory footprint of a Program on the native backend, computed from its weight formats only.

Reads no weight and starts no thread. Tile sizes come from the extension; step memory is an upper
bound of the executor's buffers (csrc/runtime/step_runner.cpp).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from octavo.executor.base import FormatOf
from octavo.executor.native.formats import (
    PRODUCTS,
    get_matrices,
    tile_formats,
)
from octavo.executor.native.lowering_context import GROUP
from octavo.executor.native.row_rates import RowProduct, row_products
from octavo.executor.native.stages import get_stages, plan_arena, sort_token_ops_first
from octavo.program.expert_ops import GroupedLinear, Route
from octavo.program.ops import HeadLinear, Linear
from octavo.program.program import Program, Weight
from octavo.program.rank_ops import Dispatch

FP32_CODES = ("fp32", "fp16")
"""Codes whose matmuls read fp32 activations."""


@dataclass(frozen=True, slots=True)
class NativeFootprint:
    """Memory of a Program and the way its matmuls compute."""

    weight_bytes: dict[Weight, int]
    step_bytes: int
    """Buffers of the largest step, in bytes."""
    code: str
    """Code of most of the weights, by bytes."""
    computes_fp32: bool
    """Whether all matmuls read fp32 activations."""
    row_products: dict[Weight, RowProduct]
    num_stages: int
    """Stages of a step without weights."""


def native_footprint(optimized: Program, format_of: FormatOf, max_tokens: int) -> NativeFootprint:
    """Returns the footprint of an optimized Program; raises UnsupportedModel for an unknown
    format.
    """
    formats = tile_formats(optimized, format_of)
    sizes = {
        weight: formats[weight].num_bytes(weight.shape)
        if weight in formats
        else 4 * math.prod(weight.shape)
        for weight in optimized.weights
    }
    of_heads = (op for op in optimized.ops if isinstance(op, HeadLinear))
    sizes |= {op.weight: formats[op.weight].num_bytes(op.shape) for op in of_heads}
    products = {
        weight for op in optimized.ops if isinstance(op, PRODUCTS) for weight in get_matrices(op)
    }
    bytes_of_codes = Counter[str]()
    for weight, tiles in formats.items():
        bytes_of_codes[tiles.code] += sizes[weight]
    return NativeFootprint(
        weight_bytes=sizes,
        step_bytes=_step_bytes(optimized, max_tokens),
        code=bytes_of_codes.most_common(1)[0][0],
        computes_fp32=all(formats[weight].code in FP32_CODES for weight in products),
        row_products=row_products(optimized, formats, sizes),
        num_stages=sum(
            not isinstance(stage.ops[0], PRODUCTS)
            for stage in get_stages(sort_token_ops_first(optimized))
        ),
    )


def _step_bytes(optimized: Program, max_tokens: int) -> int:
    """Returns an upper bound of a step's buffers in bytes.

    They are the arena and two areas for quantized activations: 3 bytes per input and 4 numbers per
    group.
    """
    program = sort_token_ops_first(optimized)
    floats = plan_arena(program, get_stages(program)).row_floats
    widths = [op.x.width for op in program.ops if isinstance(op, Linear | GroupedLinear)]
    widest = max(widths, default=0)
    converted = 3 * widest + 16 * -(-widest // GROUP)
    tokens = 4 * floats.get("tokens", 0) + 4 * floats.get("block", 0) + 2 * converted
    experts = 4 * floats.get("expert_rows", 0) + converted
    return max_tokens * tokens + _expert_rows(optimized, max_tokens) * experts


def _expert_rows(program: Program, max_tokens: int) -> int:
    """Returns the maximum number of expert rows of a step, over all engines that share the experts.
    Each expert's rows start at a multiple of 16.
    """
    routes = [op for op in program.ops if isinstance(op, Route)]
    engines = max((op.num_engines for op in program.ops if isinstance(op, Dispatch)), default=1)
    max_rows = engines * max_tokens
    return max((max_rows * op.top_k + 16 * op.num_experts for op in routes), default=0)

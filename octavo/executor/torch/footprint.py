"""Estimates a Program's memory on the torch backend from its weight formats, without reading
weights.

Weights are stored as in `PackedWeight`; tests compare the estimate with `prepare_program`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from octavo.api.errors import UnsupportedModel
from octavo.executor.base import FormatOf
from octavo.executor.torch.graphs import GRAPH_BYTES
from octavo.program import expert_ops, ops
from octavo.program.program import Op, Program, Weight

FLOATS: dict[str, tuple[str, torch.dtype]] = {
    "F32": ("fp32", torch.float32),
    "F16": ("fp16", torch.float16),
    "BF16": ("bf16", torch.bfloat16),
}

WHOLE_ROW = 1 << 40

PACKED: dict[str, tuple[str, int, int, int]] = {
    "Q4_0": ("u4", 4, 32, 16),
    "Q4_1": ("u4", 4, 32, 32),
    "Q5_0": ("u8", 8, 32, 16),
    "Q5_1": ("u8", 8, 32, 32),
    "Q8_0": ("u8", 8, 32, 16),
    "I8": ("u8", 8, WHOLE_ROW, 32),
    "Q4_K": ("u4", 4, 256, 160),
    "Q5_K": ("u8", 8, 256, 160),
    "Q6_K": ("u8", 8, 256, 144),
    "Q2_K": ("u4", 4, 256, 288),
    "Q3_K": ("u4", 4, 256, 144),
    "F8_E4M3": ("e4m3", 8, WHOLE_ROW, 32),
    "I8_F32": ("u8", 8, 1, 32),
    "L4_F32": ("u4", 4, 1, 32),
    "L4I_F32": ("u4", 4, 1, 32),
    "L4I_F16": ("u4", 4, 1, 16),
    "L4I_K16": ("u4", 4, 256, 160),
    "L4I_K32": ("u4", 4, 256, 96),
}
PACKED |= {
    f"U{bits}{zeros}_{scale}": (
        f"u{bits}",
        bits,
        1,  # each name includes the group size
        size + (8 if zeros else 0),
    )
    for bits in (4, 8)
    for zeros in ("", "Z")
    for scale, size in (("F16", 16), ("BF16", 16), ("F32", 32))
}
"""Device storage of each format: code, bits per code, inputs that share scales and mins, and bits
of these. A format may specify the number of inputs after a colon."""


@dataclass(frozen=True, slots=True)
class TorchFootprint:
    weight_bytes: dict[Weight, int]
    step_bytes: int
    code: str
    """Code of most weights, by bytes."""
    dtype: torch.dtype
    """Compute dtype of matmuls."""


def torch_footprint(
    optimized: Program,
    format_of: FormatOf,
    max_tokens: int,
    requested_dtype: torch.dtype | None,
    packed_dtype: torch.dtype,
) -> TorchFootprint:
    """Estimates a Program's footprint.

    `requested_dtype` is the option's dtype, if it is set; otherwise matmuls with packed weights use
    `packed_dtype`.
    """
    matrices = {weight for op in optimized.ops for weight in _matrices(op)}
    first = next((op.weights_[0] for op in optimized.ops if isinstance(op, ops.Linear)), None)
    stored = None if first is None else FLOATS.get(format_of(first))
    dtype = requested_dtype or (packed_dtype if stored is None else stored[1])
    biases = {
        bias
        for op in optimized.ops
        if isinstance(op, ops.Linear)
        for bias in op.biases
        if bias is not None
    }
    sizes = {
        weight: math.prod(weight.shape) * (dtype.itemsize if weight in biases else 4)
        for weight in optimized.weights
    }
    sizes |= {weight: sizes[weight] + zeros * dtype.itemsize for weight, zeros in _zeros(optimized)}
    sizes |= {weight: _matrix_bytes(weight, format_of(weight), dtype) for weight in matrices}
    codes = Counter[str]()
    for weight in matrices:
        codes[_code(weight, format_of(weight))] += sizes[weight]
    code = codes.most_common(1)[0][0] if codes else "fp32"
    return TorchFootprint(sizes, _step_bytes(optimized, max_tokens, dtype), code, dtype)


def _zeros(program: Program) -> Iterator[tuple[Weight, int]]:
    """Yields, for each matmul with partial biases, the first bias and the number of zeros that fill
    in for missing ones.
    """
    for op in program.ops:
        if isinstance(op, ops.Linear) and None in op.biases and any(op.biases):
            pairs = list(zip(op.weights_, op.biases, strict=True))
            first = next(bias for _, bias in pairs if bias is not None)
            yield first, sum(weight.shape[0] for weight, bias in pairs if bias is None)


def graphs_footprint(optimized: Program, sizes: Sequence[int], dtype: torch.dtype) -> int:
    """Returns the bytes of captured graphs: shared buffers of the largest, the logits of each, and
    each graph's own memory.
    """
    return (
        _step_bytes(optimized, max(sizes), dtype)
        + sum(sizes) * optimized.vocab_size * dtype.itemsize
        + len(sizes) * GRAPH_BYTES
    )


def _matrices(op: Op) -> tuple[Weight, ...]:
    if isinstance(op, ops.Linear):
        return op.weights_
    if isinstance(op, expert_ops.GroupedLinear):
        return (op.weight,)
    if isinstance(op, ops.MlaAttention):
        return (op.kv_b,)
    return (op.table,) if isinstance(op, ops.Embedding) else ()


def _code(weight: Weight, stored: str) -> str:
    kind = stored.partition(":")[0]
    if stored not in FLOATS and kind not in PACKED:
        raise UnsupportedModel(
            f"{weight.name} is stored as {stored}, supported: {', '.join([*FLOATS, *PACKED])}"
        )
    return FLOATS[stored][0] if stored in FLOATS else PACKED[kind][0]


def _matrix_bytes(weight: Weight, stored: str, dtype: torch.dtype) -> int:
    _code(weight, stored)
    if stored in FLOATS:
        return math.prod(weight.shape) * dtype.itemsize
    *lead, inputs = weight.shape
    kind, _, inputs_together = stored.partition(":")
    _, bits, span, level_bits = PACKED[kind]
    span = int(inputs_together or span)
    return math.prod(lead) * (-(-inputs * bits // 8) + -(-inputs // span) * level_bits // 8)


def _step_bytes(optimized: Program, max_tokens: int, dtype: torch.dtype) -> int:
    """Returns an upper bound of a step's bytes: live Values, fp32 copies of an op's widest Value,
    the largest matrix unpacked, and attention scores.
    """
    last = {value: index for index, op in enumerate(optimized.ops) for value in op.inputs}
    alive, max_alive, widest = 0, 0, 0
    dies = Counter[int]()
    for index, op in enumerate(optimized.ops):
        output_width = sum(value.width for value in op.outputs if value.axis != "samples")
        alive += output_width
        for value in op.outputs:
            if value.axis != "samples":
                dies[last.get(value, index)] += value.width
        max_alive, widest = max(max_alive, alive), max(widest, output_width)
        alive -= dies[index]
    largest = max(
        (math.prod(weight.shape[-2:]) for op in optimized.ops for weight in _matrices(op)),
        default=0,
    )
    return max_tokens * (max_alive * dtype.itemsize + 3 * widest * 4) + largest * 8

"""Rounding shared by kernels, bit for bit like the PyTorch formulas.

Triton's interpreter truncates when converting to bf16 and multiplies bf16 tiles as integers;
`rounded` and `dot_dtype` compensate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.executor.torch.triton.device import is_interpreted

INTERPRETED = tl.constexpr(is_interpreted())
PTX = tl.constexpr(not is_interpreted() and torch.version.hip is None)
"""Whether kernels may contain NVIDIA PTX."""

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def dot_dtype(*operands: torch.dtype) -> tl.dtype:
    """Returns the dtype in which tiles of these dtypes are multiplied: one that represents all of
    them. Codes of one byte fit any.
    """
    kinds = {kind for kind in operands if kind.itemsize > 1}
    same = kinds.pop() if len(kinds) == 1 else torch.float32
    return tl.float32 if same == torch.bfloat16 and is_interpreted() else TYPES[same]


def dot_precision(*operands: torch.dtype) -> str:
    """Returns `input_precision` of an fp32 product: exact, unless fp32 stands in for mixed 16-bit
    types, which tf32 represents.
    """
    return "ieee" if torch.float32 in operands else "tf32"


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Rounds fp32 to `dtype`, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, nearest, bits | 0x400000)
        x = ((bits >> 16) << 16).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def nearest_integer(x):
    """Rounds to the nearest integer, ties to even, for |x| < 2^22: adding the constant leaves no
    fractional bits.
    """
    return (x + 12582912.0) - 12582912.0

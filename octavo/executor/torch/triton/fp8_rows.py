"""Quantizes rows to e4m3 in one launch, for matmuls with e4m3 weights.

program t   one row:  x[t]  ->  scale absmax / 448  ->  codes[t], scales[t]

A row is one tile of the next power of two, read once. Reference: `fp8.as_e4m3`, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.executor.torch.triton.codes import E4M3_LARGEST, e4m3_codes
from octavo.executor.torch.weights.fp8 import E4M3

WIDEST = 65536
"""Maximum number of columns; one program holds them all in registers."""


def supports(x: Tensor) -> bool:
    return 0 < x.shape[1] <= WIDEST and x.stride(1) == 1


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns e4m3 codes of `x [T, in]` and scales `[T, 1] fp32`, NaN if a row is not finite."""
    num_rows, width = x.shape
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    if num_rows:
        block = triton.next_power_of_2(width)
        quantize_kernel[(num_rows,)](
            x,
            codes,
            scales,
            x.stride(0),
            width,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return codes.view(E4M3), scales


@triton.jit
def quantize_kernel(x, codes, scales, x_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(values)
    # `tl.max` alone ignores NaN.
    finite = tl.min((size < float("inf")).to(tl.int32), 0)
    top = tl.max(tl.where(size < float("inf"), size, 0.0), 0)
    scale = tl.where(finite > 0, tl.div_rn(top, top * 0 + E4M3_LARGEST), float("nan"))
    wide = tl.zeros([BLOCK], tl.float32) + scale
    scaled = tl.where(wide > 0, tl.div_rn(values, wide), 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -E4M3_LARGEST), E4M3_LARGEST)
    tl.store(codes + row * width + column, e4m3_codes(scaled), mask=inside)
    tl.store(scales + row, scale)

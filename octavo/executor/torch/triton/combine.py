"""Sums expert rows by their weights, in the order in which the experts were chosen.

program (t, n)  out[t, n*BLOCK ...] = weights[t, 0] * x[t*k] + weights[t, 1] * x[t*k + 1] + ...
                in fp32, rounded once

Reference: `plain.PlainKernels.combined`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.executor.torch.triton.numbers import rounded

BLOCK = 1024


def supports(x: Tensor, weights: Tensor) -> bool:
    return x.stride(1) == 1 and weights.dtype == torch.float32 and weights.is_contiguous()


def combine_rows(x: Tensor, weights: Tensor) -> Tensor:
    """Sums `x [T*k, W]` weighted by `weights [T, k] fp32`: `[T, W]`."""
    num_rows, width = len(weights), x.shape[1]
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    if num_rows:
        block = min(BLOCK, triton.next_power_of_2(width))
        grid = (num_rows, triton.cdiv(width, block))
        combine_kernel[grid](x, weights, out, x.stride(0), width, NUM=weights.shape[1], BLOCK=block)
    return out


@triton.jit
def combine_kernel(x, weights, out, x_stride, width, NUM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(NUM):
        part = tl.load(x + (row * NUM + j) * x_stride + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + row * NUM + j) * part
    tl.store(out + row * width + at, rounded(total, out.dtype.element_ty), mask=inside)

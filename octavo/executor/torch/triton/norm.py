"""RMS and layer norms of rows, fused with a preceding sum.

    program (t, g)  one group of one row:  x[t, g*W : (g+1)*W]
                    a, b  ->  total = a + b
                          ->  out = total / sqrt(mean(total^2) + eps) * (weight + offset) + bias

A group is one tile of the next power of two, reduced in fp32: a row's numbers never depend on other
rows. Reference: `plain.PlainKernels.norm` and `add_norm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.executor.torch.plain import Norm
from octavo.executor.torch.triton.numbers import rounded

WIDEST = 32768
"""Maximum number of columns of a group; one program holds them all in registers."""


def supports(x: Tensor, norm: Norm) -> bool:
    width = norm.width or x.shape[1]
    return width <= WIDEST and len(norm.weight) == width and x.stride(1) == 1


def norm_rows(x: Tensor, norm: Norm) -> Tensor:
    """Normalizes `x [T, groups * width]`, with arbitrary row strides."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, norm, None, out)
    return out


def add_norm_rows(a: Tensor, b: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    total = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    out = torch.empty_like(total)
    _launch(a, b, norm, total, out)
    return total, out


def _launch(a: Tensor, b: Tensor | None, norm: Norm, total: Tensor | None, out: Tensor) -> None:
    if not len(a):
        return
    width = norm.width or a.shape[1]
    block = triton.next_power_of_2(width)
    norm_kernel[(len(a), a.shape[1] // width)](
        a=a,
        b=b,
        weight=norm.weight,
        bias=norm.bias,
        total=total,
        out=out,
        a_stride=a.stride(0),
        b_stride=0 if b is None else b.stride(0),
        out_stride=out.stride(0),
        width=width,
        eps=norm.eps,
        offset=norm.offset,
        HAS_SUM=b is not None,
        HAS_BIAS=norm.bias is not None,
        CENTERED=norm.centered,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )


@triton.jit
def norm_kernel(
    a,
    b,
    weight,
    bias,
    total,
    out,
    a_stride,
    b_stride,
    out_stride,
    width,
    eps,
    offset,
    HAS_SUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(1) * width + column
    dtype: tl.constexpr = out.dtype.element_ty
    x = tl.load(a + row * a_stride + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_SUM:
        x += tl.load(b + row * b_stride + at, mask=inside, other=0.0).to(tl.float32)
        made = rounded(x, dtype)
        tl.store(total + row * out_stride + at, made, mask=inside)
        x = made.to(tl.float32)
    if CENTERED:
        x = tl.where(inside, x - tl.sum(x) / width, 0.0)
    x *= tl.rsqrt(tl.sum(x * x) / width + eps)
    x *= tl.load(weight + column, mask=inside, other=0.0) + offset
    if HAS_BIAS:
        x += tl.load(bias + column, mask=inside, other=0.0)
    tl.store(out + row * out_stride + at, rounded(x, dtype), mask=inside)

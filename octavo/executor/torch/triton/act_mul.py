"""f(gate) * (up + up_offset), with gpt_oss's clamp.

    program (t, n)  one tile of one row:
                    gate[t, n*BLOCK : ...], up[t, the same]  ->  out[t, the same]

gate and up may be halves of one array: each has its own row stride. Clamps preserve NaN. Reference:
`plain.PlainKernels.gated`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.executor.torch.triton.numbers import rounded
from octavo.program import ops

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid")
BLOCK = 1024


def supports(gate: Tensor, up: Tensor, how: ops.ActMul | ops.Gate) -> bool:
    return how.activation in ACTIVATIONS and gate.stride(1) == 1 and up.stride(1) == 1


def act_mul(gate: Tensor, up: Tensor, how: ops.ActMul | ops.Gate) -> Tensor:
    """Computes `[T, W]` from `gate` and `up`, `[T, W]` each."""
    num_rows, width = gate.shape
    out = torch.empty(num_rows, width, dtype=gate.dtype, device=gate.device)
    if num_rows:
        block = min(BLOCK, triton.next_power_of_2(width))
        act_mul_kernel[(num_rows, triton.cdiv(width, block))](
            gate=gate,
            up=up,
            out=out,
            gate_stride=gate.stride(0),
            up_stride=up.stride(0),
            width=width,
            clamp=float(how.clamp or 0.0),
            alpha=float(how.alpha),
            up_offset=float(how.up_offset),
            ACTIVATION=how.activation,
            HAS_CLAMP=how.clamp is not None,
            BLOCK=block,
        )
    return out


@triton.jit
def act_mul_kernel(
    gate,
    up,
    out,
    gate_stride,
    up_stride,
    width,
    clamp,
    alpha,
    up_offset,
    ACTIVATION: tl.constexpr,
    HAS_CLAMP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    g = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_CLAMP:
        g = tl.where(g > clamp, clamp, g)
        u = tl.where(u > clamp, clamp, tl.where(u < -clamp, -clamp, u))
    y = _activate(g, alpha, ACTIVATION) * (u + up_offset)
    tl.store(out + row * width + at, rounded(y, out.dtype.element_ty), mask=inside)


@triton.jit
def _activate(x, alpha, ACTIVATION: tl.constexpr):
    """Computes `plain.ACTIVATIONS`. tanh(u) = 2 sigmoid(2 u) - 1, so gelu_tanh is x sigmoid(2
    sqrt(2 / pi) (x + 0.044715 x^3)).
    """
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(alpha * x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "sigmoid":
        y = tl.sigmoid(x)
    else:
        y = tl.where(x < 0, 0.0, x)
        if ACTIVATION == "relu2":
            y = y * y
    return y

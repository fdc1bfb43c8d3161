"""Packed weights turned to floats in one pass, for products of so many rows that PyTorch's own is
the faster: what is read is a weight's bytes, what is written the floats of the step's dtype.

    W: DeviceWeight [out, in] of 4 to 8 bits  ->  floats [out, in], bit for bit
    `DeviceWeight.floats`

    program (n, b)  outputs n*BLOCK_N ..., bytes b*BLOCK_B ... of a row, as `matrix_tile.py` cuts it
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.triton.matrix_tile import (
    FLOATS,
    MatrixArguments,
    numbers_of_groups,
    refusal,
    values_of,
)
from octavo.backends.torch.triton.numbers import rounded
from octavo.backends.torch.triton.tuning import tuned
from octavo.backends.torch.weights import DeviceWeight


def carries(parts: Sequence[DeviceWeight], dtype: torch.dtype) -> bool:
    """All of them; plain floats have nothing to unpack."""
    return dtype in FLOATS and all(
        not part.is_plain and len(part.codes.shape) == 2 and refusal(part) is None for part in parts
    )


def unpacked(parts: Sequence[DeviceWeight], dtype: torch.dtype, device: str) -> Tensor:
    """`[sum of out, in]`: one below the other. `device` as the table of tiles calls it."""
    out = torch.empty(
        sum(part.codes.shape[0] for part in parts),
        parts[0].width,
        dtype=dtype,
        device=parts[0].codes.device,
    )
    start = 0
    for part in parts:
        _unpack(part, out[start : start + part.codes.shape[0]], device)
        start += part.codes.shape[0]
    return out


def _unpack(weight: DeviceWeight, out: Tensor, device: str) -> None:
    matrix = MatrixArguments.of(weight)
    num_outputs, row_bytes = weight.codes.shape
    launch = tuned("unpack", device, outputs=num_outputs, row_bytes=row_bytes, bits=weight.bits)
    _unpack_kernel[
        (triton.cdiv(num_outputs, launch["BLOCK_N"]), triton.cdiv(row_bytes, launch["BLOCK_B"]))
    ](out, weight.width, **matrix.tensors, **matrix.sizes, **matrix.constants, **launch)


@triton.jit
def _unpack_kernel(
    out,
    width,
    codes,
    lookup,
    scales,
    scale_supers,
    mins,
    min_supers,
    num_outputs,
    row_bytes,
    num_groups,
    scale_supers_of,
    min_supers_of,
    IS_PLAIN: tl.constexpr,
    NIBBLES: tl.constexpr,
    HALF: tl.constexpr,
    UNIT: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    outputs_mask = outputs < num_outputs
    tile = tl.program_id(1)
    at = tile * BLOCK_B + tl.arange(0, BLOCK_B)
    mask = outputs_mask[:, None] & (at < row_bytes)[None, :]
    found = tl.load(codes + outputs[:, None] * row_bytes + at[None, :], mask=mask, other=0)
    scale = numbers_of_groups(
        scales,
        scale_supers,
        outputs,
        outputs_mask,
        tile,
        num_groups,
        scale_supers_of,
        UNIT,
        BLOCK_N,
        BLOCK_B,
    )
    least = scale
    if mins is not None:
        least = numbers_of_groups(
            mins,
            min_supers,
            outputs,
            outputs_mask,
            tile,
            num_groups,
            min_supers_of,
            UNIT,
            BLOCK_N,
            BLOCK_B,
        )
    dtype: tl.constexpr = out.dtype.element_ty
    if NIBBLES:
        low = rounded(
            values_of(found & 15, lookup, scale, least, mins is not None, ZERO_POINT), dtype
        )
        high = rounded(
            values_of(found >> 4, lookup, scale, least, mins is not None, ZERO_POINT), dtype
        )
        to = out + outputs[:, None] * width
        if HALF == 1:
            both = tile * (2 * BLOCK_B) + tl.arange(0, 2 * BLOCK_B)
            tl.store(
                to + both[None, :],
                tl.interleave(low, high),
                mask=outputs_mask[:, None] & (both < width)[None, :],
            )
        else:
            k = at // HALF * (2 * HALF) + at % HALF
            tl.store(to + k[None, :], low, mask=mask)
            tl.store(to + (k + HALF)[None, :], high, mask=mask)
    else:
        values = rounded(
            values_of(found, lookup, scale, least, mins is not None, ZERO_POINT), dtype
        )
        tl.store(out + outputs[:, None] * width + at[None, :], values, mask=mask)

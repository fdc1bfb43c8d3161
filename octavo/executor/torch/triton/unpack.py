"""Unpacks weights to floats in one pass, for matmuls with more rows than `packed_linear.py`
handles.

    W: DeviceWeight [out, in] of 4 to 8 bits  ->  floats [out, in], bit for bit
                                                  `DeviceWeight.floats`

    program (n, b)  outputs n*BLOCK_N ..., bytes b*BLOCK_B ... of a row, with the tiles of
    `matrix_tile.py`
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.executor.torch.triton.matrix_tile import (
    FLOATS,
    MatrixBytes,
    dequantize,
    load_scales,
    spread,
    unsupported_reason,
)
from octavo.executor.torch.triton.numbers import rounded
from octavo.executor.torch.triton.tuning import tuned
from octavo.executor.torch.weights.device_weight import DeviceWeight


def supports(parts: Sequence[DeviceWeight], dtype: torch.dtype) -> bool:
    """Returns whether the kernel can unpack all parts; plain floats need no unpacking."""
    return dtype in FLOATS and all(
        not part.is_plain and len(part.codes.shape) == 2 and unsupported_reason(part) is None
        for part in parts
    )


def unpacked(parts: Sequence[DeviceWeight], dtype: torch.dtype, device: str) -> Tensor:
    """Returns the floats of all parts, stacked: `[sum of out, in]`. `device` is the device's name
    in the table of tiles.
    """
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
    num_outputs, row_bytes = weight.codes.shape
    launch = tuned("unpack", device, outputs=num_outputs, row_bytes=row_bytes, bits=weight.bits)
    unpack_kernel[
        (triton.cdiv(num_outputs, launch["BLOCK_N"]), triton.cdiv(row_bytes, launch["BLOCK_B"]))
    ](out, weight.width, MatrixBytes.of(weight), **launch)


@triton.jit
def unpack_kernel(
    out,
    width,
    matrix,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    outputs_mask = outputs < matrix.num_outputs
    tile = tl.program_id(1)
    at = tile * BLOCK_B + tl.arange(0, BLOCK_B)
    mask = outputs_mask[:, None] & (at < matrix.row_bytes)[None, :]
    pointers = matrix.codes + outputs[:, None] * matrix.row_bytes + at[None, :]
    codes = tl.load(pointers, mask=mask, other=0)
    scale, least = load_scales(matrix, outputs, outputs_mask, tile, BLOCK_N, BLOCK_B)
    scale, least = spread(scale, BLOCK_N, BLOCK_B), spread(least, BLOCK_N, BLOCK_B)
    dtype: tl.constexpr = out.dtype.element_ty
    to = out + outputs[:, None] * width
    if matrix.NIBBLES:
        low = rounded(dequantize(codes & 15, scale, least, matrix), dtype)
        high = rounded(dequantize(codes >> 4, scale, least, matrix), dtype)
        if matrix.HALF == 1:
            both = tile * (2 * BLOCK_B) + tl.arange(0, 2 * BLOCK_B)
            both_mask = outputs_mask[:, None] & (both < width)[None, :]
            tl.store(to + both[None, :], tl.interleave(low, high), mask=both_mask)
        else:
            k = at // matrix.HALF * (2 * matrix.HALF) + at % matrix.HALF
            tl.store(to + k[None, :], low, mask=mask)
            tl.store(to + (k + matrix.HALF)[None, :], high, mask=mask)
    else:
        values = rounded(dequantize(codes, scale, least, matrix), dtype)
        tl.store(to + at[None, :], values, mask=mask)

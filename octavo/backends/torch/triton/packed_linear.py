"""Products of few rows with packed weights, unpacked in registers: what is read of a weight is its
bytes, once.

    x [T, in]      W: DeviceWeight [out, in] of 4 to 8 bits, or plain floats

    program (n, s, i)  outputs n*BLOCK_N ..., split s of the inputs, rows 16 i ...:
                       sums [s, T, BLOCK_N] fp32
    program (t, n)     splits 0, 1, ... of a row added in that order, plus bias, rounded:
                       out [T, out]

T is filled up to a multiple of 16, the least that a GPU's matrix units take, beyond 16 rows to 32
or 64. How a weight is cut into tiles and splits depends on the weight alone: with up to 16 rows a
row's result is the same in any company. Unless that is asked for, more than 64 rows and plain
floats go to PyTorch's product (`unpack.py`). Reference: `plain.PlainKernels.product`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.device_weight import DeviceWeight
from octavo.backends.torch.triton.matrix_tile import (
    FLOATS,
    MatrixBytes,
    refusal,
    tiles_times_rows,
)
from octavo.backends.torch.triton.numbers import rounded
from octavo.backends.torch.triton.tuning import tuned
from octavo.backends.torch.weights import Product

FEW_ROWS = 16
MOST_ROWS = 64
"""Most rows of a tile, which reads a weight once for all of them. With more rows the product itself
takes the time, not reading the weight."""

SUM_BLOCK = 256
"""Outputs that one program adds the splits of."""


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """How a weight is cut for a product."""

    launch: Mapping[str, int]
    """BLOCK_N outputs and BLOCK_B bytes of a tile, and Triton's own options."""
    splits: int = 1
    """Number of splits of a row's tiles."""

    @staticmethod
    def of(weight: DeviceWeight, device: str) -> ProductTiles:
        """Returns the tiles of the table. Where it names no splits, there are enough for the
        programs to keep a large GPU busy, with at least four tiles each.
        """
        num_outputs, row_bytes = weight.codes.shape
        launch = tuned(
            "packed_linear", device, outputs=num_outputs, row_bytes=row_bytes, bits=weight.bits
        )
        splits = launch.pop("SPLITS", 0)
        if not splits:
            blocks = triton.cdiv(num_outputs, launch["BLOCK_N"])
            row_tiles = triton.cdiv(row_bytes, launch["BLOCK_B"])
            splits = min(16, max(1, 256 // blocks), max(1, row_tiles // 4))
        return ProductTiles(launch, splits)


def carries(x: Tensor, product: Product) -> bool:
    """Returns whether the kernel computes this product, however many rows there are."""
    if not len(x) or x.dtype not in FLOATS or x.stride(1) != 1:
        return False
    return all(
        refusal(part) is None and (not part.is_plain or part.codes.dtype == x.dtype)
        for part in product.parts
    )


def gains(x: Tensor, product: Product) -> bool:
    """Returns whether the kernel reads less than PyTorch's product does."""
    return len(x) <= MOST_ROWS and not any(part.is_plain for part in product.parts)


def packed_product(x: Tensor, product: Product, device: str, tile_rows: int = FEW_ROWS) -> Tensor:
    """Multiplies `x [T, in]`, rows at any stride: `[T, sum of out]`. `device` is the device's name
    in the table of tiles.
    """
    widths = [part.codes.shape[0] for part in product.parts]
    out = torch.empty(len(x), sum(widths), dtype=x.dtype, device=x.device)
    start = 0
    for part, width in zip(product.parts, widths, strict=True):
        bias = None if product.bias is None else product.bias[start : start + width]
        multiply(
            x, part, bias, out[:, start : start + width], ProductTiles.of(part, device), tile_rows
        )
        start += width
    return out


def tile_rows_of(num_rows: int) -> int:
    return FEW_ROWS if num_rows <= FEW_ROWS else 32 if num_rows <= 32 else MOST_ROWS


def multiply(
    x: Tensor,
    weight: DeviceWeight,
    bias: Tensor | None,
    out: Tensor,
    tiles: ProductTiles,
    tile_rows: int = FEW_ROWS,
) -> None:
    """Multiplies `x [T, in]` with `weight [out, in]`, and writes `out [T, out]`."""
    num_rows, num_outputs = out.shape
    num_tiles = triton.cdiv(weight.codes.shape[1], tiles.launch["BLOCK_B"])
    sums = torch.empty(tiles.splits, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    packed_linear_kernel[
        (
            triton.cdiv(num_outputs, tiles.launch["BLOCK_N"]),
            tiles.splits,
            triton.cdiv(num_rows, tile_rows),
        )
    ](
        x=x,
        x_stride=x.stride(0),
        num_rows=num_rows,
        sums=sums,
        tiles_of_a_split=triton.cdiv(num_tiles, tiles.splits),
        num_tiles=num_tiles,
        matrix=MatrixBytes.of(weight),
        BLOCK_M=tile_rows,
        **tiles.launch,
    )
    sum_splits_kernel[(num_rows, triton.cdiv(num_outputs, SUM_BLOCK))](
        sums, bias, out, out.stride(0), num_rows, num_outputs, SPLITS=tiles.splits, BLOCK=SUM_BLOCK
    )


@triton.jit
def packed_linear_kernel(
    x,
    x_stride,
    num_rows,
    sums,
    tiles_of_a_split,
    num_tiles,
    matrix,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    split = tl.program_id(1)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    outputs_mask = outputs < matrix.num_outputs
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_mask = rows < num_rows
    first = split * tiles_of_a_split
    acc = tiles_times_rows(
        x=x,
        x_offsets=rows.to(tl.int64) * x_stride,
        x_mask=rows_mask,
        matrix=matrix,
        outputs=outputs,
        outputs_mask=outputs_mask,
        first_tile=first,
        last_tile=tl.minimum(first + tiles_of_a_split, num_tiles),
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_B=BLOCK_B,
    )
    at = (split * num_rows + rows).to(tl.int64) * matrix.num_outputs
    tl.store(
        sums + at[None, :] + outputs[:, None], acc, mask=outputs_mask[:, None] & rows_mask[None, :]
    )


@triton.jit
def sum_splits_kernel(
    sums, bias, out, out_stride, num_rows, num_outputs, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_outputs
    total = tl.load(sums + row * num_outputs + at, mask=inside, other=0.0)
    for split in range(1, SPLITS):
        total += tl.load(sums + (split * num_rows + row) * num_outputs + at, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, rounded(total, out.dtype.element_ty), mask=inside)

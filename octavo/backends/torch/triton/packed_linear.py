"""Products of few rows with packed weights, unpacked in registers: what is read of a weight is its
bytes, once.

    x [T, in]      W: DeviceWeight [out, in] of 4 to 8 bits, or plain floats

    program (n, s, i)  outputs n*BLOCK_N ..., split s of the inputs, rows 16 i ...:  sums [s, T,
    BLOCK_N] fp32 program (t, n)     splits 0, 1, ... of a row added in that order, plus bias,
    rounded:  out [T, out]

T is filled up to a multiple of 16, the least that a GPU's matrix units take, beyond 16 rows to 32
or 64. How a weight is cut into tiles and splits depends on the weight alone: of up to 16 rows a
row's result is the same in any company. Where that is not asked for, more than 64 rows and plain
floats are PyTorch's (`unpack.py`). Reference: `plain.PlainKernels.product`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.triton.matrix_tile import (
    FLOATS,
    MatrixArguments,
    refusal,
    tiles_times_rows,
)
from octavo.backends.torch.triton.numbers import rounded
from octavo.backends.torch.triton.tuning import tuned
from octavo.backends.torch.weights import DeviceWeight, Product

FEW_ROWS = 16
MOST_ROWS = 64
"""Of a tile: a weight that is read once for all rows of a step. Beyond, the product itself takes
the time.
"""

SUM_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Tiles:
    """`launch`: BLOCK_N outputs and BLOCK_B bytes of a tile, and Triton's own; into how many splits
    the tiles of a row go.
    """

    launch: Mapping[str, int]
    splits: int = 1

    @staticmethod
    def of(weight: DeviceWeight, device: str) -> Tiles:
        """As the table says; splits where it is silent: enough programs to keep a large GPU busy,
        with at least four tiles each.
        """
        num_outputs, row_bytes = weight.codes.shape
        launch = tuned(
            "packed_linear", device, outputs=num_outputs, row_bytes=row_bytes, bits=weight.bits
        )
        splits = launch.pop("SPLITS", 0)
        if not splits:
            blocks, most = (
                triton.cdiv(num_outputs, launch["BLOCK_N"]),
                triton.cdiv(row_bytes, launch["BLOCK_B"]),
            )
            splits = min(16, max(1, 256 // blocks), max(1, most // 4))
        return Tiles(launch, splits)


def carries(x: Tensor, product: Product) -> bool:
    """Whatever the number of rows."""
    if not len(x) or x.dtype not in FLOATS or x.stride(1) != 1:
        return False
    return all(
        refusal(part) is None and (not part.is_plain or part.codes.dtype == x.dtype)
        for part in product.parts
    )


def gains(x: Tensor, product: Product) -> bool:
    """Where it reads less than PyTorch's product does."""
    return len(x) <= MOST_ROWS and not any(part.is_plain for part in product.parts)


def packed_product(x: Tensor, product: Product, device: str, tile_rows: int = FEW_ROWS) -> Tensor:
    """`x [T, in]`, rows at any stride, to `[T, sum of out]`; `device` as the table of tiles calls
    it.
    """
    widths = [part.codes.shape[0] for part in product.parts]
    out = torch.empty(len(x), sum(widths), dtype=x.dtype, device=x.device)
    start = 0
    for part, width in zip(product.parts, widths, strict=True):
        bias = None if product.bias is None else product.bias[start : start + width]
        multiply(x, part, bias, out[:, start : start + width], Tiles.of(part, device), tile_rows)
        start += width
    return out


def tile_rows_of(num_rows: int) -> int:
    return FEW_ROWS if num_rows <= FEW_ROWS else 32 if num_rows <= 32 else MOST_ROWS


def multiply(
    x: Tensor,
    weight: DeviceWeight,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
    tile_rows: int = FEW_ROWS,
) -> None:
    """`x [T, in]`, `weight [out, in]`, `out [T, out]` to be written."""
    matrix = MatrixArguments.of(weight)
    num_rows, num_outputs = out.shape
    num_tiles = triton.cdiv(weight.codes.shape[1], tiles.launch["BLOCK_B"])
    sums = torch.empty(tiles.splits, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    _packed_linear_kernel[
        (
            triton.cdiv(num_outputs, tiles.launch["BLOCK_N"]),
            tiles.splits,
            triton.cdiv(num_rows, tile_rows),
        )
    ](
        x,
        x.stride(0),
        num_rows,
        sums,
        triton.cdiv(num_tiles, tiles.splits),
        num_tiles,
        **matrix.tensors,
        **matrix.sizes,
        **matrix.constants,
        BLOCK_M=tile_rows,
        **tiles.launch,
    )
    _sum_splits_kernel[(num_rows, triton.cdiv(num_outputs, SUM_BLOCK))](
        sums, bias, out, out.stride(0), num_rows, num_outputs, SPLITS=tiles.splits, BLOCK=SUM_BLOCK
    )


@triton.jit
def _packed_linear_kernel(
    x,
    x_stride,
    num_rows,
    sums,
    tiles_of_a_split,
    num_tiles,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    split = tl.program_id(1)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    outputs_mask = outputs < num_outputs
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_mask = rows < num_rows
    first = split * tiles_of_a_split
    acc = tiles_times_rows(
        x,
        rows.to(tl.int64) * x_stride,
        rows_mask,
        codes,
        lookup,
        scales,
        scale_supers,
        mins,
        min_supers,
        outputs,
        outputs_mask,
        first,
        tl.minimum(first + tiles_of_a_split, num_tiles),
        row_bytes,
        num_groups,
        scale_supers_of,
        min_supers_of,
        IS_PLAIN,
        NIBBLES,
        HALF,
        UNIT,
        ZERO_POINT,
        BLOCK_M,
        BLOCK_N,
        BLOCK_B,
    )
    at = (split * num_rows + rows).to(tl.int64) * num_outputs
    tl.store(
        sums + at[None, :] + outputs[:, None], acc, mask=outputs_mask[:, None] & rows_mask[None, :]
    )


@triton.jit
def _sum_splits_kernel(
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

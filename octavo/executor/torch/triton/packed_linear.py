"""Matmuls of few rows with packed weights, which are unpacked in registers, so a weight's bytes are
read once.

    x [T, in]      W: DeviceWeight [out, in] of 4 to 8 bits, or plain floats

    program (n, s, i)  outputs n*BLOCK_N ..., split s of the inputs, rows 16 i ...
                       one split:  plus bias, rounded:  out [T, out]
                       several:    sums [s, T, BLOCK_N] fp32, then arrivals [i, n] += 1; the last
                                   program adds the sums of splits 0, 1, ... in that order, plus
                                   bias, rounded:  out [T, out], and arrivals [i, n] = 0

T is padded to 8 (the minimum of a GPU's matrix units) or to a multiple of 16; more than 16 rows
read a weight several times, mostly from the GPU's cache. The division of a weight into tiles and
splits depends only on the complete weight, so a row's result depends neither on other rows nor on
the number of ranks. More than 64 rows and plain floats use PyTorch's matmul (`unpack.py`), unless
batch invariance is required. Reference: `plain.PlainKernels.product`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.executor.torch.triton.device import device_name
from octavo.executor.torch.triton.matrix_tile import (
    FLOATS,
    MatrixBytes,
    unsupported_reason,
)
from octavo.executor.torch.triton.numbers import rounded
from octavo.executor.torch.triton.scaled_sums import tiles_times_rows
from octavo.executor.torch.triton.tuning import tuned
from octavo.executor.torch.weights.device_weight import DeviceWeight
from octavo.executor.torch.weights.program_weights import Product

FEWEST_ROWS = 8
"""Smallest row tile, with half the registers and instructions of 16 rows."""

TILE_ROWS = 16
"""Largest row tile. With 32 rows a thread's sums no longer fit in its registers."""

MOST_ROWS = 64
"""Largest number of rows for which unpacking a weight in each tile is estimated to take less time
than unpacking it once to memory.
"""

ENOUGH_PROGRAMS = 512
"""Number of programs that keep a large GPU busy."""

MOST_ARRIVALS = 1 << 16
"""Maximum number of output and row blocks per launch whose splits can be counted; more rows use
additional launches.
"""


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Tiling of a weight for a matmul."""

    launch: Mapping[str, int]
    """BLOCK_N outputs and BLOCK_B bytes per tile, and Triton's own options."""
    splits: int = 1
    """Splits of a row's tiles."""

    @staticmethod
    def of(weight: DeviceWeight, device: str) -> ProductTiles:
        """Returns the tiles from the table.

        If it lists no splits, uses enough to keep a large GPU busy, with at least two tiles each.
        """
        num_outputs, row_bytes = weight.tiled_outputs, weight.codes.shape[1]
        launch = tuned(
            "packed_linear",
            device,
            outputs=num_outputs,
            row_bytes=row_bytes,
            bits=weight.bits,
            group=weight.group,
        )
        splits = launch.pop("SPLITS", 0)
        if not splits:
            blocks = triton.cdiv(num_outputs, launch["BLOCK_N"])
            row_tiles = triton.cdiv(row_bytes, launch["BLOCK_B"])
            splits = min(16, max(1, ENOUGH_PROGRAMS // blocks), max(1, row_tiles // 2))
        return ProductTiles(launch, splits)


class PackedProducts:
    """Packed matmuls on one device, run one after another: they share the arrival counters, which
    each launch resets to zero.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _name(self) -> str:
        return device_name(self._device)

    @cached_property
    def _arrivals(self) -> Tensor:
        """Arrival counters; created by the first launch, which no graph captures."""
        return torch.zeros(MOST_ARRIVALS, dtype=torch.int32, device=self._device)

    def product(self, x: Tensor, product: Product, tile_rows: int = TILE_ROWS) -> Tensor:
        """Multiplies `x [T, in]` with arbitrary row strides: `[T, sum of out]`."""
        widths = [part.codes.shape[0] for part in product.parts]
        out = torch.empty(len(x), sum(widths), dtype=x.dtype, device=x.device)
        start = 0
        for part, width in zip(product.parts, widths, strict=True):
            bias = None if product.bias is None else product.bias[start : start + width]
            tiles = ProductTiles.of(part, self._name)
            self.multiply(x, part, bias, out[:, start : start + width], tiles, tile_rows)
            start += width
        return out

    def multiply(
        self,
        x: Tensor,
        weight: DeviceWeight,
        bias: Tensor | None,
        out: Tensor,
        tiles: ProductTiles,
        tile_rows: int = TILE_ROWS,
    ) -> None:
        """Computes `out [T, out]` from `x [T, in]` and `weight [out, in]`."""
        blocks = triton.cdiv(out.shape[1], tiles.launch["BLOCK_N"])
        assert tiles.splits == 1 or blocks <= MOST_ARRIVALS, "splits are for weights of few outputs"
        most_rows = MOST_ARRIVALS // blocks * tile_rows if tiles.splits > 1 else len(x)
        for first in range(0, len(x), most_rows):
            some = slice(first, first + most_rows)
            self._launch(x[some], weight, bias, out[some], tiles, tile_rows)

    def _launch(
        self,
        x: Tensor,
        weight: DeviceWeight,
        bias: Tensor | None,
        out: Tensor,
        tiles: ProductTiles,
        tile_rows: int,
    ) -> None:
        num_rows, num_outputs = out.shape
        num_tiles = triton.cdiv(weight.codes.shape[1], tiles.launch["BLOCK_B"])
        sums = None
        if tiles.splits > 1:
            shape = (tiles.splits, num_rows, num_outputs)
            sums = torch.empty(shape, dtype=torch.float32, device=x.device)
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
            arrivals=None if sums is None else self._arrivals,
            bias=bias,
            out=out,
            out_stride=out.stride(0),
            tiles_of_a_split=triton.cdiv(num_tiles, tiles.splits),
            num_tiles=num_tiles,
            matrix=MatrixBytes.of(weight),
            BLOCK_M=tile_rows,
            **tiles.launch,
        )


def supports(x: Tensor, product: Product) -> bool:
    """Returns whether the kernel supports this matmul, for any number of rows."""
    if not len(x) or x.dtype not in FLOATS or x.stride(1) != 1:
        return False
    return all(
        unsupported_reason(part) is None and (not part.is_plain or part.codes.dtype == x.dtype)
        for part in product.parts
    )


def gains(x: Tensor, product: Product) -> bool:
    """Returns whether the kernel reads less memory than PyTorch's matmul."""
    return len(x) <= MOST_ROWS and not any(part.is_plain for part in product.parts)


def get_tile_rows(num_rows: int) -> int:
    """Returns the rows per tile. Results should not depend on it."""
    return FEWEST_ROWS if num_rows <= FEWEST_ROWS else TILE_ROWS


@triton.jit(do_not_specialize=["num_rows", "out_stride", "tiles_of_a_split", "num_tiles"])
def packed_linear_kernel(
    x,
    x_stride,
    num_rows,
    sums,
    arrivals,
    bias,
    out,
    out_stride,
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
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    rows_mask = rows < num_rows
    first = split * tiles_of_a_split
    acc = tiles_times_rows(
        x=x,
        x_offsets=rows * x_stride,
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
    mask = outputs_mask[:, None] & rows_mask[None, :]
    if sums is None:
        write_result(out, out_stride, bias, acc, outputs, outputs_mask, rows, mask)
    else:
        splits = tl.num_programs(1)
        at = sums + rows[None, :] * matrix.num_outputs + outputs[:, None]
        split_size = num_rows.to(tl.int64) * matrix.num_outputs
        tl.store(at + split * split_size, acc, mask=mask)
        arrived = arrivals + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        # All threads must have stored their sums before the program's arrival is counted.
        tl.debug_barrier()
        if tl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1:
            total = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
            for other in range(1, splits):
                total += tl.load(
                    at + other * split_size, mask=mask, other=0.0, cache_modifier=".cg"
                )
            write_result(out, out_stride, bias, total, outputs, outputs_mask, rows, mask)
            tl.store(arrived, 0)


@triton.jit
def write_result(out, out_stride, bias, total, outputs, outputs_mask, rows, mask):
    """Writes `total [BLOCK_N, BLOCK_M]` plus the bias to `out [T, out]`."""
    if bias is not None:
        total += tl.load(bias + outputs, mask=outputs_mask, other=0.0).to(tl.float32)[:, None]
    to = out + rows[None, :] * out_stride + outputs[:, None]
    tl.store(to, rounded(total, out.dtype.element_ty), mask=mask)

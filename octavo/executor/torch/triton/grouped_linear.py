"""Matmuls of expert rows with their expert's matrix: rows are sorted by expert, with one expert per
tile.

    x [R, in]   experts [R]   W [E, out, in], plain or packed
    order [R]: rows sorted by expert, those of one expert in their own order

    program (i, n)  tile i: at most BLOCK_M rows of one expert, gathered through `order`;
                    outputs n*BLOCK_N ...  ->  out [R, out]

Tiles are computed on the device from the ids (`ExpertRows.of`), always as many as the maximum, so
the host need not wait for a count and a CUDA graph can contain the launch. Inputs are summed tile
by tile, for each row in the same order regardless of other rows. Reference:
`plain.PlainKernels.grouped`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.executor.torch.triton.matrix_tile import (
    FLOATS,
    MatrixBytes,
    unsupported_reason,
)
from octavo.executor.torch.triton.numbers import rounded
from octavo.executor.torch.triton.scaled_sums import tiles_times_rows
from octavo.executor.torch.triton.tuning import tuned
from octavo.executor.torch.weights.device_weight import DeviceWeight

FEW_ROWS = 32
"""Mean number of rows per expert up to which tiles have 16 rows; above it, 64."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRows:
    """Rows of a step sorted by expert and divided into tiles of one expert each; int64, on the
    device.
    """

    experts: Tensor
    """Expert of each row, `[R]`."""
    order: Tensor
    """Rows sorted by expert, `[R]`."""
    tile_experts: Tensor
    """Expert of each tile, `[tiles]`; E for an empty tile."""
    tile_starts: Tensor
    """First index in `order` of each tile, `[tiles]`."""
    tile_stops: Tensor
    """End index in `order` of each tile, `[tiles]`."""
    tile_rows: int
    """Rows per tile."""

    @staticmethod
    def of(experts: Tensor, num_experts: int, tile_rows: int) -> ExpertRows:
        """Sorts rows by `experts [R]`, each below `num_experts`; negative ones are in no tile."""
        experts = experts.long()
        # Rows without an expert come after all others.
        buckets = torch.where(experts < 0, num_experts, experts)
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device)
        counts = counts.scatter_add_(0, buckets, torch.ones_like(buckets))[:num_experts]
        stops, tiles = counts.cumsum(0), (counts + tile_rows - 1) // tile_rows
        tile_stops = tiles.cumsum(0)
        max_tiles = min(len(experts), (len(experts) + num_experts * (tile_rows - 1)) // tile_rows)
        tile_ids = torch.arange(max_tiles, device=experts.device)
        expert = torch.searchsorted(tile_stops, tile_ids, right=True)
        known = expert.clamp(max=num_experts - 1)
        starts = (
            stops[known] - counts[known] + (tile_ids - tile_stops[known] + tiles[known]) * tile_rows
        )
        return ExpertRows(
            experts,
            buckets.argsort(stable=True),
            expert,
            starts,
            torch.minimum(starts + tile_rows, stops[known]),
            tile_rows,
        )


class ExpertTiles(NamedTuple):
    """Fields of `ExpertRows` that the kernel reads."""

    order: Tensor
    experts: Tensor
    starts: Tensor
    stops: Tensor
    num_experts: int


def get_tile_rows(num_rows: int, num_experts: int) -> int:
    return 16 if num_rows <= FEW_ROWS * num_experts else 64


def supports(x: Tensor, matrix: DeviceWeight) -> bool:
    if x.dtype not in FLOATS or x.stride(1) != 1 or unsupported_reason(matrix) is not None:
        return False
    return not matrix.is_plain or (matrix.codes.dtype == x.dtype and matrix.codes.is_contiguous())


def grouped_product(
    x: Tensor, rows: ExpertRows, matrix: DeviceWeight, bias: Tensor | None, device: str
) -> Tensor:
    """Multiplies `x [R, in]` and adds `bias [E, out] fp32`: `[R, out]` in x's dtype."""
    num_experts, num_outputs, row_bytes = matrix.codes.shape
    out = torch.empty(len(x), num_outputs, dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    tiles = ExpertTiles(
        order=rows.order,
        experts=rows.tile_experts,
        starts=rows.tile_starts,
        stops=rows.tile_stops,
        num_experts=num_experts,
    )
    launch = tuned(
        "grouped_linear",
        device,
        tile_rows=rows.tile_rows,
        outputs=matrix.tiled_outputs,
        row_bytes=row_bytes,
        bits=matrix.bits,
    )
    grouped_linear_kernel[(len(rows.tile_experts), triton.cdiv(num_outputs, launch["BLOCK_N"]))](
        x=x,
        x_stride=x.stride(0),
        tiles=tiles,
        bias=bias,
        out=out,
        num_tiles=triton.cdiv(row_bytes, launch["BLOCK_B"]),
        matrix=MatrixBytes.of(matrix),
        BLOCK_M=rows.tile_rows,
        **launch,
    )
    return out


@triton.jit
def grouped_linear_kernel(
    x,
    x_stride,
    tiles,
    bias,
    out,
    num_tiles,
    matrix,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = tl.load(tiles.experts + tile)
    if expert < tiles.num_experts:
        sorted_at = tl.load(tiles.starts + tile) + tl.arange(0, BLOCK_M)
        rows_mask = sorted_at < tl.load(tiles.stops + tile)
        rows = tl.load(tiles.order + sorted_at, mask=rows_mask, other=0)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
        columns_mask = columns < matrix.num_outputs
        outputs = expert * matrix.num_outputs + columns
        acc = tiles_times_rows(
            x=x,
            x_offsets=rows * x_stride,
            x_mask=rows_mask,
            matrix=matrix,
            outputs=outputs,
            outputs_mask=columns_mask,
            first_tile=0,
            last_tile=num_tiles,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_B=BLOCK_B,
        )
        if bias is not None:
            acc += tl.load(bias + outputs, mask=columns_mask, other=0.0)[:, None]
        to = out + rows[None, :] * matrix.num_outputs + columns[:, None]
        mask = columns_mask[:, None] & rows_mask[None, :]
        tl.store(to, rounded(acc, out.dtype.element_ty), mask=mask)

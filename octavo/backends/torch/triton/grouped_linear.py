"""Products of expert rows, each with its expert's matrix: rows sorted by expert, one expert a tile.

    x [R, in]   experts [R]   W [E, out, in], plain or packed      order [R]: rows by expert, those
    of one expert in their order

    program (i, n)  tile i: at most BLOCK_M rows of one expert, gathered through `order`;  outputs
    n*BLOCK_N ...  ->  out [R, out]

The tiles are made on the device of the ids alone (`ExpertRows.of`), as many as there may be at
most: nobody waits for a count, and a graph can hold it. Sums go over the inputs tile by tile, for
each row the same whatever rows stand beside it. Reference: `plain.PlainKernels.grouped`.
"""

from __future__ import annotations

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
from octavo.backends.torch.weights import DeviceWeight

FEW_ROWS = 32
"""Of an expert in the mean: up to here tiles have 16 rows, beyond 64."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRows:
    """`order [R] int64`; of each tile its expert (E where the tile is empty) and which part of
    `order` it has, `[tiles] int64`.
    """

    experts: Tensor
    order: Tensor
    tile_experts: Tensor
    tile_starts: Tensor
    tile_stops: Tensor
    tile_rows: int

    @staticmethod
    def of(experts: Tensor, num_experts: int, tile_rows: int) -> ExpertRows:
        """`experts [R]`, each row's, below `num_experts`."""
        experts = experts.long()
        counts = torch.zeros(num_experts, dtype=torch.int64, device=experts.device).scatter_add_(
            0, experts, torch.ones_like(experts)
        )
        stops, tiles = counts.cumsum(0), (counts + tile_rows - 1) // tile_rows
        tile_stops = tiles.cumsum(0)
        most = min(len(experts), (len(experts) + num_experts * (tile_rows - 1)) // tile_rows)
        at = torch.arange(most, device=experts.device)
        expert = torch.searchsorted(tile_stops, at, right=True)
        known = expert.clamp(max=num_experts - 1)
        starts = stops[known] - counts[known] + (at - tile_stops[known] + tiles[known]) * tile_rows
        return ExpertRows(
            experts,
            experts.argsort(stable=True),
            expert,
            starts,
            torch.minimum(starts + tile_rows, stops[known]),
            tile_rows,
        )


def tile_rows_of(num_rows: int, num_experts: int) -> int:
    return 16 if num_rows <= FEW_ROWS * num_experts else 64


def carries(x: Tensor, matrix: DeviceWeight) -> bool:
    if x.dtype not in FLOATS or x.stride(1) != 1 or refusal(matrix) is not None:
        return False
    return not matrix.is_plain or (matrix.codes.dtype == x.dtype and matrix.codes.is_contiguous())


def grouped_product(
    x: Tensor, rows: ExpertRows, matrix: DeviceWeight, bias: Tensor | None, device: str
) -> Tensor:
    """`x [R, in]` to `[R, out]`, plus `bias [E, out] fp32`."""
    num_experts, num_outputs, row_bytes = matrix.codes.shape
    out = torch.empty(len(x), num_outputs, dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    arguments = MatrixArguments.of(matrix)
    launch = tuned(
        "grouped_linear",
        device,
        tile_rows=rows.tile_rows,
        outputs=num_outputs,
        row_bytes=row_bytes,
        bits=matrix.bits,
    )
    _grouped_linear_kernel[(len(rows.tile_experts), triton.cdiv(num_outputs, launch["BLOCK_N"]))](
        x,
        x.stride(0),
        rows.order,
        rows.tile_experts,
        rows.tile_starts,
        rows.tile_stops,
        num_experts,
        bias,
        out,
        triton.cdiv(row_bytes, launch["BLOCK_B"]),
        **arguments.tensors,
        **arguments.sizes,
        **arguments.constants,
        BLOCK_M=rows.tile_rows,
        **launch,
    )
    return out


@triton.jit
def _grouped_linear_kernel(
    x,
    x_stride,
    order,
    tile_experts,
    tile_starts,
    tile_stops,
    num_experts,
    bias,
    out,
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
    expert = tl.load(tile_experts + tl.program_id(0))
    if expert < num_experts:
        sorted_at = tl.load(tile_starts + tl.program_id(0)) + tl.arange(0, BLOCK_M)
        rows_mask = sorted_at < tl.load(tile_stops + tl.program_id(0))
        rows = tl.load(order + sorted_at, mask=rows_mask, other=0)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
        columns_mask = columns < num_outputs
        acc = tiles_times_rows(
            x,
            rows * x_stride,
            rows_mask,
            codes,
            lookup,
            scales,
            scale_supers,
            mins,
            min_supers,
            expert * num_outputs + columns,
            columns_mask,
            0,
            num_tiles,
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
        if bias is not None:
            acc += tl.load(bias + expert * num_outputs + columns, mask=columns_mask, other=0.0)[
                :, None
            ]
        at = rows[None, :] * num_outputs + columns[:, None]
        tl.store(
            out + at,
            rounded(acc, out.dtype.element_ty),
            mask=columns_mask[:, None] & rows_mask[None, :],
        )

"""Chooses between Triton kernels and plain PyTorch for each computation: Triton if its kernels
support it.

Each kernel module states its conditions in `supports`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.executor.torch.plain import Norm, PlainKernels
from octavo.executor.torch.triton import (
    act_mul,
    combine,
    fp8_rows,
    grouped_linear,
    packed_linear,
    pick,
    unpack,
)
from octavo.executor.torch.triton import norm as norms
from octavo.executor.torch.triton.device import device_name
from octavo.executor.torch.triton.grouped_linear import ExpertRows
from octavo.executor.torch.weights.device_weight import DeviceWeight
from octavo.executor.torch.weights.program_weights import Product
from octavo.program import ops


class TritonKernels:
    """Triton's kernels on one device. Implements `kernels.Kernels`.

    With `fixed_tiles` a row's bits are independent of other rows: tiles never depend on the number
    of rows, and unsupported computations run row by row.
    """

    name = "triton"

    def __init__(self, device: torch.device, *, fixed_tiles: bool = False) -> None:
        self._plain = PlainKernels()
        self._device = device_name(device)
        self._packed = packed_linear.PackedProducts(device)
        self.is_invariant = fixed_tiles
        self.captured_rows: int | None = None

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        if norms.supports(x, norm):
            return norms.norm_rows(x, norm)
        return self._plainly(self._plain.norm, x, norm)

    def add_norm(self, a: Tensor, b: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        if norms.supports(a, norm) and norms.supports(b, norm):
            return norms.add_norm_rows(a, b, norm)
        total = a + b
        return total, self.norm(total, norm)

    def gated(self, gate: Tensor, up: Tensor, how: ops.ActMul | ops.Gate) -> Tensor:
        return (
            act_mul.act_mul(gate, up, how)
            if act_mul.supports(gate, up, how)
            else self._plain.gated(gate, up, how)
        )

    def product(self, x: Tensor, product: Product) -> Tensor:
        if packed_linear.supports(x, product) and (
            self.is_invariant or packed_linear.gains(x, product)
        ):
            tile_rows = (
                packed_linear.TILE_ROWS
                if self.is_invariant
                else packed_linear.get_tile_rows(len(x))
            )
            return self._packed.product(x, product, tile_rows)
        if not self.is_invariant and product.is_scaled and fp8_rows.supports(x):
            rows, scales = fp8_rows.quantized(x)
            return product.parts[0].scaled_product(rows, scales, product.bias, x.dtype)
        if not self.is_invariant and unpack.supports(product.parts, x.dtype):
            return F.linear(x, unpack.unpacked(product.parts, x.dtype, self._device), product.bias)
        return self._plainly(self._plain.product, x, product)

    def rows_of_experts(self, experts: Tensor, num_experts: int) -> ExpertRows:
        tile_rows = (
            16 if self.is_invariant else grouped_linear.get_tile_rows(len(experts), num_experts)
        )
        return ExpertRows.of(experts, num_experts, tile_rows)

    def grouped(
        self, x: Tensor, rows: ExpertRows, matrix: DeviceWeight, bias: Tensor | None
    ) -> Tensor:
        if grouped_linear.supports(x, matrix):
            return grouped_linear.grouped_product(x, rows, matrix, bias, self._device)
        if not self.is_invariant:
            return self._plain.grouped(x, rows.experts, matrix, bias)
        parts = [
            self._plain.grouped(x[i : i + 1], rows.experts[i : i + 1], matrix, bias)
            for i in range(len(x))
        ]
        return torch.cat(parts) if parts else self._plain.grouped(x, rows.experts, matrix, bias)

    def combined(self, x: Tensor, weights: Tensor) -> Tensor:
        return (
            combine.combine_rows(x, weights)
            if combine.supports(x, weights)
            else self._plain.combined(x, weights)
        )

    def sums(self, x: Tensor) -> Tensor:
        return (
            torch.stack([row.sum() for row in x])
            if self.is_invariant and len(x)
            else self._plain.sums(x)
        )

    def pick(
        self, z: Tensor, top: Tensor, temperature: Tensor, records: Tensor, *, cuts: bool
    ) -> Tensor:
        return pick.pick(z, top, temperature, records, cuts=cuts, device=self._device)

    def _plainly(self, compute: Callable[[Tensor, Any], Tensor], x: Tensor, how: Any) -> Tensor:
        if not self.is_invariant or len(x) < 2:
            return compute(x, how)
        return torch.cat([compute(x[row : row + 1], how) for row in range(len(x))])

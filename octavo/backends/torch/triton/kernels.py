"""Triton's kernels where they carry what is asked, plain torch everywhere else; the one place that says which.

Each kernel's file states its rule (`carries`); nothing is computed by a kernel that does not carry it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.backends.torch.plain import Cuts, Norm, PlainKernels
from octavo.backends.torch.triton import act_mul, combine, grouped_linear, packed_linear, pick
from octavo.backends.torch.triton import norm as norms
from octavo.backends.torch.triton.device import device_name
from octavo.backends.torch.triton.grouped_linear import ExpertRows
from octavo.backends.torch.weights import DeviceWeight, Product
from octavo.program import ops


class TritonKernels:
    """Implements `kernels.Kernels`."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self._plain = PlainKernels()
        self._device = device_name(device)
        self.captured_rows: int | None = None

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return norms.norm_rows(x, norm) if norms.carries(x, norm) else self._plain.norm(x, norm)

    def add_norm(self, a: Tensor, b: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        carried = norms.carries(a, norm) and norms.carries(b, norm)
        return norms.add_norm_rows(a, b, norm) if carried else self._plain.add_norm(a, b, norm)

    def gated(self, gate: Tensor, up: Tensor, how: ops.ActMul | ops.Gate) -> Tensor:
        return act_mul.act_mul(gate, up, how) if act_mul.carries(gate, up, how) else self._plain.gated(gate, up, how)

    def product(self, x: Tensor, product: Product) -> Tensor:
        if packed_linear.carries(x, product):
            return packed_linear.packed_product(x, product, self._device)
        return self._plain.product(x, product)

    def rows_of_experts(self, experts: Tensor, num_experts: int) -> ExpertRows:
        return ExpertRows.of(experts, num_experts, grouped_linear.tile_rows_of(len(experts), num_experts))

    def grouped(self, x: Tensor, rows: ExpertRows, matrix: DeviceWeight, bias: Tensor | None) -> Tensor:
        if grouped_linear.carries(x, matrix):
            return grouped_linear.grouped_product(x, rows, matrix, bias, self._device)
        return self._plain.grouped(x, rows.experts, matrix, bias)

    def combined(self, x: Tensor, weights: Tensor) -> Tensor:
        return combine.combine_rows(x, weights) if combine.carries(x, weights) else self._plain.combined(x, weights)

    def pick(self, z: Tensor, weights: Tensor, points: Tensor, cuts: Cuts) -> Tensor:
        return pick.pick(z, weights, points, cuts, self._device)

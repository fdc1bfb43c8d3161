"""Plain PyTorch versions of the computations with Triton kernels: norms, gates, matmuls, experts,
sampling.

Reference for the kernels' tests, and fallback for what they do not support.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.executor.torch import sampler_ops
from octavo.executor.torch.full_vectors import by_full_vectors, linear_by_tiles
from octavo.executor.torch.weights.device_weight import DeviceWeight, LinearFn
from octavo.executor.torch.weights.program_weights import Product
from octavo.program import ops

GATHERED_ROWS = 8
"""Maximum number of expert rows at which each row gathers its expert's matrix."""


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """Parameters of a norm: y = x / sqrt(mean(x^2) + eps) * (weight + offset) + bias over groups of
    `width` columns (0: the entire row).

    `centered` subtracts mean(x) first. `weight` and `bias` are `[width] fp32`, or `weight` covers
    the entire row.
    """

    weight: Tensor
    eps: float
    offset: float = 0.0
    width: int = 0
    bias: Tensor | None = None
    centered: bool = False


class PlainKernels:
    """Plain PyTorch on any device. Implements `kernels.Kernels`.

    With `fixed_tiles`, which requires steps of one row on a CPU, an output of a matmul does not
    depend on the number of outputs.
    """

    name = "plain"
    is_invariant = False
    captured_rows: int | None = GATHERED_ROWS

    def __init__(self, *, fixed_tiles: bool = False) -> None:
        self._linear: LinearFn = linear_by_tiles if fixed_tiles else F.linear
        self._fixed_tiles = fixed_tiles

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        width = norm.width or x.shape[1]
        groups = x.float().view(len(x), x.shape[1] // width, width)
        if norm.centered:
            groups = groups - groups.mean(dim=-1, keepdim=True)
        scale = torch.rsqrt((groups * groups).mean(dim=-1, keepdim=True) + norm.eps)
        weight = norm.weight.view(-1, width)
        normed = groups * scale * (weight + norm.offset if norm.offset else weight)
        normed = normed if norm.bias is None else normed + norm.bias
        return normed.view(x.shape).to(x.dtype)

    def add_norm(self, a: Tensor, b: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        total = a + b
        return total, self.norm(total, norm)

    def gated(self, gate: Tensor, up: Tensor, how: ops.ActMul | ops.Gate) -> Tensor:
        dtype = gate.dtype
        gate = gate.float()
        up = up.float()
        if how.clamp is not None:
            gate, up = gate.clamp(max=how.clamp), up.clamp(-how.clamp, how.clamp)
        f = (
            gate * by_full_vectors(torch.sigmoid, how.alpha * gate)
            if how.activation == "silu"
            else by_full_vectors(ACTIVATIONS[how.activation], gate)
        )
        return (f * (up + how.up_offset)).to(dtype)

    def product(self, x: Tensor, product: Product) -> Tensor:
        return product(x, self._linear)

    def rows_of_experts(self, experts: Tensor, num_experts: int) -> Tensor:
        return experts

    def grouped(self, x: Tensor, rows: Tensor, matrix: DeviceWeight, bias: Tensor | None) -> Tensor:
        """Multiplies expert rows.

        Few rows gather a matrix each, which needs no count from the device; for many rows, experts
        are computed one by one.
        """
        if len(x) <= GATHERED_ROWS and not self._fixed_tiles:
            y = _gather(x, rows, matrix)
        else:
            y = self._one_by_one(x, rows, matrix)
        return y if bias is None else (y.float() + bias[rows]).to(x.dtype)

    def _one_by_one(self, x: Tensor, experts: Tensor, matrix: DeviceWeight) -> Tensor:
        y = torch.empty(len(x), matrix.codes.shape[1], dtype=x.dtype, device=x.device)
        for expert in range(len(matrix.codes)):
            rows = (experts == expert).nonzero()[:, 0]
            if len(rows):
                y[rows] = self._linear(x[rows], matrix.take(expert).floats(x.dtype), None)
        return y

    def combined(self, x: Tensor, weights: Tensor) -> Tensor:
        rows = x.view(*weights.shape, x.shape[1]).float()
        total = weights[:, 0, None] * rows[:, 0]
        for j in range(1, weights.shape[1]):
            total = total + weights[:, j, None] * rows[:, j]
        return total.to(x.dtype)

    def sums(self, x: Tensor) -> Tensor:
        return x.sum(dim=1)

    def pick(
        self, z: Tensor, top: Tensor, temperature: Tensor, records: Tensor, *, cuts: bool
    ) -> Tensor:
        d, weights = sampler_ops.weigh(z, top, temperature, records)
        is_kept = sampler_ops.make_keep_mask(d, weights, records) if cuts else weights > 0
        noise = sampler_ops.gumbel(sampler_ops.noise_words(records, d.shape[1]))
        return torch.where(is_kept, d + noise, -torch.inf).argmax(dim=1)


ACTIVATIONS: dict[ops.Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
}


def _gather(x: Tensor, experts: Tensor, matrix: DeviceWeight) -> Tensor:
    return torch.bmm(matrix.take(experts).floats(x.dtype), x[:, :, None])[:, :, 0]

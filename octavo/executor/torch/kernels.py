"""Computations with Triton kernels, and the choice between plain PyTorch and Triton with PyTorch as
fallback.

`choose_kernels` decides once, by `--torch-kernels` and the device.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.api.errors import BackendUnavailable
from octavo.executor.torch.plain import Norm, PlainKernels
from octavo.executor.torch.triton.device import unsupported_reason
from octavo.executor.torch.weights.device_weight import DeviceWeight
from octavo.executor.torch.weights.program_weights import Product
from octavo.program import ops


class Kernels(Protocol):
    """Interface of a kernel set.

    Values are `[rows, width]` in the step's dtype, computed in fp32 and rounded once; rows are
    independent.
    """

    name: str
    is_invariant: bool
    """Whether a row's bits are independent of other rows."""
    captured_rows: int | None
    """Maximum number of expert rows that are computed without reading a count from the device, as
    CUDA graphs require; None: unlimited.
    """

    def norm(self, x: Tensor, norm: Norm) -> Tensor: ...

    def add_norm(self, a: Tensor, b: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Returns a + b, rounded, and its norm."""
        ...

    def gated(self, gate: Tensor, up: Tensor, how: ops.ActMul | ops.Gate) -> Tensor:
        """Returns f(gate) * (up + up_offset), as in `ops.ActMul`."""
        ...

    def product(self, x: Tensor, product: Product) -> Tensor:
        """Multiplies `x [T, in]`; returns `[T, sum of out]`."""
        ...

    def rows_of_experts(self, experts: Tensor, num_experts: int) -> Any:
        """Returns the row layout for `grouped` from `experts [R]`, the expert of each row; shared
        by all matmuls over the same rows.
        """
        ...

    def grouped(self, x: Tensor, rows: Any, matrix: DeviceWeight, bias: Tensor | None) -> Tensor:
        """Multiplies each row of `x [R, in]` by its expert's matrix of `[E, out, in]` and adds
        `bias [E, out] fp32`: `[R, out]`.
        """
        ...

    def combined(self, x: Tensor, weights: Tensor) -> Tensor:
        """Sums the k parts of each row in order, as in `Combine`: `x [T*k, W]`, `weights [T, k]
        fp32` to `[T, W]`.
        """
        ...

    def sums(self, x: Tensor) -> Tensor:
        """Returns the sum of each row of `x [S, V] fp64`."""
        ...

    def pick(
        self, z: Tensor, top: Tensor, temperature: Tensor, records: Tensor, *, cuts: bool
    ) -> Tensor:
        """Samples a token of each row, `[S]`, from logits `z [S, V]` in any float dtype (-inf for
        excluded tokens), `top` and `temperature [S] fp64` and `records [S, WORDS] int32`.

        `top` is the largest z before tokens were excluded. Applies min_p, with `cuts` also top_k
        and top_p, as in `executor/filters.py`. Undefined for rows without tokens.
        """
        ...


def choose_kernels(name: str, device: torch.device, *, fixed_tiles: bool = False) -> Kernels:
    """Returns the kernels for `name`: plain, triton, or auto (Triton on CUDA if installed).

    Raises BackendUnavailable if they cannot run. With `fixed_tiles` Triton's kernels are
    batch-invariant; plain PyTorch never is, but on a CPU its outputs are then independent of the
    number of ranks.
    """
    reason = unsupported_reason(device)
    if name == "plain" or (name == "auto" and (device.type != "cuda" or reason is not None)):
        return PlainKernels(fixed_tiles=fixed_tiles and device.type == "cpu")
    if reason is not None:
        why, hint = reason
        raise BackendUnavailable(f"torch_kernels: got {name!r}, but {why}", hint=hint)
    from octavo.executor.torch.triton.kernels import TritonKernels

    return TritonKernels(device, fixed_tiles=fixed_tiles)

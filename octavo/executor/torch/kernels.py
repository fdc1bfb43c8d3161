"""The computations that Triton has kernels for, and who does them: plain torch, or Triton with
plain torch for what its kernels do not carry.

Formulas ask a `Kernels` and never which one it is. `choose_kernels` decides once, by
`--torch-kernels` and the device.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.api.errors import BackendUnavailable
from octavo.executor.torch.plain import Norm, PlainKernels
from octavo.executor.torch.triton.device import refusal
from octavo.executor.torch.weights.device_weight import DeviceWeight
from octavo.executor.torch.weights.program_weights import Product
from octavo.program import ops


class Kernels(Protocol):
    """A set of kernels. Values are `[rows, width]` in the step's dtype, computed in fp32 and
    rounded once; rows are independent of each other.
    """

    name: str
    is_invariant: bool
    """Whether a row's numbers have the same bits whatever rows stand beside it."""
    captured_rows: int | None
    """Most expert rows that are computed without reading a count from the device, so that a graph
    can hold them; None: any number."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor: ...

    def add_norm(self, a: Tensor, b: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Returns a + b, rounded, and the norm of that."""
        ...

    def gated(self, gate: Tensor, up: Tensor, how: ops.ActMul | ops.Gate) -> Tensor:
        """Returns f(gate) * (up + up_offset), as `ops.ActMul` says."""
        ...

    def product(self, x: Tensor, product: Product) -> Tensor:
        """Multiplies `x [T, in]`: `[T, sum of out]`."""
        ...

    def rows_of_experts(self, experts: Tensor, num_experts: int) -> Any:
        """Returns what `grouped` reads of `experts [R]`, the expert of each row; made once for all
        products with the same rows.
        """
        ...

    def grouped(self, x: Tensor, rows: Any, matrix: DeviceWeight, bias: Tensor | None) -> Tensor:
        """Multiplies each row of `x [R, in]` with its expert's matrix of `[E, out, in]` and adds
        its expert's `bias [E, out] fp32`: `[R, out]`.
        """
        ...

    def combined(self, x: Tensor, weights: Tensor) -> Tensor:
        """Sums the k parts of each row in their order, as `ops.Combine` says: `x [T*k, W]` and
        `weights [T, k] fp32` to `[T, W]`.
        """
        ...

    def sums(self, x: Tensor) -> Tensor:
        """Returns the sum of each row of `x [S, V] fp64`."""
        ...

    def pick(self, d: Tensor, weights: Tensor, records: Tensor, *, cuts: bool) -> Tensor:
        """Draws a token of each row `[S]` from `d`, `weights [S, V] fp64`, by the rows' `records
        [S, WORDS] int32`.

        d = (z - max z) / temperature and exp(d), 0 for tokens that may not be drawn; top_k and
        top_p count with `cuts`. As in `executor/filters.py`; without meaning in a
        row without weights.
        """
        ...


def choose_kernels(wanted: str, device: torch.device, *, fixed_tiles: bool = False) -> Kernels:
    """Returns the kernels that `wanted` names: plain, triton, or auto, which is Triton's on CUDA
    where Triton is installed. Raises BackendUnavailable where they cannot run.

    With `fixed_tiles` Triton's kernels are invariant; plain torch never is.
    """
    refused = refusal(device)
    if wanted == "plain" or (wanted == "auto" and (device.type != "cuda" or refused is not None)):
        return PlainKernels()
    if refused is not None:
        why, hint = refused
        raise BackendUnavailable(f"torch_kernels: got {wanted!r}, but {why}", hint=hint)
    from octavo.executor.torch.triton.kernels import TritonKernels

    return TritonKernels(device, fixed_tiles=fixed_tiles)

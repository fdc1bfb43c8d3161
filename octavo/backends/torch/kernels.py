"""Who computes what Triton has kernels for: plain torch, or Triton's kernels with plain torch for
what they cannot carry.

Formulas ask a `Kernels` and never which one it is. Chosen once, by `--torch-kernels` and the device
(`choose_kernels`).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.backends.torch.plain import Cuts, Norm, PlainKernels
from octavo.backends.torch.triton.device import refusal
from octavo.backends.torch.weights import DeviceWeight, Product
from octavo.errors import BackendUnavailable
from octavo.program import ops


class Kernels(Protocol):
    """Values are `[rows, width]` in the step's dtype, computed in fp32 and rounded once; rows are
    independent of each other.
    """

    name: str
    is_invariant: bool
    """A row's numbers are the same bits in any company."""
    captured_rows: int | None
    """Expert rows up to which experts are computed without a word from the device, so that a graph
    can hold them; None: any number.
    """

    def norm(self, x: Tensor, norm: Norm) -> Tensor: ...

    def add_norm(self, a: Tensor, b: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """a + b, rounded, and its norm."""
        ...

    def gated(self, gate: Tensor, up: Tensor, how: ops.ActMul | ops.Gate) -> Tensor:
        """f(gate) * (up + up_offset), as `ops.ActMul` says."""
        ...

    def product(self, x: Tensor, product: Product) -> Tensor:
        """`x [T, in]` to `[T, sum of out]`."""
        ...

    def rows_of_experts(self, experts: Tensor, num_experts: int) -> Any:
        """What `grouped` wants to know of `experts [R]`, each row's: made once for all products
        with the same rows.
        """
        ...

    def grouped(self, x: Tensor, rows: Any, matrix: DeviceWeight, bias: Tensor | None) -> Tensor:
        """`x [R, in]` to `[R, out]`: each row times its expert's matrix of `[E, out, in]`, plus its
        expert's `bias [E, out] fp32`.
        """
        ...

    def combined(self, x: Tensor, weights: Tensor) -> Tensor:
        """`x [T*k, W]`, `weights [T, k] fp32` to `[T, W]`: a row's k parts summed in their order,
        as `ops.Combine` says.
        """
        ...

    def sums(self, x: Tensor) -> Tensor:
        """`x [S, V] fp64`: each row's."""
        ...

    def pick(self, z: Tensor, weights: Tensor, points: Tensor, cuts: Cuts) -> Tensor:
        """A token of each row `[S]`. `z`, `weights [S, V] fp64`: logits, and exp(z - max z), 0 for
        tokens that may not be drawn; `points [S] fp64` in [0, 1). Cuts and draws as steps 5 and 6
        of `backends/sampling.py`. Means nothing in a row without weights.
        """
        ...


def choose_kernels(wanted: str, device: torch.device, *, fixed_tiles: bool = False) -> Kernels:
    """`wanted`: auto (Triton's on CUDA where Triton is installed), plain or triton.
    BackendUnavailable says why there are none.

    `fixed_tiles`: Triton's are to be invariant, which plain torch's never are.
    """
    refused = refusal(device)
    if wanted == "plain" or (wanted == "auto" and (device.type != "cuda" or refused is not None)):
        return PlainKernels()
    if refused is not None:
        why, hint = refused
        raise BackendUnavailable(f"torch_kernels: got {wanted!r}, but {why}", hint=hint)
    from octavo.backends.torch.triton.kernels import TritonKernels

    return TritonKernels(device, fixed_tiles=fixed_tiles)

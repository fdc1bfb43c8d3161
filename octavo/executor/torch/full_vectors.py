"""Computations whose columns do not depend on the number of columns on a CPU, so that one rank's
part of them has the bits of the whole.

PyTorch's loops compute the tail of a vector with other formulas, and its matmuls the last outputs
in another order. Both are avoided by padding. Other devices compute all columns alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

VECTOR_COLUMNS = 64
"""Columns of an elementwise loop's step: a multiple of those of every instruction set."""
TILE_OUTPUTS = 16
"""Outputs of a matmul that are computed alike; MKL requires a multiple of 4 for one row."""


def by_full_vectors(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies an elementwise function to `x [T, W]`."""
    missing = -x.shape[1] % VECTOR_COLUMNS if x.device.type == "cpu" else 0
    return compute(F.pad(x, (0, missing)))[:, : x.shape[1]] if missing else compute(x)


def linear_by_tiles(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x `[T, in]` @ `weight [out, in]`^T + `bias [out]`; T is 1 if one rank's part shall
    have the bits of the whole.
    """
    rest = len(weight) % TILE_OUTPUTS if x.device.type == "cpu" else 0
    if not rest:
        return F.linear(x, weight, bias)
    whole, missing = len(weight) - rest, TILE_OUTPUTS - rest
    last_bias = None if bias is None else F.pad(bias[whole:], (0, missing))
    last = F.linear(x, F.pad(weight[whole:], (0, 0, 0, missing)), last_bias)[:, :rest]
    if not whole:
        return last
    first_bias = None if bias is None else bias[:whole]
    return torch.cat([F.linear(x, weight[:whole], first_bias), last], dim=1)

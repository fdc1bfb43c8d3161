"""Products of Triton's interpreter, each row summed in one order whatever block it stands in.

The interpreter multiplies blocks with NumPy, and so with BLAS, which computes the rows at a block's
edge with other kernels than those inside: a row's last bits depend on its place in the block and on
the block's height. A GPU's instruction sums each row alike, and kernels promise equal bits because
of that.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def ordered_product(a: NDArray, b: NDArray, dtype: np.dtype) -> NDArray:
    """Returns `a [.., M, K] @ b [.., K, N]`, summed from the first of K to the last."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
    for k in range(a.shape[-1]):
        total += a[..., k, None].astype(dtype) * b[..., k, None, :].astype(dtype)
    return total


def sum_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter's products sum in a fixed order, except those of 8-bit floats."""
    by_blas = InterpreterBuilder.create_dot

    def create_dot(builder, a, b, d, *precision):
        if any(x.dtype.primitive_bitwidth == 8 and x.dtype.is_floating() for x in (a, b)):
            return by_blas(builder, a, b, d, *precision)
        product = ordered_product(a.data, b.data, d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)

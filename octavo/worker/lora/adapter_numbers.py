"""An adapter's matrices in their stored precision.

int8 is symmetric, with one scale per rank of A and one per rank of B: the product of both scales is
the only extra multiplication, and sums stay exact in fp32.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

LoraDtype = Literal["auto", "float32", "bfloat16", "int8"]

MAX_CODE = 127


@dataclass(frozen=True, slots=True, eq=False)
class LoraMatrices:
    """A and B of one module in their stored precision."""

    a: NDArray
    """A, `[r, in]`; for an embedding table `[r, V]`."""
    b: NDArray
    """B, `[out, r]`."""
    scales: NDArray[np.float64]
    """Scale of each rank, `[r]`, without the adapter's scale."""

    @staticmethod
    def convert(a: NDArray, b: NDArray, dtype: LoraDtype) -> LoraMatrices:
        """Converts A and B. `auto` keeps bfloat16 if both have it, else uses float32."""
        if dtype == "int8":
            a_codes, a_scales = _codes(a, axis=1)
            b_codes, b_scales = _codes(b, axis=0)
            return LoraMatrices(a_codes, b_codes, a_scales * b_scales)
        if dtype == "auto":
            both = {a.dtype.name, b.dtype.name}
            dtype = "bfloat16" if both == {"bfloat16"} else "float32"
        target_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
        with np.errstate(over="ignore"):
            return LoraMatrices(a.astype(target_dtype), b.astype(target_dtype), np.ones(len(a)))

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite. Large float32 values are not finite in bfloat16."""
        arrays = (self.a, self.b, self.scales)
        with np.errstate(over="ignore"):
            return all(np.isfinite(each.astype(np.float32)).all() for each in arrays)

    def product(self, rows: slice | list[int]) -> NDArray[np.float64]:
        """Returns these rows of the product B A, `[rows, in]`."""
        return (self.b[rows].astype(np.float64) * self.scales) @ self.a.astype(np.float64)


def get_stored_digest(digest: bytes, dtype: LoraDtype) -> bytes:
    """Returns the digest of an adapter's content combined with its stored precision."""
    if dtype == "auto":
        return digest
    return hashlib.blake2b(digest, digest_size=len(digest), key=dtype.encode()).digest()


def describe_lora_dtype(dtype: LoraDtype) -> str:
    """Returns the startup message about the precision of adapters; "" if it is exact."""
    if dtype != "int8":
        return ""
    return "approximate: adapters are kept in int8, with a scale for each rank"


def _codes(matrix: NDArray, *, axis: int) -> tuple[NDArray[np.int8], NDArray[np.float64]]:
    """Returns the int8 codes of a matrix and the scale of each rank; the codes along `axis` have a
    common scale.
    """
    numbers = matrix.astype(np.float64)
    scales = np.abs(numbers).max(axis=axis, initial=0.0) / MAX_CODE
    divisors = np.where(scales > 0, scales, 1.0)
    codes = np.rint(numbers / np.expand_dims(divisors, axis)).astype(np.int8)
    return codes, scales

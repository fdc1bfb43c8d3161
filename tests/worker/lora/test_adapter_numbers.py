"""Adapters' matrices in the precision that they are kept in."""

import ml_dtypes
import numpy as np
import pytest

from octavo.worker.lora.adapter_numbers import LoraMatrices, describe_lora_dtype, get_stored_digest

GENERATOR = np.random.default_rng(0)
A = GENERATOR.standard_normal((5, 40)).astype(np.float32)
B = GENERATOR.standard_normal((24, 5)).astype(np.float32)


def test_codes_are_within_half_a_step():
    """Each number is off by at most half of its rank's step, and the largest is exact."""
    kept = LoraMatrices.convert(A, B, "int8")
    a_steps, b_steps = np.abs(A).max(axis=1) / 127, np.abs(B).max(axis=0) / 127
    np.testing.assert_allclose(kept.scales, a_steps * b_steps, rtol=1e-6)
    assert kept.a.dtype == kept.b.dtype == np.int8
    assert np.all(np.abs(kept.a * a_steps[:, None] - A) <= a_steps[:, None] * 0.500001)
    assert np.all(np.abs(kept.b * b_steps - B) <= b_steps * 0.500001)
    assert np.all(np.abs(kept.a).max(axis=1) == 127)


def test_a_rank_of_zeros_stays_zero():
    a = A.copy()
    a[2] = 0
    kept = LoraMatrices.convert(a, B, "int8")
    assert kept.scales[2] == 0 and not kept.a[2].any() and kept.is_finite
    assert LoraMatrices.convert(a[:0], B[:, :0], "int8").product(slice(None)).shape == (24, 40)


def test_rows_of_the_product():
    exact = B.astype(np.float64) @ A
    for dtype, error in (("float32", 1e-6), ("bfloat16", 0.02), ("int8", 0.02)):
        kept = LoraMatrices.convert(A, B, dtype)
        found = kept.product([3, 1])
        assert np.abs(found - exact[[3, 1]]).max() < error * np.abs(exact).max()


@pytest.mark.parametrize(
    ("types", "dtype", "wanted"),
    [
        ((np.float32, np.float32), "auto", "float32"),
        ((ml_dtypes.bfloat16, ml_dtypes.bfloat16), "auto", "bfloat16"),
        ((ml_dtypes.bfloat16, np.float32), "auto", "float32"),
        ((ml_dtypes.bfloat16, ml_dtypes.bfloat16), "float32", "float32"),
        ((np.float32, np.float32), "bfloat16", "bfloat16"),
        ((ml_dtypes.bfloat16, ml_dtypes.bfloat16), "int8", "int8"),
    ],
)
def test_a_precision_is_the_files_or_the_one_that_is_asked_for(types, dtype, wanted):
    kept = LoraMatrices.convert(A.astype(types[0]), B.astype(types[1]), dtype)
    assert kept.a.dtype.name == kept.b.dtype.name == wanted


def test_what_is_approximate_has_a_name_of_its_own():
    digests = {
        get_stored_digest(b"d" * 32, dtype) for dtype in ("auto", "float32", "bfloat16", "int8")
    }
    assert len(digests) == 4 and all(len(each) == 32 for each in digests)
    assert describe_lora_dtype("int8").startswith("approximate: adapters are kept in int8")
    assert not describe_lora_dtype("bfloat16")
